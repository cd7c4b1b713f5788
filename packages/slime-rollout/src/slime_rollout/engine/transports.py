"""The ways by which new weights reach the engines: how long each takes, which are possible, and which one is taken.

A plan shows them, and a run takes the same one. Seconds are the bytes of an update over guesses of what memory, disks
and networks do, not bounds. Nothing here was measured on CUDA.
"""

from __future__ import annotations

import dataclasses

from slime_rollout.engine.config import WeightSyncConfig

# Bytes per second.
HOST_COPY = 3e9  # shared memory
DISK = 1e9  # a file system
NETWORK = 12.5e9  # between nodes
GLOO = 1e9  # a broadcast, whatever the network does
PCIE = 32e9  # between a GPU and its node's others, if nothing better is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """From the trainer to the engines.

    Attributes:
        engines: Number of engines.
        within_node: Whether all are on the node of the trainer's first rank.
        cuda: Whether they are on GPUs.
        shared: Whether trainer and engines share their GPUs (``--colocate``).
        senders: Nodes that have engines, if each of these nodes has a trainer rank and all of an engine; else 0.
        size: Bytes of an update. Which way is the fastest does not depend on it.
        link: Bytes per second between devices of a node.
    """

    engines: int
    within_node: bool
    cuda: bool
    shared: bool
    senders: int = 0
    size: int = 2**30
    link: float = PCIE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport:
    """A way for weights to travel.

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


def transports(config: WeightSyncConfig, route: Route) -> list[Transport]:
    """Every transport; the chosen one is what the flags name, or the fastest that is possible."""
    size, between = route.size, route.link if route.within_node else NETWORK
    if route.within_node:
        tensor = size / (route.link if route.shared and route.cuda else HOST_COPY)
    else:  # weights are gathered once for each node
        tensor = max(1, route.senders) * size / (NETWORK if route.cuda else GLOO)
    seconds = {
        "tensor": tensor,
        "nccl": size / (between / 2),
        "gloo": size / min(between, GLOO),
        "disk": (1 + route.engines) * size / DISK,
    }
    problems = {name: _problem(name, config, route) for name in seconds}
    possible = [name for name in seconds if problems[name] is None]
    given = config.update_weight_transport
    chosen = min(possible, key=seconds.__getitem__) if given == "auto" else given
    return [
        Transport(
            name=name,
            sent=size * (route.senders if name == "tensor" and not route.within_node else 1),
            received=route.engines * size,
            seconds=seconds[name],
            chosen=name == chosen,
            problem=problems[name],
        )
        for name in seconds
    ]


def chosen_of(ways: list[Transport]) -> Transport:
    """The one of :func:`transports` that is chosen; it has a problem if the flags name one that is not possible."""
    return next(way for way in ways if way.chosen)


def in_words(ways: list[Transport]) -> str:
    """Which one is chosen, and why not another: ``gloo, 0.3 s (tensor works within one machine, …)``."""
    chosen = chosen_of(ways)
    others = (f"{way.name} {way.problem or f'{way.seconds:.2g} s'}" for way in ways if way is not chosen)
    return f"{chosen.name}, about {chosen.seconds:.2g} s ({', '.join(others)})"


def _problem(name: str, config: WeightSyncConfig, route: Route) -> str | None:
    match name:
        case "tensor" if not route.within_node and not (route.shared and route.senders):
            return "works within one machine"
        case "nccl" if not route.cuda:
            return "needs CUDA"
        case "nccl" if route.shared:
            return "takes no GPU twice into one group, as --colocate has it"
        case "disk" if config.update_weight_disk_dir is None:
            return "needs --update-weight-disk-dir"
        case "disk" if config.update_weight_local_checkpoint_dir is not None and not route.within_node:
            return "applies deltas within one machine"  # what applies them listens there alone
    return None
