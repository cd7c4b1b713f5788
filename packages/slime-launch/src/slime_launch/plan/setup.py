"""The part of a command that its speed depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """The part of a command that its speed depends on.

    Attributes:
        prompts: Groups that a rollout is trained on, each of ``samples`` responses.
        steps: Rollouts that are simulated.
        optimizer_steps: Of each rollout.
        in_flight: Groups in flight for a rollout (``--over-sampling-batch-size``).
        ahead: Rollouts generated ahead (``--async-buffer-size``); ``None`` in a run that takes turns.
        most_stale: Most versions between a token and its training (``--max-weight-staleness``).
        longest: Most tokens of a response.
        concurrency: Most responses in flight.
        hands_over: Whether trainers and engines give each other the GPUs.
    """

    actor_gpus: int
    engines: int
    prompts: int
    samples: int
    steps: int
    optimizer_steps: int = 1
    in_flight: int | None = None
    partial: bool = False
    ahead: int | None = None
    most_stale: int | None = None
    update_interval: int = 1
    save_interval: int | None = None
    evaluate_interval: int | None = None
    longest: int | None = None
    concurrency: int = 2**62
    hands_over: bool = False
    seed: int = 1


def setup_of(flags: Mapping[str, Any], *, steps: int) -> Setup:
    """The setup of a run's flags by their names in Python, such as `Settings.flags`, for at most so many steps."""
    actor = flags["actor_num_nodes"] * flags["actor_num_gpus_per_node"]
    rollout = flags["rollout_num_gpus"] or actor
    return Setup(
        actor_gpus=actor,
        engines=max(1, rollout // flags["rollout_num_gpus_per_engine"]),
        prompts=flags["rollout_batch_size"],
        samples=flags["n_samples_per_prompt"],
        steps=max(1, min(steps, flags["num_rollout"] or steps)),
        optimizer_steps=flags["num_steps_per_rollout"],
        in_flight=flags["over_sampling_batch_size"],
        partial=flags["partial_rollout"],
        ahead=flags["async_buffer_size"],
        most_stale=flags["max_weight_staleness"],
        update_interval=flags["update_weights_interval"],
        save_interval=flags["save_interval"] if flags["save"] is not None else None,
        evaluate_interval=flags["eval_interval"] if flags["eval_prompt_data"] or flags["eval_config"] else None,
        longest=flags["rollout_max_response_len"],
        concurrency=flags["rollout_concurrency"],
        hands_over=sleeps(flags, "train") or sleeps(flags, "rollout"),
    )


def sleeps(flags: Mapping[str, Any], half: str) -> bool:
    """Whether trainers (``train``) or engines (``rollout``) give their memory back while the others work."""
    asked = flags["colocate"] or flags["offload"] or flags[f"offload_{half}"]
    return bool(asked and not flags[f"no_offload_{half}"])
