"""Where slime's packages meet. Each protocol has one job; records from `slime_core.types` go in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from slime_core.former_names import renamed
from slime_core.types import (
    Account,
    EvalReport,
    Group,
    Progress,
    RolloutBatch,
    Sample,
    SleepReport,
    SyncReport,
    TrainReport,
    TrainShard,
    WeightUpdate,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

NamedTensors = Sequence[tuple[str, "torch.Tensor"]]
RewardValue = float | dict[str, Any]
"""One number, or several by name, perhaps among other values that JSON can hold."""


@runtime_checkable
class DataSource(Protocol):
    """Where groups of fresh samples come from. Its state is plain values that JSON can hold."""

    def get_samples(self, num_groups: int) -> list[Group]:
        """The next ``num_groups`` groups, ready for generation."""

    def add_samples(self, groups: list[Group]) -> None:
        """Give groups back, to be handed out again."""

    def state_dict(self) -> dict[str, Any]:
        """All that :meth:`load_state_dict` needs to continue with exactly the next group."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""


class Reward(Protocol):
    """Scores one sample."""

    async def __call__(self, sample: Sample) -> RewardValue:
        """The reward of a finished sample."""


class GroupReward(Protocol):
    """Scores all samples of a prompt together, where a score depends on the others."""

    async def __call__(self, group: Group) -> list[RewardValue]:
        """The rewards of the group's finished samples, in their order."""


@runtime_checkable
class Batches(Protocol):
    """A run's batches, one after the other: generated, rows of a data set, or read from files.

    :meth:`progress` and :meth:`cancel` may be called from another thread at any time; all others one after the other.
    """

    def start(self) -> list[str] | None:
        """Start engines, or read the data; may return what a user should know, a line each."""

    def generate(self, rollout_id: int) -> RolloutBatch:
        """The batch of this number."""

    def account(self) -> Account | None:
        """The fate of all samples so far, where they are counted."""

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, as plain values that JSON can hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the position where ``state`` was saved."""

    def cancel(self) -> None:
        """End what another thread waits for, which raises `CancelledError`."""

    def progress(self) -> Progress:
        """How far it is; raises if something that it needs is gone."""

    def close(self) -> None:
        """Stop everything in order."""


Target = TypeVar("Target", covariant=True)
Tokens = TypeVar("Tokens", contravariant=True)


@runtime_checkable
class Engines(Protocol[Target, Tokens]):
    """The engines of a run that generates: their weights, their memory, and what they make of held-out prompts.

    ``Target`` is where an update of weights goes, from which channels are opened; ``Tokens`` are fixed tokens.
    """

    def begin_update(self, *, only_behind: bool = False) -> Target:
        """Where to send weights: to all engines, or only to those that lack the current ones."""

    def confirm_update(self, version: int) -> None:
        """Record that all engines of the last :meth:`begin_update` have this version."""

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced.

        ``silent`` are addresses that gave no answer in time.
        """

    def canary_log_probs(self, urls: Sequence[str], tokens: Tokens) -> dict[str, list[float]]:
        """Log-probs (nats) of fixed tokens, by engine."""

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Generate for the held-out prompts, and score that."""

    def sleep(self, keep_weights: bool = False) -> None:
        """Stop generating, and give back device memory, with ``keep_weights`` all but the weights'.

        Which call may follow which says `slime_core.memory.MemoryState`.
        """

    def wake(self, weights_only: bool = False) -> None:
        """Take the memory again, with ``weights_only`` the weights' alone, which is enough to be sent new ones.

        Weights that were given back are undefined until the next update.
        """


@runtime_checkable
class WeightChannel(Protocol):
    """The sending end of a weight sync. Picklable; connects in :meth:`begin`."""

    def begin(self, update: WeightUpdate) -> None:
        """Open an update on every engine."""

    def send(self, bucket: NamedTensors) -> int:
        """Send some Hugging Face-named tensors; returns the bytes that this took."""

    def end(self) -> dict[str, str]:
        """Close the update; return only when every engine has confirmed the version.

        Returns:
            The tensors' checksums at the receiving end, by name; empty if the transport has none.
        """

    def close(self) -> None:
        """Give back what is kept between updates, such as shared memory."""


Role = Literal["actor", "reference", "critic", "teacher"]
"""Which model of a trainer: the policy being trained, the frozen one that KL compares with, the values' model, or the
model that is distilled. A trainer refuses a role that it has no model for."""


@runtime_checkable
class TrainerWorker(Protocol):
    """One rank of the training half. Every rank gets every call, in the same order.

    It is made with its :class:`~slime_core.types.Rendezvous`, and loads its weights then.
    """

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""

    def forward(self, shard: TrainShard, role: Role) -> list[NDArray[np.float32]]:
        """A number for each response token of each sample, without gradient; 0 where the loss mask is 0.

        Log-probs (nats) for an actor, a reference or a teacher, values for a critic.
        """

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout."""

    def evaluate(self, shard: TrainShard) -> dict[str, float]:
        """The loss of a shard of one step and its metrics, equal on all ranks, without training on it."""

    def push(self, update: WeightUpdate, channel: WeightChannel | None, senders: Sequence[int] = (0,)) -> SyncReport:
        """Send what ``update`` names. All ranks gather, once for each of ``senders``: the ranks that send.

        Each of them has a ``channel`` of its own, to other engines than the others'; what other ranks have is ignored.
        """

    def export_mismatches(self) -> list[str]:
        """Names of weights that :meth:`push` gathers otherwise than they are, on any rank."""

    def finish_loading(self) -> None:
        """Load what was left of a checkpoint for when nobody waits, such as the optimizer's state."""

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when :meth:`saved` says so."""

    def saved(self, wait: bool = False) -> bool:
        """Whether the last checkpoint is complete; with ``wait``, once it is. Raises if it could not be written."""

    def load(self, directory: str) -> int:
        """Continue the newest checkpoint of ``directory`` with its optimizer; returns its iteration."""

    def sleep(self, keep_weights: bool = False) -> SleepReport:
        """Give device memory back; with ``keep_weights`` all but the weights', which is enough to :meth:`push`.

        Which call may follow which says `slime_core.memory.MemoryState`.
        """

    def wake(self, weights_only: bool = False) -> None:
        """Take the device memory again, with ``weights_only`` the weights' alone; what is in it is as before."""

    def close(self) -> None:
        """Leave the other ranks in order. Nothing is called after it."""


__getattr__ = renamed(__name__, {name: f"slime_core.former_interfaces.{name}" for name in ("GroupFilter", "Rollout")})
