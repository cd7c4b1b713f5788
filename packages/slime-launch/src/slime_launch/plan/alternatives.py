"""Other ways to run a command, each planned again with one change: what it costs and what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from slime_core.errors import SlimeError
from slime_launch.config import Settings
from slime_launch.config_file import with_config
from slime_launch.flags import read_train
from slime_launch.parser import without
from slime_rollout.checks import FLAG

MOST = 2
"""Alternatives that a plan shows."""
WORTH = 0.01
"""Part of the run's time that a change on the same GPUs saves at least."""
OFFLOAD = (
    *("--optimizer-cpu-offload", "--optimizer-offload-fraction", "--overlap-cpu-optimizer-d2h-h2d"),
    "--use-torch-optimizer-for-cpu-offload",
)
RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers", "--recompute-activations")
MEMORY_STEP = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Flags that are left out, and those that are added."""

    gone: tuple[str, ...] = ()
    given: tuple[str, ...] = ()

    def words(self, words: Sequence[str]) -> list[str]:
        """A command line, its file of flags read, with this change."""
        names = [word for word in self.given if word.startswith("--")]
        return [*without(with_config(words).words, [FLAG, *self.gone, *names]), *self.given]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Devices, memory and time that a command takes.

    Attributes:
        memory: Bytes of the trainer rank that needs most, in a step; 0 without trainers.
        seconds: Of the run, as estimated.
        rollout_seconds: Of a rollout, with its part of saves and evaluations.
    """

    gpus: int
    memory: int
    seconds: float
    rollout_seconds: float

    @property
    def gpu_hours(self) -> float:
        """Of all GPUs, whether they work or wait."""
        return self.gpus * self.seconds / 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternative:
    """A change in words, and what the command takes with it."""

    change: str
    cost: Cost


def changes(settings: Settings, *, crowded: bool) -> Iterator[Change]:
    """Changes that may be worth a try; planning says which of them can start, and save time.

    Args:
        crowded: Whether the engines' caches hold fewer tokens than all their responses at once have.
    """
    cluster = settings.cluster
    if settings.megatron.offload_fraction:
        yield Change(gone=OFFLOAD)
    if settings.megatron.recompute is not None:
        yield Change(gone=RECOMPUTE)
    fraction = settings.engine.sglang_args.get("mem-fraction-static")
    if crowded and fraction is not None:
        yield Change(given=("--sglang-mem-fraction-static", f"{float(str(fraction)) + MEMORY_STEP:g}"))
    if settings.kind.generates and not cluster.colocate and settings.rollout.selection.async_buffer_size is None:
        yield Change(given=("--async-buffer-size", "1"))
    for nodes in (2 * cluster.actor_num_nodes, cluster.actor_num_nodes // 2):
        gpus = nodes * cluster.rollout_gpus // cluster.actor_num_nodes
        if nodes and gpus * cluster.actor_num_nodes == nodes * cluster.rollout_gpus:
            engines = () if cluster.colocate or not gpus else ("--rollout-num-gpus", str(gpus))
            yield Change(given=("--actor-num-nodes", str(nodes), *engines))


def changed(words: Sequence[str], change: Change) -> Settings | None:
    """The settings of a command for GPUs with a change; ``None`` where flags contradict each other then."""
    try:
        settings, problems = read_train(change.words(words), on_gpu=True, planned=True)
    except SlimeError:
        return None
    return None if problems else settings


def best(own: Cost, found: Sequence[tuple[Change, Cost]], words: Sequence[str]) -> list[Alternative]:
    """The changes that save most on the same GPUs, then those that take fewest GPU-hours on other numbers of them."""
    same = [(change, cost) for change, cost in found if cost.gpus == own.gpus]
    same = sorted((one for one in same if one[1].seconds <= (1 - WORTH) * own.seconds), key=lambda one: one[1].seconds)
    others = sorted((one for one in found if one[1].gpus != own.gpus), key=lambda one: one[1].gpu_hours)
    given = {word.partition("=")[0] for word in with_config(words).words}
    return [Alternative(change=_in_words(change, given), cost=cost) for change, cost in [*same, *others][:MOST]]


def _in_words(change: Change, given: set[str]) -> str:
    gone = [name for name in change.gone if name in given]
    return " ".join([*(["without", ", ".join(gone)] if gone else []), *change.given])
