"""Flags that were given and have no effect in a run of this kind. They may stand in a command: one more flag makes it
another kind of run, such as `--debug-rollout-only`. What they are is said at start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime_core.config import AlgorithmConfig
from slime_core.flags import flag_specs
from slime_launch.config import Settings
from slime_megatron.config import MegatronConfig
from slime_rollout.config import EvalConfig
from slime_rollout.engine.config import EngineConfig, WeightSyncConfig

_GENERATION = frozenset(
    (
        *("colocate", "rollout_num_gpus", "rollout_max_num_gpus", "custom_generate_function_path"),
        *("custom_generate_timeout", "max_turns", "rollout_stop"),
        *("rollout_stop_token_ids", "rollout_concurrency", "rollout_request_timeout"),
        *("over_sampling_batch_size", "dynamic_sampling_filter_path", "dynamic_sampling_max_prompts"),
        *("partial_rollout", "mask_offpolicy_in_partial_rollout", "async_buffer_size"),
        *("max_weight_staleness", "update_weights_interval"),
    )
)
_EVALUATION = frozenset({"eval_interval", "skip_eval_before_train"})
_OF_ALL = frozenset({"bf16", "fp32", "seed", "save", "load", "ref_load"})
"""Flags of the trainer that engines or checkpoints also go by, or of which something else is said."""


def idle_flags(settings: Settings) -> Iterator[tuple[str, list[str]]]:
    """Why flags that were given have no effect, and which."""
    # Held-out rows are scored by the loss itself.
    untrained = not settings.trains or (settings.only_evaluates and settings.rows is None)
    parts: list[tuple[bool, str, frozenset[str]]] = [
        (not settings.generates, "nothing is generated", _GENERATION | _dests(EngineConfig)),
        (settings.is_recorded, "held-out prompts are not scored", _EVALUATION | _dests(EvalConfig)),
        (
            untrained,
            "nothing is trained",
            _dests(AlgorithmConfig) - {"use_opd"}
            | {"rollout_data_postprocess_path", "max_logprob_drift", "logprob_drift_action"},
        ),
        (
            not settings.rollout.may_lag,
            "all tokens are of the weights that train on them",
            frozenset({"keep_old_actor"}),
        ),
        (not settings.trains, "there are no trainers", _dests(MegatronConfig) | _dests(WeightSyncConfig)),
        (
            settings.only_evaluates or settings.run.debug_rollout_only,
            "weights stay as they are",
            frozenset({"update_weights_interval", "num_steps_per_rollout", "save_hf", "async_save", "no_async_save"}),
        ),
    ]
    said: set[str] = set(_OF_ALL)
    for is_so, why, dests in parts:
        if is_so and (given := [dest for dest in settings.origins if dest in dests - said]):
            said.update(given)
            yield why, [f"--{dest.replace('_', '-')}" for dest in given]


def _dests(config: type[Any]) -> frozenset[str]:
    return frozenset(spec.dest for spec in flag_specs(config))
