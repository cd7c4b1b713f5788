"""Prompts in, scored and versioned samples out.

`slime_rollout.rollout.RolloutManager` puts the parts together: `data` reads prompts, `generate` samples from SGLang,
`rewards` scores, `store` keeps finished rollouts. Importing this imports none of them; what custom generate functions
use is found here by name when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_rollout.engine.addresses import auth_headers, get_model_url
    from slime_rollout.generate.custom import current
    from slime_rollout.generate.trajectory import GenerateState, Trajectory, call_tool, generate_single, post

__all__ = [
    "GenerateState",
    "Trajectory",
    "auth_headers",
    "call_tool",
    "current",
    "generate_single",
    "get_model_url",
    "post",
]

_MODULES = {
    "GenerateState": "generate.trajectory",
    "Trajectory": "generate.trajectory",
    "auth_headers": "engine.addresses",
    "call_tool": "generate.trajectory",
    "current": "generate.custom",
    "generate_single": "generate.trajectory",
    "get_model_url": "engine.addresses",
    "post": "generate.trajectory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"slime_rollout.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
