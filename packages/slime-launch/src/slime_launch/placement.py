"""Where the run lives: one placement group that holds trainer and engines.

    bundles, in order     trainer rank 0 … trainer rank n-1 | engines        (disaggregated)
                          trainer ranks and engines on the same bundles      (--colocate)

A bundle is one GPU with a CPU core. On a machine without CUDA it is a CPU worker process: a logical core; the
embedded Ray gets as many as the bundles need. (Bundles with GPUs were not run on CUDA.)

Bundles fill one node after the other. Where they are on several, servers listen on the address by which Ray knows their
node, and torch uses the interface that has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import ipaddress
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slime_core.importing import BY_US, SAFE_PATH
from slime_launch.calls import Watch
from slime_launch.config import ClusterConfig
from slime_launch.errors import PlacementError
from slime_rollout.engine import Route, Way, WeightSyncConfig, chosen_of, refusal, ways_of

GPU_SECONDS = 120.0  # for Ray to start a process on every node, and ask it for each GPU
POLL_SECONDS = 0.2
_GET_ADDRESS = 0x8915  # Linux's SIOCGIFADDR
# Of the run's actors. Their children end by themselves when the actor is gone, and clear up what is in /dev/shm:
# torch's manager of shared memory, and the engines' supervisors. Ray would kill both when an actor exits, and on a
# cluster that was there before nobody else cleans up.
KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "false"}


def runtime_env(variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any] | None:
    """The environment that an actor gets: some variables, and :data:`KEEP_CHILDREN`; ``None`` if it has it already.

    The processes of a Ray that this run started have its environment. To set one up, Ray starts a further process for
    each actor, which imports Ray first.
    """
    wanted = {**KEEP_CHILDREN, **variables}
    if os.environ.get("RAY_ADDRESS") is None and all(os.environ.get(name) == wanted[name] for name in wanted):
        return None
    return {"env_vars": {SAFE_PATH: BY_US, **wanted}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BundleLayout:
    """The resources of each bundle, and which ones serve trainer ranks and engines (none with external engines)."""

    bundles: tuple[dict[str, float], ...]
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]
    cuda: bool

    @property
    def shared(self) -> bool:
        """Whether engines and trainer take turns on the same bundles."""
        return bool(self.trainer) and self.rollout[:1] == self.trainer[:1]

    def trainer_resources(self) -> dict[str, float]:
        """The share of its bundle that a trainer rank asks for: half where the engines live there, too."""
        share = 0.5 if self.shared else 1.0
        return {"num_cpus": 0.5, "num_gpus": share if self.cuda else 0.0}


def plan_layout(cluster: ClusterConfig, *, cuda: bool, trains: bool = True) -> BundleLayout:
    """Assign trainer ranks, if the run ``trains``, and engines to bundles; with ``cuda`` a bundle is a GPU."""
    trainer = tuple(range(cluster.actor_gpus if trains else 0))
    first = 0 if cluster.colocate else len(trainer)
    rollout = tuple(range(first, first + cluster.rollout_gpus))
    bundle = {"GPU": 1.0, "CPU": 1.0} if cuda else {"CPU": 1.0}
    count = max((*trainer, *rollout, 0)) + 1
    return BundleLayout(bundles=tuple(dict(bundle) for _ in range(count)), trainer=trainer, rollout=rollout, cuda=cuda)


def layout_notes(layout: BundleLayout, *, hands_over: bool) -> list[str]:
    """Lines about layouts that were never run; ``hands_over`` says whether a half gives memory back."""
    if not (layout.cuda and layout.shared):
        return []
    if hands_over:
        return ["--colocate on CUDA: that memory is handed over was not run there; scripts/gpu-check tries the trainer"]
    return [
        "--colocate on CUDA with --no-offload-train and --no-offload-rollout: trainer and engines share each GPU's "
        "memory all the time; `slime-launch plan` says whether both fit"
    ]


def own_share(workers: int) -> int:
    """CPU threads of each of ``workers`` processes that compute at the same time on the cores of this process."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def check_transport(config: WeightSyncConfig, route: Route) -> Way:
    """The transport that was given, or chosen.

    Raises:
        PlacementError: The one that was given does not reach the engines.
    """
    if (problem := refusal(config, route)) is not None:
        raise PlacementError(problem)
    return chosen_of(ways_of(config, route))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the run lives: the ready placement group for a layout.

    Attributes:
        trainer: Bundle of each trainer rank; ranks of one node follow each other, in the order of its GPUs.
        rollout: Bundles of the engines, likewise; empty with external engines.
        nodes: Bundle → Ray's id of its node.
        gpus: Bundle → number of its GPU on its node; empty without CUDA.
        grows: Whether engines are added on nodes that join.
    """

    group: Any
    layout: BundleLayout
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]
    nodes: Mapping[int, str]
    gpus: Mapping[int, int]
    grows: bool = False

    @property
    def on_several_nodes(self) -> bool:
        """Whether the run is on several nodes, or may be."""
        return self.grows or len(set(self.nodes.values())) > 1

    @property
    def sends_within_node(self) -> bool:
        """Whether all engines are on the node of the trainer's first rank, which sends the weights, and stay there."""
        senders = {self.nodes[bundle] for bundle in self.trainer[:1]}
        return not self.grows and {self.nodes[bundle] for bundle in self.rollout} <= senders

    def senders(self, engine_gpus: int) -> dict[str, int]:
        """The first trainer rank on each node that has engines of so many GPUs, by the node's id.

        None where a node with engines has no rank, or an engine is on several nodes: weights reach it otherwise.
        """
        ranks: dict[str, int] = {}
        for rank, bundle in enumerate(self.trainer):
            ranks.setdefault(self.nodes[bundle], rank)
        engines = [self.rollout[first : first + engine_gpus] for first in range(0, len(self.rollout), engine_gpus)]
        nodes = [{self.nodes[bundle] for bundle in engine} for engine in engines]
        if any(len(each) > 1 or not each <= ranks.keys() for each in nodes):
            return {}
        return {node: ranks[node] for each in nodes for node in each}

    def neighbours(self, bundle: int) -> int:
        """Trainer ranks on the node of a bundle."""
        return sum(self.nodes[other] == self.nodes[bundle] for other in self.trainer)

    @property
    def rollout_worker(self) -> int:
        """Bundle of the process that gives batches: starts the engines, calls external ones, or reads data."""
        return next(iter((*self.rollout, *self.trainer)), 0)

    def strategy(self, bundle: int) -> Any:
        """Ray's scheduling strategy for a bundle."""
        return strategy_of(self.group, bundle)


def place_run(
    layout: BundleLayout, *, timeout: float, watch: Watch, on_wait: Callable[[str], None], grows: bool = False
) -> Placement:
    """Get room for the run; errors as of :func:`reserve`."""
    group = reserve(layout, timeout=timeout, watch=watch, on_wait=on_wait)
    nodes = bundle_nodes(group)
    gpus = bundle_gpus(group, list(nodes)) if layout.cuda else {}
    order = order_bundles(nodes, gpus)
    trainer = tuple(order[place] for place in layout.trainer)
    rollout = tuple(order[place] for place in layout.rollout)
    return Placement(group=group, layout=layout, trainer=trainer, rollout=rollout, nodes=nodes, gpus=gpus, grows=grows)


def reserve(
    layout: BundleLayout, *, timeout: float, watch: Watch, on_wait: Callable[[str], None] = lambda _: None
) -> Any:
    """Get the ready placement group; ``on_wait`` hears meanwhile what is still missing.

    Raises:
        PlacementError: Not enough room, with what the cluster has and what is needed.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(list(layout.bundles), strategy="PACK")
    deadline = time.monotonic() + timeout
    while not group.wait(POLL_SECONDS):
        missing = shortage(layout, ray.available_resources(), ray.cluster_resources())
        on_wait(missing)
        watch.check()
        if time.monotonic() > deadline:
            remove_placement_group(group)
            raise PlacementError(
                f"no room on the Ray cluster after {timeout:g} s: {missing}; add nodes, ask for fewer GPUs, or wait "
                "longer with --ray-placement-timeout"
            )
    return group


def shortage(layout: BundleLayout, free: dict[str, float], total: dict[str, float]) -> str:
    """The resources that ``layout`` needs, those that are free, and the total, in words."""
    needed = {name: sum(bundle[name] for bundle in layout.bundles) for name in layout.bundles[0]}
    return ", ".join(
        f"{name} needed {amount:g}, free {free.get(name, 0):g} of {total.get(name, 0):g}"
        for name, amount in needed.items()
    )


def order_bundles(nodes: Mapping[int, str], gpus: Mapping[int, int]) -> list[int]:
    """Bundles (with the id of their node, and their GPU there) sorted by node and GPU; the nodes as they come."""
    first_seen = {node: place for place, node in reversed(list(enumerate(nodes.values())))}
    return sorted(nodes, key=lambda bundle: (first_seen[nodes[bundle]], gpus.get(bundle, 0), bundle))


def bundle_nodes(group: Any) -> dict[int, str]:
    """Node id of each bundle of a placement group; one that has just lost its node may be without, or name that."""
    from ray.util import placement_group_table

    table = placement_group_table(group)["bundles_to_node_id"]
    return {int(bundle): str(node) for bundle, node in sorted(table.items())}


def bundle_gpus(group: Any, bundles: Sequence[int]) -> dict[int, int]:
    """Number of the GPU that Ray gave to each of some bundles, on its node.

    Raises:
        PlacementError: A node of theirs is lost, or Ray does not answer.
    """
    import ray

    placed = bundle_nodes(group)
    by_node: dict[str | None, list[int]] = {}
    for bundle in bundles:
        by_node.setdefault(placed.get(bundle), []).append(bundle)
    # One bundle of each node at a time, in a process that Ray keeps (`max_calls`; it does not by itself where there
    # are GPUs): a node starts one process for all of them, not one for each.
    ids = ray.remote(num_cpus=0, num_gpus=0.01, max_calls=0)(ray.get_gpu_ids)
    found: dict[int, int] = {}
    deadline = time.monotonic() + GPU_SECONDS
    for wave in itertools.zip_longest(*by_node.values()):
        calls = {
            bundle: ids.options(scheduling_strategy=strategy_of(group, bundle)).remote()
            for bundle in wave
            if bundle is not None
        }
        await_calls(list(calls.values()), deadline, needed={placed.get(bundle) for bundle in calls})
        try:
            found |= {bundle: int(ray.get(call)[0]) for bundle, call in calls.items()}
        except ray.exceptions.RayError as error:
            raise PlacementError(f"Ray does not say which GPUs it gave: {error}") from error
    return found


def await_calls(calls: list[Any], deadline: float, *, needed: Set[str | None]) -> None:
    """Wait for calls on some nodes; `PlacementError` if one of those is lost, or Ray does not answer in time."""
    import ray

    while len(ray.wait(calls, num_returns=len(calls), timeout=POLL_SECONDS)[0]) < len(calls):
        # Without its node a call waits until another one joins.
        if time.monotonic() > deadline or not needed <= live_nodes().keys():
            for call in calls:
                ray.cancel(call, force=True)
            raise PlacementError("Ray does not say which GPUs it gave: a node is lost, or does not answer")


def live_nodes() -> dict[str, str]:
    """Ray's id of each node that is there → its address."""
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def use_cluster_interface() -> None:
    """Have torch in this process, and below it, talk through the interface by which Ray knows the node.

    By itself gloo takes what the host's name stands for, which may be the loopback address, and NCCL any interface.
    """
    import ray

    if (name := interface_of(ray.util.get_node_ip_address())) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # NCCL takes a name alone for a prefix


def interface_of(address: str) -> str | None:
    """The interface of this machine that has an address, IPv4 or IPv6; ``None`` if there is none."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 6:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
        found = {ipaddress.ip_address(bytes.fromhex(line.split()[0])): line.split()[-1] for line in lines}
        return found.get(wanted)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(asked, _GET_ADDRESS, struct.pack("256s", name.encode()))
                if answer[20:24] == wanted.packed:
                    return name
    return None


def strategy_of(group: Any, bundle: int) -> Any:
    """Ray's scheduling strategy for a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
