"""The inputs and reports of the training half. No torch here: arrays that any process can read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from slime_core.errors import ConfigError, DamagedError
from slime_core.types.arrays import Columns, Ragged, read_npz, write_npz


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where a trainer rank meets the others. One rank alone needs neither a file nor a port.

    Attributes:
        file: For ranks of one machine: a path that does not exist yet, in a folder that only their user can open.
        address: Rank 0's host. On the loopback address, gloo and NCCL keep to this machine as well.
        port: Else, a TCP port there. Whoever reaches it can read and set what ranks leave for each other, and join.
        listen: For rank 0, the file descriptor of a socket that listens there already; without one it opens its own.

    Raises:
        ConfigError: Several ranks have neither a file nor a port, or both.
    """

    rank: int
    world_size: int
    address: str = "127.0.0.1"
    port: int = 0
    listen: int | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if self.world_size > 1 and (self.file is None) == (self.port == 0):
            given = "no place" if self.file is None else "a file and a port"
            raise ConfigError(
                f"{self.world_size} ranks have {given} to meet at; give file=PATH on one machine, or address and port"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainSample:
    """A scored sample, ready for the loss.

    Attributes:
        index: The sample's number in the run.
        group_index: Samples of one prompt share it.
        tokens: Token ids of prompt and response, int32.
        response_length: R, the number of response tokens at the end of ``tokens``.
        loss_mask: R numbers, uint8, 1 where the token is trained on.
        trajectory_tokens: Trained tokens of its whole trajectory, which may have several samples.
        reward: Reward that the advantage estimator starts from: after the group's mean, for those that take it off.
        raw_reward: Reward as given.
        rollout_log_probs: R log-probs (nats) of the engine, float32, or ``None``.
        teacher_log_probs: R log-probs (nats) of the teacher in on-policy distillation, float32, or ``None``.
        extras: Whatever else the rollout says of this sample or its tokens, by name.
    """

    index: int
    group_index: int
    tokens: NDArray[Any]
    response_length: int
    loss_mask: NDArray[np.uint8]
    trajectory_tokens: int
    reward: float
    raw_reward: float
    rollout_log_probs: NDArray[np.float32] | None = None
    teacher_log_probs: NDArray[np.float32] | None = None
    extras: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """One optimizer step as one data-parallel rank sees it.

    Attributes:
        micro_batches: Per micro-batch, positions in ``TrainShard.samples``. All ranks have equally many.
        global_trajectories: Trajectories, mostly of one sample, in this step over all ranks: the denominator of a mean.
        global_tokens: Trained tokens (mask 1) in this step over all ranks: the denominator of a per-token loss.
    """

    micro_batches: list[list[int]]
    global_trajectories: int
    global_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainShard:
    """One data-parallel rank's part of a rollout. It travels as arrays; :attr:`samples` are views of them.

    Attributes:
        rollout_id: Number of the rollout.
        temperature: Sampling temperature; the trainer divides its logits by it.
        columns: The fields of this rank's samples, and the extras, by name.
        steps: The optimizer steps, in order.
    """

    rollout_id: int
    temperature: float
    columns: Columns
    steps: list[TrainStep]

    @classmethod
    def of(
        cls, *, rollout_id: int, temperature: float, samples: Sequence[TrainSample], steps: list[TrainStep]
    ) -> TrainShard:
        """A shard with copies of the samples' arrays."""
        columns: Columns = {
            name: np.array([getattr(sample, name) for sample in samples], dtype) for name, dtype in _NUMBERS.items()
        }
        for name, dtype in _ROWS.items():
            columns[name] = Ragged.of([getattr(sample, name) for sample in samples], dtype)
        for name in {name: None for sample in samples for name in sample.extras}:
            columns[name] = _extra([sample.extras.get(name) for sample in samples])
        return cls(rollout_id=rollout_id, temperature=temperature, columns=columns, steps=steps)

    @functools.cached_property
    def samples(self) -> list[TrainSample]:
        """The samples of this rank: the same objects with every call."""
        known = (*_NUMBERS, *_ROWS)
        extras = [name for name in self.columns if name not in known]
        columns = [self.columns[name] for name in (*known, *extras)]
        fields = [column.rows if isinstance(column, Ragged) else column.tolist() for column in columns]
        return [
            TrainSample(**dict(zip(known, row, strict=False)), extras=dict(zip(extras, row[len(known) :], strict=True)))
            for row in zip(*fields, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def write(self, path: str | Path) -> None:
        """Write an ``.npz`` file (:mod:`slime_core.types.arrays`), whole or not at all. Its directory must exist."""
        head = {
            "rollout_id": self.rollout_id,
            "temperature": self.temperature,
            "steps": [dataclasses.asdict(step) for step in self.steps],
        }
        write_npz(path, head, self.columns)

    @classmethod
    def read(cls, path: str | Path) -> TrainShard:
        """The reverse of :meth:`write`. Executes nothing, whatever the file is.

        Raises:
            FormatVersionError: The file is in a version of the format that this slime does not know.
            DamagedError: It was cut off or altered, or is something else.
        """
        head, columns = read_npz(path, "a file of train data")
        if head.keys() != {"rollout_id", "temperature", "steps"} or not columns.keys() >= {*_NUMBERS, *_ROWS}:
            raise DamagedError("a file of train data lacks some of its entries; train on that rollout again")
        return cls(**(head | {"steps": [TrainStep(**step) for step in head["steps"]]}), columns=columns)


def _extra(values: list[Any]) -> Ragged | NDArray[Any]:
    if all(value is None or isinstance(value, np.ndarray) for value in values):
        return Ragged.of(values)
    return np.array([0 if value is None else value for value in values])


_NUMBERS: dict[str, DTypeLike] = {
    **dict.fromkeys(("index", "group_index", "response_length", "trajectory_tokens"), np.int64),
    **dict.fromkeys(("reward", "raw_reward"), np.float64),
}
_ROWS: dict[str, DTypeLike] = {
    "tokens": np.int32,
    "loss_mask": np.uint8,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}


SHOWN = "shown"
"""Name of the extra that marks the samples in the run's report: what is computed for these is kept."""


KEPT_IDS, KEPT_COUNTS = "kept_ids", "kept_counts"
"""Names of the extras that say what tokens were sampled from: ids, int32, and how many of them each token has [R]."""

ROUTED_EXPERTS = "routed_experts"
"""Name of the extra with the experts that the engine chose: a row of numbers for each token but the last ones, if it is
not known for these (:mod:`slime_core.types.routed`)."""


class Span(NamedTuple):
    """A stretch of time in which somebody did something.

    Attributes:
        who: ``loop``, ``rollout`` or ``rank 0``.
        what: The phase, such as ``generate`` or ``forward_backward``.
        start: Seconds since 1970, by the clock of that machine.
        seconds: How long it took.
    """

    who: str
    what: str
    start: float
    seconds: float


@dataclasses.dataclass(kw_only=True)
class TrainReport:
    """The result of training on one rollout.

    Attributes:
        steps: Metrics of each optimizer step, equal on all ranks: ``loss``, ``grad_norm``, ``lr`` …; ``kl`` is of its
            samples before the first step. Where no token of a step counts, such as with equal rewards in every group,
            there is no ``loss``; ask with ``get``.
        seconds: Wall time per phase on this rank.
        tokens: Tokens computed per phase on this rank, without padding; a shared prompt counts once.
        performance: Tokens per second, operations per second and memory over all ranks, by metric name.
        spans: When this rank did what since its last report.
        weight_names: Names of the policy's weights.
        weight_sums: Checksums of them after the last step [names, L], uint32; ``None`` if they were not trained.
    """

    rollout_id: int
    steps: list[dict[str, float]]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    performance: dict[str, float] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    weight_names: list[str] = dataclasses.field(default_factory=list)
    weight_sums: NDArray[np.uint32] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightUpdate:
    """The contents of a push of weights: every weight of the model (``full``), as weight version ``version``."""

    version: int
    kind: Literal["full"] = "full"


@dataclasses.dataclass(kw_only=True)
class SleepReport:
    """The memory of a trainer rank after it gave some back, in bytes.

    Attributes:
        device: Of its weights, gradients and optimizer state that are still on the device.
        waiting: Of those that wait elsewhere: in host memory, where there is a GPU, in a file on a CPU.
        resident: Of the whole process: memory of the GPU that torch has allocated, or on a CPU all but mapped files.
    """

    device: int
    waiting: int
    resident: int


@dataclasses.dataclass(kw_only=True)
class SyncReport:
    """The result of one push of weights: the version that the engines confirmed, the amount sent, and the wall time."""

    version: int
    tensors: int
    bytes: int
    seconds: float
