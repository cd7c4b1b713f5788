"""The generation half's face to a launcher: what gives a run its batches, from its settings to what is trained on.

Importing this imports nothing else: a name loads its module when it is first asked for. `slime_rollout.checks` has what
can be asked before a run starts; flags are in `slime_rollout.config` and `engine.config`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_rollout.canary import CanaryTokens
    from slime_rollout.data_service import DataService, DataSpec, Rows
    from slime_rollout.engine import EngineRestartsError, WeightSyncError
    from slime_rollout.engine.channels import ChannelSpec
    from slime_rollout.generation_service import TURNS_FILE, GenerationService
    from slime_rollout.hooks import hook_args_of
    from slime_rollout.limits import ModelLimits
    from slime_rollout.prepare import BatchSpec, prepare_rollout, read_rollout, split_held_out
    from slime_rollout.ready import EXAMPLES, NO_ADVANTAGE, Example, ReadyRollout, examples
    from slime_rollout.serving_engines import GenerationSpec
    from slime_rollout.shown import MOST_TOKENS, SAMPLES_DIR
    from slime_rollout.store import RolloutStore
    from slime_rollout.threads import start_call
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "canary": "CanaryTokens",
            "data_service": "DataService DataSpec Rows",
            "engine": "EngineRestartsError WeightSyncError",
            "engine.channels": "ChannelSpec",
            "generation_service": "TURNS_FILE GenerationService",
            "hooks": "hook_args_of",
            "limits": "ModelLimits",
            "prepare": "BatchSpec prepare_rollout read_rollout split_held_out",
            "ready": "EXAMPLES NO_ADVANTAGE Example ReadyRollout examples",
            "serving_engines": "GenerationSpec",
            "shown": "MOST_TOKENS SAMPLES_DIR",
            "store": "RolloutStore",
            "threads": "start_call",
        },
    )
