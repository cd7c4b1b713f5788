"""Runs on a Ray cluster of several machines, each with an address of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ended import FOREVER, trained
from launching import Assets, rows, run, started, train_command, wait_for
from nodes import RAY_PORTS, Machine, Machines, can_make_nodes, machines
from test_listening import is_loopback

from slime_rollout.engine.slots import read_events

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not can_make_nodes(), reason="needs the right to make network namespaces"),
]

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
HEALING = ["--use-fault-tolerance", "--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "5"]


@pytest.mark.parametrize("gpus_per_engine", [pytest.param(1, marks=pytest.mark.full), 2])
def test_two_engines_or_one_that_spans_the_nodes(gpus_per_engine: int, qwen3: Assets, tmp_path: Path) -> None:
    sizes = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", str(gpus_per_engine)]
    command = train_command(qwen3, tmp_path, *sizes, rollouts=4, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(2, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            wait_for(
                lambda: "engines, router and trainers are up" in log.read_text(), "engines", process=process, log=log
            )
            assert all(machine.running("sglang") for machine in cluster.all)
            wait_for(trained(tmp_path, 1), "the first step", process=process, log=log)
            for machine in cluster.all:
                assert not list(wider(machine))
            assert process.wait(200) == 0, log.read_text()
        left_alone(cluster)
    text = log.read_text()
    assert "2 nodes: 10.77.0.1 (trainer ranks: 1, for engines: 1), 10.77.0.2 (trainer ranks: 0, for engines: 1)" in text
    assert "weights travel by gloo" in text
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == list(range(4))
    # of log-probs: every rank of the engine has each update
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4


@pytest.mark.parametrize("network", ["detour", pytest.param("ipv6", marks=pytest.mark.full)])
def test_trainer_ranks_on_two_nodes(network: str, qwen3: Assets, tmp_path: Path) -> None:
    """The host's name stands for the loopback address here, which gloo would take by itself.

    With a detour each node's first interface, with the default route, leads to no other node.
    """
    shape = ["--actor-num-nodes", "2", "--micro-batch-size", "32"]
    engine = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"]
    command = train_command(qwen3, tmp_path, *shape, *engine, rollouts=2, colocate=False)
    with machines(tmp_path, cpus=(1, 1, 1, 1), ipv6=network == "ipv6", detour=network == "detour") as cluster:
        text = run(cluster.first.words(*command), tmp_path / "log.txt")
    assert text.count("(trainer ranks: 1, for engines: 0)") == 2
    assert text.count("(trainer ranks: 0, for engines: 1)") == 2
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == [0, 1]
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4


@pytest.mark.parametrize("end", ["is cut off", pytest.param("dies", marks=pytest.mark.full)])
def test_a_run_goes_on_without_a_node_and_uses_one_that_joins(end: str, qwen3: Assets, tmp_path: Path) -> None:
    command = train_command(qwen3, tmp_path, "--rollout-num-gpus", "2", *HEALING, rollouts=FOREVER, colocate=False)
    log = tmp_path / "log.txt"

    def happened(event: str) -> bool:
        found = read_events(tmp_path / "out" / "logs")
        return any(one["engine"] == "engine 1" and one["event"] == event for one in found)

    with machines(tmp_path, cpus=(2, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            wait_for(trained(tmp_path, 1), "the first step", process=process, log=log)
            lost = cluster.all[1]
            lost.cut_off() if end == "is cut off" else lost.lose()
            wait_for(lambda: happened("no_room"), "the loss of the engine", process=process, log=log)
            done = len(rows(tmp_path, "rollout"))
            wait_for(trained(tmp_path, done + 3), "steps without it", process=process, log=log)
            joined = cluster.add(cpus=1)
            wait_for(lambda: happened("registered"), "another engine", process=process, log=log)
            assert joined.running("sglang")
            done = len(rows(tmp_path, "rollout"))
            wait_for(trained(tmp_path, done + 2), "steps with it", process=process, log=log)
        left_alone(cluster)


def wider(machine: Machine) -> Iterator[tuple[str, str, int]]:
    """Sockets of a run, not of Ray, that listen on more than the machine's own address and the loopback interface."""
    for users, address, port in machine.listening():
        of_ray = port in RAY_PORTS or any(name in users for name in ("gcs_server", "raylet", "ray::RuntimeEnv"))
        if not of_ray and address != machine.address and not is_loopback(address):
            yield users, address, port


def left_alone(cluster: Machines) -> None:
    """Nothing of the run is left on the machines that Ray still knows."""
    for machine in (cluster.all[0], cluster.all[-1]):
        assert not machine.running("sglang.launch_server", "TrainerRank", "RolloutHost")
