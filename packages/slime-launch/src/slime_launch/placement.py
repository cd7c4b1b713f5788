"""Where the run lives: one placement group that holds trainer and engines.

    bundles, in order     trainer rank 0 … trainer rank n-1 | engines        (disaggregated)
                          trainer ranks and engines on the same bundles      (--colocate)

A bundle is one GPU with a CPU core. On a machine without CUDA it is a CPU worker process: a logical core; the
embedded Ray gets as many as the bundles need. (Bundles with GPUs were not run on CUDA.)
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from slime_launch.calls import Watch
from slime_launch.config import ClusterConfig
from slime_launch.errors import PlacementError

POLL_SECONDS = 0.2
# Of the run's actors. Their children end by themselves when the actor is gone, and clear up what is in /dev/shm:
# torch's manager of shared memory, and the engines' supervisors. Ray would kill both when an actor exits, and on a
# cluster that was there before nobody else cleans up.
KEEP_CHILDREN = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
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
        """What one trainer rank asks of its bundle: half of it where the engines live there, too."""
        share = 0.5 if self.shared else 1.0
        return {"num_cpus": 0.5, "num_gpus": share if self.cuda else 0.0}


def plan_layout(cluster: ClusterConfig, *, cuda: bool, trains: bool = True) -> Layout:
    """Assign trainer ranks, if the run ``trains``, and engines to bundles; with ``cuda`` a bundle is a GPU."""
    trainer = tuple(range(cluster.actor_gpus if trains else 0))
    first = 0 if cluster.colocate else len(trainer)
    rollout = tuple(range(first, first + cluster.rollout_gpus))
    bundle = {"GPU": 1.0, "CPU": 1.0} if cuda else {"CPU": 1.0}
    count = max(*trainer, *rollout, 0) + 1
    return Layout(bundles=tuple(dict(bundle) for _ in range(count)), trainer=trainer, rollout=rollout, cuda=cuda)


def layout_notes(layout: Layout, *, hands_over: bool) -> list[str]:
    """What is not known of a layout, a line each; ``hands_over`` says whether a half gives memory back."""
    if not (layout.cuda and layout.shared):
        return []
    if hands_over:
        return ["--colocate on CUDA: that memory is handed over was not run there; scripts/gpu-check tries the trainer"]
    return [
        "--colocate on CUDA with --no-offload-train and --no-offload-rollout: trainer and engines share each GPU's "
        "memory all the time; `slime-launch plan` says whether both fit"
    ]


def threads_per_worker(workers: int, cores: int) -> int:
    """CPU threads of each of ``workers`` processes that compute at the same time on ``cores`` cores."""
    return max(1, cores // max(1, workers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the run lives: the ready placement group for a layout.

    Attributes:
        trainer: Bundle of each trainer rank; ranks of one node follow each other.
        rollout: Bundles of the engines; empty with external engines.
        gpus: Numbers of the engines' GPUs on their node; empty without CUDA.
    """

    group: Any
    layout: Layout
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]
    gpus: tuple[int, ...]

    @property
    def rollout_worker(self) -> int:
        """Bundle of the process that gives batches: starts the engines, calls external ones, or reads data."""
        return next(iter((*self.rollout, *self.trainer)), 0)

    def strategy(self, bundle: int) -> Any:
        """Ray's scheduling strategy for a bundle."""
        return _strategy(self.group, bundle)


def place_run(layout: Layout, *, timeout: float, watch: Watch, on_wait: Callable[[str], None]) -> Placement:
    """Get room for the run; errors as of :func:`reserve`."""
    group = reserve(layout, timeout=timeout, watch=watch, on_wait=on_wait)
    order = order_bundles(bundle_nodes(group))
    rollout = tuple(order[place] for place in layout.rollout)
    return Placement(
        group=group,
        layout=layout,
        trainer=tuple(order[place] for place in layout.trainer),
        rollout=rollout,
        gpus=tuple(bundle_gpus(group, rollout)) if layout.cuda and rollout else (),
    )


def reserve(layout: Layout, *, timeout: float, watch: Watch, on_wait: Callable[[str], None] = lambda _: None) -> Any:
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


def shortage(layout: Layout, free: dict[str, float], total: dict[str, float]) -> str:
    """What ``layout`` needs, what is free, and the total, in words."""
    needed = {name: sum(bundle[name] for bundle in layout.bundles) for name in layout.bundles[0]}
    return ", ".join(
        f"{name} needed {amount:g}, free {free.get(name, 0):g} of {total.get(name, 0):g}"
        for name, amount in needed.items()
    )


def order_bundles(nodes: dict[int, str]) -> list[int]:
    """Bundles (with the id of their node) sorted so that ranks of one node follow each other."""
    first_seen = {node: place for place, node in reversed(list(enumerate(nodes.values())))}
    return sorted(nodes, key=lambda bundle: (first_seen[nodes[bundle]], bundle))


def bundle_nodes(group: Any) -> dict[int, str]:
    """Node id of each bundle of a ready placement group."""
    from ray.util import placement_group_table

    table = placement_group_table(group)["bundles_to_node_id"]
    return {int(bundle): str(node) for bundle, node in sorted(table.items())}


def bundle_gpus(group: Any, bundles: Sequence[int]) -> list[int]:
    """Numbers of the GPUs that Ray gave to some bundles. (Not run on CUDA.)

    Raises:
        PlacementError: The bundles are on several nodes; engines are only started on one.
    """
    import ray

    nodes = bundle_nodes(group)
    if len({nodes[bundle] for bundle in bundles}) > 1:
        raise PlacementError(
            f"the {len(bundles)} GPUs for generation lie on several nodes, which is not supported yet; ask for fewer "
            "with --rollout-num-gpus"
        )
    ids = ray.remote(num_cpus=0, num_gpus=0.01)(ray.get_gpu_ids)
    calls = [ids.options(scheduling_strategy=_strategy(group, bundle)).remote() for bundle in bundles]
    return sorted(int(gpu) for gpus in ray.get(calls) for gpu in gpus)


def _strategy(group: Any, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)


def free_port() -> int:
    """A free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
