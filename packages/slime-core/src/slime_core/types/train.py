"""What the training half takes in and gives back. No torch here: plain numbers that any process can read."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where a trainer rank meets the others.

    Attributes:
        rank: This process's number, from 0.
        world_size: Number of processes.
        address: Host of rank 0.
        port: TCP port on that host.
    """

    rank: int
    world_size: int
    address: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSample:
    """A scored sample, ready for the loss.

    Attributes:
        index: The sample's number in the run.
        group_index: Samples of one prompt share it.
        tokens: Token ids of prompt and response.
        response_length: R, the number of response tokens at the end of ``tokens``.
        loss_mask: R numbers, 1 where the token is trained on.
        trajectory_tokens: Trained tokens of its whole trajectory, of which it may be one sample of several.
        reward: Reward that the advantage estimator starts from: after the group's mean, for those that take it off.
        raw_reward: Reward as given.
        rollout_log_probs: R log-probs (nats) of the engine, or ``None``.
        teacher_log_probs: R log-probs (nats) of the teacher in on-policy distillation, or ``None``.
    """

    index: int
    group_index: int
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    trajectory_tokens: int
    reward: float
    raw_reward: float
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One optimizer step as one data-parallel rank sees it.

    Attributes:
        micro_batches: Per micro-batch, positions in ``TrainShard.samples``. All ranks have equally many.
        global_trajectories: Trajectories in this step over all ranks: the denominator of a mean over them. Mostly a
            trajectory is one sample.
        global_tokens: Trained tokens (mask 1) in this step over all ranks: the denominator of a per-token loss.
    """

    micro_batches: list[list[int]]
    global_trajectories: int
    global_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainShard:
    """One data-parallel rank's part of a rollout.

    Attributes:
        rollout_id: Number of the rollout.
        temperature: Sampling temperature; the trainer divides its logits by it.
        samples: The samples of this rank.
        steps: The optimizer steps, in order.
    """

    rollout_id: int
    temperature: float
    samples: list[TrainSample]
    steps: list[TrainStep]


@dataclasses.dataclass(kw_only=True)
class TrainReport:
    """What training on one rollout gave.

    Attributes:
        rollout_id: Number of the rollout.
        steps: Metrics of each optimizer step, equal on all ranks: ``loss``, ``grad_norm``, ``lr`` …
        seconds: Wall time per phase on this rank.
        tokens: Tokens computed per phase on this rank (padding and shared prompts counted as computed).
    """

    rollout_id: int
    steps: list[dict[str, float]]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """What a push of weights sends.

    Attributes:
        version: The weight version that the engines shall confirm.
        kind: ``full``: every weight of the model.
    """

    version: int
    kind: Literal["full"] = "full"


@dataclasses.dataclass(kw_only=True)
class SyncReport:
    """What one push of the weights did.

    Attributes:
        version: The weight version that the engines confirmed.
        tensors: Number of tensors sent.
        bytes: Bytes sent.
        seconds: Wall time.
    """

    version: int
    tensors: int
    bytes: int
    seconds: float
