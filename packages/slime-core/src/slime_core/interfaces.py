"""Where slime's packages meet. Each protocol has one job; records from `slime_core.types` go in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slime_core.types import EvalReport, Group, RolloutBatch, SyncReport, TrainReport, TrainShard

if TYPE_CHECKING:
    import torch

NamedTensors = Sequence[tuple[str, "torch.Tensor"]]


@runtime_checkable
class DataSource(Protocol):
    """Where groups of fresh samples come from. Its state is plain values that JSON can hold."""

    def get_samples(self, num_groups: int) -> list[Group]:
        """The next ``num_groups`` groups, ready for generation."""
        ...

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back, to be handed out again."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to continue with exactly the next group."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        ...


@runtime_checkable
class Rollout(Protocol):
    """The generation half."""

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score one rollout."""
        ...

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score the held-out prompts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State of the data source, as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        ...


@runtime_checkable
class WeightChannel(Protocol):
    """The sending end of a weight sync. Picklable; connects in :meth:`begin`."""

    def begin(self, version: int) -> None:
        """Open the update to weight version ``version`` on every engine."""
        ...

    def send(self, bucket: NamedTensors) -> None:
        """Send some Hugging Face-named tensors."""
        ...

    def end(self) -> None:
        """Close the update; return only when every engine has confirmed the version."""
        ...


@runtime_checkable
class TrainerWorker(Protocol):
    """One rank of the training half. Every rank gets every call, in the same order."""

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout."""
        ...

    def push_weights(self, channel: WeightChannel, version: int) -> SyncReport:
        """Send the current weights through ``channel``. All ranks gather; rank 0 sends."""
        ...

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when all ranks have returned."""
        ...
