"""The ways by which new weights reach the engines, a row each, and the flags that choose one.

A new one is a class and a row of :data:`TRANSPORTS`: flags, checks, plans and runs read all that they know of it from
the row. A plan shows every row, and a run takes the same one. Seconds are the bytes of an update over guesses of what
memory, disks and networks do, not bounds. Nothing here was measured on CUDA. No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from slime_core.flags import Config, flag
from slime_core.former_names import renamed
from slime_core.needs import GENERATES, TRAINERS, given

AUTO = "auto"
"""``--update-weight-transport`` where the fastest is to be taken."""
FULL = "full"
"""``--update-weight-mode`` of whole tensors."""
PAUSE_MODES = ("retract", "in_place")
REQUEST_TIMEOUT_SECONDS = 300.0
SYNC = (GENERATES, TRAINERS)
# A flag that may differ when a run is continued.
setting = functools.partial(flag, may_change=True)

# Bytes per second.
HOST_COPY = 3e9  # shared memory
DISK = 1e9  # a file system
NETWORK = 12.5e9  # between nodes
GLOO = 1e9  # a broadcast, whatever the network does
PCIE = 32e9  # between a GPU and its node's others, if nothing better is known

DELTA_ENTRY = 300  # bytes of a tensor's place and checksums in the index of a delta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """From the trainer to the engines.

    Attributes:
        within_node: Whether all are on the node of the trainer's first rank.
        cuda: Whether they are on GPUs.
        shared: Whether trainer and engines share their GPUs (``--colocate``).
        senders: Nodes that have engines, if each of these nodes has a trainer rank and all of an engine; else 0.
        size: Bytes of an update. Which way is the fastest does not depend on it.
        tensors: Tensors of an update, or 0 if that is unknown.
        link: Bytes per second between devices of a node.
    """

    engines: int
    within_node: bool
    cuda: bool
    shared: bool
    senders: int = 0
    size: int = 2**30
    tensors: int = 0
    link: float = PCIE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport:
    """A row: a way for weights to travel.

    Attributes:
        name: Its name in ``--update-weight-transport``.
        mode: Its name in ``--update-weight-mode``.
        channel: Module and class of the sending end, which takes a
            :class:`~slime_rollout.engine.channels.ChannelSpec`; loaded when it is used.
        seconds: Time of an update.
        sent: Bytes that leave the trainer in an update, at most.
        limit: Why it cannot be used, beyond what the other attributes say; ``None`` if it can.
        within_machine: Whether engines take weights from a trainer rank on their own machine alone. Then the first
            rank of each node sends to the engines there, else the first rank of all to every engine.
        needs_cuda: Whether it needs GPUs.
        needs_directory: Whether it needs ``--update-weight-disk-dir``.
        with_colocate: Why it does not work where trainer and engines share GPUs; ``None`` if it does.
        receiver: Module and class of what applies an update on the engines' machines, if engines do not themselves.
        elsewhere: How engines on other nodes can be reached, if they can.
    """

    name: str
    mode: str = FULL
    channel: str
    seconds: Callable[[Route], float]
    sent: Callable[[Route], int] = lambda route: route.size
    limit: Callable[[WeightSyncConfig, Route], str | None] = lambda config, route: None
    within_machine: bool = False
    needs_cuda: bool = False
    needs_directory: bool = False
    with_colocate: str | None = None
    receiver: str | None = None
    elsewhere: str | None = None

    def problem(self, config: WeightSyncConfig, route: Route) -> str | None:
        """Why it cannot be used on a route; ``None`` if it can."""
        if self.within_machine and not route.within_node and not (route.shared and route.senders):
            return "works within one machine"
        if self.needs_cuda and not route.cuda:
            return "needs CUDA"
        if self.with_colocate is not None and route.shared:
            return f"{self.with_colocate}, as --colocate has it"
        if self.needs_directory and config.update_weight_disk_dir is None:
            return "needs --update-weight-disk-dir"
        return self.limit(config, route)


def _by_memory(route: Route) -> float:
    if route.within_node:
        return route.size / (route.link if route.shared and route.cuda else HOST_COPY)
    # Weights are gathered once for each node.
    return max(1, route.senders) * route.size / (NETWORK if route.cuda else GLOO)


def _between(route: Route) -> float:
    return route.link if route.within_node else NETWORK


def _by_files(route: Route) -> float:
    return (1 + route.engines) * route.size / DISK


def _deltas_reach(config: WeightSyncConfig, route: Route) -> str | None:
    # What applies them listens on this machine alone.
    return "applies deltas within one machine" if config.receives_here and not route.within_node else None


TRANSPORTS = (
    Transport(
        name="tensor",
        channel="slime_rollout.weights.buckets:TensorWeightChannel",
        seconds=_by_memory,
        sent=lambda route: route.size * (1 if route.within_node else route.senders),
        within_machine=True,
    ),
    Transport(
        name="nccl",
        channel="slime_rollout.weights.buckets:DistributedWeightChannel",
        seconds=lambda route: route.size / (_between(route) / 2),
        needs_cuda=True,
        with_colocate="takes no GPU twice into one group",
    ),
    Transport(
        name="gloo",
        channel="slime_rollout.weights.buckets:DistributedWeightChannel",
        seconds=lambda route: route.size / min(_between(route), GLOO),
    ),
    Transport(
        name="disk",
        channel="slime_rollout.weights.disk:DiskWeightChannel",
        seconds=_by_files,
        limit=_deltas_reach,
        needs_directory=True,
    ),
    Transport(
        name="disk",
        mode="delta",
        channel="slime_rollout.weights.disk:DeltaWeightChannel",
        # Read and applied to a whole copy on the engines' machine, too, which they load.
        seconds=lambda route: _by_files(route) + 2 * route.size / DISK,
        # Only what changed is sent: all of it at most, and less the smaller the steps are.
        sent=lambda route: route.size + DELTA_ENTRY * route.tensors,
        limit=_deltas_reach,
        needs_directory=True,
        receiver="slime_rollout.weights.receiver:DeltaReceiver",
        elsewhere="give --update-weight-receivers in place of --update-weight-local-checkpoint-dir",
    ),
)
"""Every transport in each of its modes; of equally fast ones the first is taken."""
MODES = tuple(dict.fromkeys(row.mode for row in TRANSPORTS))


def names(has: Callable[[Transport], bool] = lambda row: True) -> tuple[str, ...]:
    """Names of the rows that ``has`` picks, each once."""
    return tuple(dict.fromkeys(row.name for row in TRANSPORTS if has(row)))


CHOICES = (AUTO, *names())
"""Values of ``--update-weight-transport``."""
WITH_DIRECTORY = given("update_weight_transport", AUTO, *names(lambda row: row.needs_directory))


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSyncConfig(Config, needs=SYNC):
    """How the trainer's weights reach the engines; base of :class:`~slime_rollout.engine.config.EngineConfig`."""

    update_weight_mode: str = setting(
        FULL, choices=MODES, help="send whole tensors, or only the bytes that changed (needs the transport disk)"
    )
    update_weight_transport: str = setting(
        AUTO,
        choices=CHOICES,
        help="shared memory or CUDA IPC on one machine (tensor), a broadcast with NCCL or gloo, or files (disk); auto "
        "takes the fastest that is possible; `plan` shows the seconds of each",
    )
    update_weight_disk_dir: str | None = setting(
        None,
        help="directory that trainer and engines both see; needed by the transport disk",
        metavar="DIR",
        needs=(*SYNC, WITH_DIRECTORY),
    )
    update_weight_disk_keep_files: bool = setting(
        False,
        help="keep the files of all weight versions",
        needs=(*SYNC, WITH_DIRECTORY, given("update_weight_disk_dir")),
    )
    update_weight_local_checkpoint_dir: str | None = setting(
        None,
        help="directory on the engines' machine, for the checkpoint that deltas are applied to; needed by delta",
        metavar="DIR",
        needs=given("update_weight_mode", "delta"),
    )
    update_weight_receivers: tuple[str, ...] = setting(
        (),
        help="instead of that, for engines on other machines: each machine's `slime-rollout receive-weights --listen`",
        metavar="HOST:PORT",
        needs=given("update_weight_mode", "delta"),
    )
    update_weight_pause_mode: str = setting(
        "retract",
        choices=PAUSE_MODES,
        help="requests in flight: recompute the KV cache of the tokens so far, or go on with the old one",
    )
    update_weight_timeout: float = setting(
        REQUEST_TIMEOUT_SECONDS,
        help="longest time of one request of a weight update, such as to load all weights from files",
        unit="seconds",
        above=0,
    )
    check_weight_update_equal: bool = setting(
        False,
        help="after every update, compare SGLang's checksums of what the engines hold with what was sent (not where it "
        "is quantized) and with each other",
    )

    weight_canary_limit: float | None = setting(
        None,
        help="after every update engines and trainer compute log-probs of a few fixed tokens: largest distance, "
        "beyond which the run ends and names the wrong weight; 0 computes none; by default 0.0001 in fp32, 0.4 in "
        "bf16, 1 beside quantized weights",
        unit="nats",
        least=0,
    )

    @property
    def update_request_timeout(self) -> float:
        """Longest time in seconds that an engine may take to answer a request of an update, loading files apart."""
        return self.update_weight_timeout

    @property
    def transport(self) -> Transport | None:
        """The row that the flags name, of another mode if theirs has none; ``None`` if the fastest one is wanted."""
        rows = [row for row in TRANSPORTS if row.name == self.update_weight_transport]
        return next((row for row in rows if row.mode == self.update_weight_mode), next(iter(rows), None))

    @property
    def receives_here(self) -> bool:
        """Whether updates need a receiver next to engines, and the run starts it: then all are on this machine."""
        needed = any(row.receiver for row in TRANSPORTS if row.mode == self.update_weight_mode)
        return needed and not self.update_weight_receivers

    def contradictions(self) -> Iterator[str]:
        """Needs of a mode or a transport that are not met."""
        name, mode = self.update_weight_transport, self.update_weight_mode
        delta, fitting = mode == "delta", names(lambda row: row.mode == mode)
        if mode == FULL and name not in (AUTO, *fitting):
            yield f"--update-weight-transport {name} sends no whole tensors; give another --update-weight-mode"
        elif mode != FULL and name not in fitting:
            yield (
                f"--update-weight-mode {mode} goes through files; give --update-weight-transport "
                f"{' or '.join(fitting)} (got {name})"
            )
        if name in names(lambda row: row.needs_directory) and self.update_weight_disk_dir is None:
            yield f"--update-weight-transport {name} needs --update-weight-disk-dir DIR"
        local, receivers = self.update_weight_local_checkpoint_dir, self.update_weight_receivers
        if delta and (local is None) == (not receivers):
            yield (
                "--update-weight-mode delta needs --update-weight-local-checkpoint-dir DIR for engines on this machine "
                "or --update-weight-receivers HOST:PORT for those on others; give one of them"
            )
        if delta and local and Path(local).resolve() == Path(self.update_weight_disk_dir or ".").resolve():
            yield (
                "--update-weight-local-checkpoint-dir must be another directory than --update-weight-disk-dir "
                f"{self.update_weight_disk_dir}: engines' copies and what is sent have the same names"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A transport on a route.

    Attributes:
        sent: Bytes that leave the trainer in an update, at most.
        received: Bytes that all engines take in.
        problem: Why it cannot be used here; ``None`` if it can.
    """

    name: str
    sent: int
    received: int
    seconds: float
    chosen: bool
    problem: str | None


def ways_of(config: WeightSyncConfig, route: Route, *, modes: Collection[str] = (FULL,)) -> list[Way]:
    """Every transport in these modes; the chosen one is what the flags name, or the fastest that is possible."""
    rows = [row for row in TRANSPORTS if row.mode in modes]
    if (chosen := config.transport) is None:
        possible = [row for row in rows if row.mode == FULL and row.problem(config, route) is None]
        chosen = min(possible, key=lambda row: row.seconds(route))
    elif chosen not in rows:
        whole = [row for row in rows if row.name == chosen.name]
        rows, chosen = (rows, whole[0]) if whole else ([*rows, chosen], chosen)
    return [
        Way(
            name=row.name if row.mode == FULL or len(modes) == 1 else f"{row.name}, {row.mode}",
            sent=row.sent(route),
            received=route.engines * route.size,
            seconds=row.seconds(route),
            chosen=row is chosen,
            problem=row.problem(config, route),
        )
        for row in rows
    ]


def chosen_of(ways: list[Way]) -> Way:
    """The one of :func:`ways_of` that is chosen; it has a problem if the flags name one that is not possible."""
    return next(way for way in ways if way.chosen)


def in_words(ways: list[Way]) -> str:
    """Which one is chosen, and why not another: ``gloo, 0.3 s (tensor works within one machine, …)``."""
    chosen = chosen_of(ways)
    others = (f"{way.name} {way.problem or f'{way.seconds:.2g} s'}" for way in ways if way is not chosen)
    return f"{chosen.name}, about {chosen.seconds:.2g} s ({', '.join(others)})"


def refusal(config: WeightSyncConfig, route: Route) -> str | None:
    """Why the transport that the flags name cannot be used, and what to do; ``None`` if it can, or none is named."""
    row = config.transport
    if row is None or (problem := row.problem(config, route)) is None:
        return None
    far, way_out = "", None
    if row.problem(config, dataclasses.replace(route, within_node=True)) is None:
        far, way_out = ", and engines are on other nodes than the trainer's first rank", row.elsewhere
    possible = [way.name for way in ways_of(config, route) if way.problem is None]
    way_out = way_out or f"leave it out, or give {' or '.join(possible)}"
    return f"--update-weight-transport {row.name} {problem}{far}; {way_out}"


__getattr__ = renamed(
    __name__, {"transports": "slime_rollout.engine.transports.ways_of", "load": "pkgutil.resolve_name"}
)
