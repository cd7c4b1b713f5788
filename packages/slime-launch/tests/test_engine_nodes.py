"""Engines on a cluster of several nodes with four GPUs each, as Ray counts them: no GPU is used.

The nodes are real ones of Ray, on this machine; the engines are processes that write down how they were started.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from slime_launch.calls import Watch
from slime_launch.config import ClusterConfig
from slime_launch.engine_nodes import EngineSeats, NodeLauncher
from slime_launch.placement import Placement, place_run, plan_layout
from slime_launch.ray_runtime import AGENT_WAITS, keep_to_this_user, without_services
from slime_rollout.engine import EngineStartError, NoRoomError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec, SGLangEngine, equal_specs

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo /nowhere/sglang/__init__.py && exit
echo "GPUs $CUDA_VISIBLE_DEVICES; $*"
exec sleep 600
"""


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes for the run, and one without room. Ray takes one for lost after two seconds of silence."""
    keep_to_this_user()
    import ray
    from ray.cluster_utils import Cluster

    for name, value in {"period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    settings = {"enable_worker_prestart": False}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings}
    with without_services(AGENT_WAITS):  # which take longer than all else here
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            cluster.add_node(num_cpus=4, num_gpus=4)
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def place(sizes: ClusterConfig, *, trains: bool = True) -> Placement:
    layout = plan_layout(sizes, cuda=True, trains=trains)
    return place_run(layout, timeout=60, watch=Watch(), on_wait=lambda missing: None)


def launcher_of(
    place: Placement, directory: Path, gpus_per_engine: int, spare: int = 0
) -> tuple[NodeLauncher, list[EngineSpec]]:
    python = directory / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    config = EngineConfig(sglang_python=str(python), rollout_num_gpus_per_engine=gpus_per_engine)
    number = len(place.rollout) // gpus_per_engine
    specs = equal_specs(EngineSpec(model_path=str(directory), device="cuda"), number + spare, config)
    return NodeLauncher(EngineSeats.of(place, number, directory, spare=spare), config), specs


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def words(engine: SGLangEngine) -> str:
    """How it was started: its GPUs, and its command line."""
    return wait_until(lambda: engine.log_tail(1))


def test_ranks_and_engines_are_placed_by_node_and_gpu(cluster, tmp_path):
    run = place(ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=6))
    nodes = [run.nodes[bundle] for bundle in (*run.trainer, *run.rollout)]
    assert len(set(nodes[:4])) == len(set(nodes[4:])) == 1
    assert nodes[0] != nodes[4]
    assert [run.gpus[bundle] for bundle in (*run.trainer, *run.rollout)] == [*range(4), *range(4)]
    assert not run.sends_within_node
    assert run.neighbours(run.trainer[0]) == 2

    launcher, specs = launcher_of(run, tmp_path, gpus_per_engine=2)
    launcher.check(specs)
    engines = [launcher.start(spec, log_path=tmp_path / f"engine_{i}.log") for i, spec in enumerate(specs)]
    assert [words(engine).partition(";")[0] for engine in engines] == ["GPUs 2,3", "GPUs 0,1", "GPUs 2,3"]
    assert all("--base-gpu-id 0" in words(engine) and "--nnodes" not in words(engine) for engine in engines)
    for engine in engines:
        engine.stop()
        assert engine.exit_code is not None

    launcher, [spec] = launcher_of(run, tmp_path, gpus_per_engine=6)
    with pytest.raises(EngineStartError, match=r"an engine of 6 GPUs got 2 \+ 4 on 2 nodes, and needs as many on eac"):
        launcher.start(spec, log_path=tmp_path / "uneven.log")


@pytest.mark.full
def test_engines_that_share_gpus_see_all_of_their_node_and_spare_ones_wait_for_room(cluster, tmp_path):
    run = place(ClusterConfig(actor_num_nodes=2, actor_num_gpus_per_node=4, colocate=True))
    assert len(run.senders(2)) == 2
    launcher, specs = launcher_of(run, tmp_path, gpus_per_engine=2, spare=1)
    engines = [launcher.start(spec, log_path=tmp_path / f"engine_{i}.log") for i, spec in enumerate(specs[:-1])]
    assert len(engines) == 4
    for number, engine in enumerate(engines):
        found = words(engine)
        assert found.startswith("GPUs 0,1,2,3;") and f"--base-gpu-id {2 * (number % 2)} " in f"{found} "

    def added() -> SGLangEngine | None:
        try:
            return launcher.start(specs[-1], log_path=tmp_path / "added.log")
        except NoRoomError:
            return None

    assert added() is None
    cluster.add_node(num_cpus=4, num_gpus=4)
    one = wait_until(added)
    assert "--base-gpu-id 0 " in f"{words(one)} "
    for engine in (*engines, one):
        engine.stop()


@pytest.mark.full  # 50 s, most of them until processes of Ray are up
def test_an_engine_spans_two_nodes_and_moves_to_one_that_joins(cluster, tmp_path):
    run = place(ClusterConfig(rollout_num_gpus=8), trains=False)
    launcher, [spec] = launcher_of(run, tmp_path, gpus_per_engine=8)
    engine = launcher.start(spec, log_path=tmp_path / "engine_0.log")
    first = words(engine)
    second = wait_until(lambda: (tmp_path / "engine_0_node_1.log").read_text())
    for rank, found in enumerate((first, second)):
        assert found.startswith("GPUs 0,1,2,3;")
        assert "--tp-size 8 " in found
        assert f"--nnodes 2 --node-rank {rank} --dist-init-addr " in found
    assert first.partition("--dist-init-addr ")[2].split()[0] == second.partition("--dist-init-addr ")[2].split()[0]

    lost = next(node for node in cluster.worker_nodes if node.node_id == run.nodes[run.rollout[-1]])
    cluster.remove_node(lost, allow_graceful=False)
    assert wait_until(lambda: engine.exit_code) == -1
    assert "is lost" in engine.ending
    with pytest.raises(NoRoomError, match=r"no node has room for 4 of its 8 GPUs|a node is lost"):
        launcher.start(spec, log_path=tmp_path / "engine_0.log")

    cluster.add_node(num_cpus=4, num_gpus=4)

    def again() -> SGLangEngine | None:
        try:
            return launcher.start(spec, log_path=tmp_path / "engine_0.log")
        except NoRoomError:
            return None

    engine = wait_until(again)
    assert "--node-rank 0" in words(engine)
    engine.stop()
