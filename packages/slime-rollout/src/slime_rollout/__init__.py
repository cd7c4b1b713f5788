"""Prompts in, scored and versioned samples out.

`slime_rollout.rollout.RolloutManager` puts the parts together: `data` reads prompts, `generate` samples from SGLang,
`rewards` scores, `store` keeps finished rollouts. Importing this imports none of them; what custom generate functions
use is found here by name when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_rollout.engine.addresses import auth_headers as auth_headers
    from slime_rollout.engine.addresses import get_model_url as get_model_url
    from slime_rollout.generate.custom import current as current
    from slime_rollout.generate.trajectory import GenerateState as GenerateState
    from slime_rollout.generate.trajectory import Trajectory as Trajectory
    from slime_rollout.generate.trajectory import call_tool as call_tool
    from slime_rollout.generate.trajectory import generate_single as generate_single
    from slime_rollout.generate.trajectory import post as post
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "engine.addresses": "auth_headers get_model_url",
            "generate.custom": "current",
            "generate.trajectory": "GenerateState Trajectory call_tool generate_single post",
        },
    )
