"""Runs on a Ray cluster of several machines, each with an address of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ASK
from ended import FOREVER, trained
from launching import RUN_SECONDS, Assets, ages_of, recorded, rows, run, slowness, started, train_command, wait_for
from nodes import RAY_PORTS, Machine, Machines, can_make_nodes, machines
from test_listening import is_loopback

from slime_rollout.engine.slots import read_events

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not can_make_nodes(), reason="needs the right to make network namespaces"),
]

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
STALENESS = 2
SLOWLY = ["--custom-rm-path", f"{Path(__file__).with_name('reward.py')}:patiently"]  # the test waits for Ray
BESIDE = ["--async-buffer-size", "2", "--max-weight-staleness", str(STALENESS), "--use-tis", "--keep-rollouts"]
LONG = 40  # rollouts: Ray notices a lost node after seconds
HEALING = ["--use-fault-tolerance", "--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "5"]


@pytest.mark.parametrize("end", ["dies", pytest.param("is cut off", marks=pytest.mark.full)])
def test_ranks_and_engines_are_on_nodes_of_their_own_and_an_engines_node_is_lost(
    end: str, qwen3: Assets, tmp_path: Path
) -> None:
    """Nothing of the run but its launcher is on the first node. A node's default route leads to no other node."""
    ranks = 1 if end == "dies" else 2
    sizes = ["--actor-num-nodes", str(ranks), "--micro-batch-size", "32", "--rollout-num-gpus", "2"]
    same = ["--keep-old-actor", "--get-mismatch-metrics", "--advantage-estimator", "gspo", "--eps-clip", "0.05"]
    command = train_command(
        qwen3, tmp_path, *sizes, *same, *HEALING, *BESIDE, *SLOWLY, rollouts=FOREVER, colocate=False
    )
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(0, 1, 1, *[1] * ranks), detour=True) as cluster:
        with started(cluster.first.words(*command), log) as process:
            until = Watching(tmp_path, process, log)
            until.trained(1)
            text = log.read_text()
            assert text.count("(trainer ranks: 1, for engines: 0)") == ranks
            assert text.count("(trainer ranks: 0, for engines: 1)") == 2
            for machine in cluster.all:
                assert not list(wider(machine))
            with_engine = [machine for machine in cluster.all if machine.running("sglang.launch_server")]
            [lost] = [machine for machine in with_engine if not machine.running("RolloutHost")]
            until.goes_on_without(lost, end, cluster)
        left_alone(cluster)
        words = cluster.first.words(sys.executable, "-c", ASK, "1")
        assert subprocess.run(words, capture_output=True, text=True, timeout=120).stdout == "answer: 42\n"
    # Every token is of the weights that its engine said to have.
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4
    each_sample_was_trained_on_once(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("gpus_per_engine", [1, 2])
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
            assert process.wait(RUN_SECONDS) == 0, log.read_text()
        left_alone(cluster)
    text = log.read_text()
    assert "2 nodes: 10.77.0.1 (trainer ranks: 1, for engines: 1), 10.77.0.2 (trainer ranks: 0, for engines: 1)" in text
    assert "weights travel by gloo" in text
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == list(range(4))
    # of log-probs: every rank of the engine has each update
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("network", ["detour", "ipv6"])
def test_trainer_ranks_and_an_engine_that_spans_two_nodes(network: str, qwen3: Assets, tmp_path: Path) -> None:
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


@pytest.mark.full
def test_halves_that_share_nodes_send_weights_within_each(qwen3: Assets, tmp_path: Path) -> None:
    shape = ["--actor-num-nodes", "2", "--micro-batch-size", "32", "--rollout-num-gpus", "2"]
    command = train_command(qwen3, tmp_path, *shape, "--update-weight-transport", "tensor", rollouts=3)
    with machines(tmp_path, cpus=(1, 1)) as cluster:
        text = run(cluster.first.words(*command), tmp_path / "log.txt")
        left_alone(cluster)
    assert text.count("(trainer ranks: 1, for engines: 1)") == 2
    assert "weights travel by tensor, about" in text
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == list(range(3))
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("end", ["is cut off", "dies"])
def test_a_run_goes_on_without_a_node_and_uses_one_that_joins(end: str, qwen3: Assets, tmp_path: Path) -> None:
    sizes = ["--rollout-num-gpus", "2"]
    command = train_command(qwen3, tmp_path, *sizes, *HEALING, *BESIDE, rollouts=FOREVER, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(2, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            until = Watching(tmp_path, process, log)
            until.trained(1)
            for machine in cluster.all:
                assert not list(wider(machine))
            until.goes_on_without(cluster.all[1], end, cluster)
        left_alone(cluster)
    each_sample_was_trained_on_once(tmp_path)


@pytest.mark.full
def test_engines_are_added_as_nodes_join_and_leave_with_them(qwen3: Assets, tmp_path: Path) -> None:
    """It begins on one machine; a second and a third join, the one is shut down, the other dies."""
    sizes = ["--rollout-num-gpus", "1", "--rollout-max-num-gpus", "3", "--keep-old-actor", "--get-mismatch-metrics"]
    command = train_command(qwen3, tmp_path, *sizes, *HEALING, *BESIDE, rollouts=FOREVER, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(2,)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            until = Watching(tmp_path, process, log)
            until.trained(1)
            second, third = cluster.add(cpus=1), cluster.add(cpus=1)
            for engine in ("engine 1", "engine 2"):
                until.happened(engine, "registered")
            assert second.running("sglang") and third.running("sglang")
            until.trained(3)
            second.shut_down()
            third.lose()
            for engine in ("engine 1", "engine 2"):
                until.happened(engine, "no_room")
            until.trained(3)
            assert not second.running("sglang")
        left_alone(cluster)
    text = log.read_text()
    assert "1 node: 10.77.0.1 (trainer ranks: 1, for engines: 1); up to 2 more for engines as nodes join" in text
    for event in read_events(tmp_path / "out" / "logs"):
        assert event["event"] != "weights" or event["detail"] != "as started"
    # Every token is of the weights that its engine said to have.
    assert max(row[DIFFERENCE] for row in rows(tmp_path, "train")) < 1e-4
    each_sample_was_trained_on_once(tmp_path)


class Watching:
    """Waits for what a run with engines on several machines does."""

    def __init__(self, work: Path, process: subprocess.Popen[bytes], log: Path) -> None:
        self._work = work
        self._how: dict[str, Any] = {"process": process, "log": log}

    def trained(self, more: int) -> None:
        """So many more steps."""
        done = len(rows(self._work, "train"))
        wait_for(trained(self._work, done + more), f"{more} steps after {done}", **self._how)

    def happened(self, engine: str, event: str) -> None:
        """An event of an engine."""
        wait_for(lambda: any(one["engine"] == engine for one in self._events(event)), f"{engine} {event}", **self._how)

    def goes_on_without(self, lost: Machine, end: str, cluster: Machines) -> None:
        """It trains without the second engine, whose machine is lost, and with that engine again on one that joins."""
        lost.cut_off() if end == "is cut off" else lost.lose()
        self.happened("engine 1", "no_room")
        self.trained(2)
        joined = cluster.add(cpus=1)
        self.happened("engine 1", "registered")
        assert joined.running("sglang")
        self.trained(1)

    def _events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in read_events(self._work / "out" / "logs") if one["event"] == kind]


def each_sample_was_trained_on_once(work: Path) -> None:
    """Whatever became of engines: the ledger balances, and no token is older than it may be."""
    logs = [work / "log.txt", work / "out" / "logs" / "rollout.log"]
    assert not any("does not balance" in log.read_text() for log in logs)
    count = len({row["rollout_id"] for row in rows(work, "train")})
    ages = ages_of(recorded(work, count))
    print(f"{count} rollouts; ages of tokens: {ages}")
    assert 0 < max(ages) <= STALENESS and min(ages) >= 0


@pytest.mark.full
@pytest.mark.parametrize("end", ["is cut off", "dies"])
def test_a_node_with_trainer_ranks_is_lost_and_they_start_again_on_one_that_joins(
    end: str, qwen3: Assets, tmp_path: Path
) -> None:
    shape = ["--actor-num-nodes", "2", "--micro-batch-size", "32", "--save-interval", "1", "--stall-timeout", "120"]
    command = train_command(qwen3, tmp_path, *shape, rollouts=LONG, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(1, 1, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            wait_for((tmp_path / "save" / "iter_0000002").is_dir, "checkpoints", process=process, log=log)
            lost = next(machine for machine in cluster.all[1:] if machine.running("TrainerRank"))
            lost.cut_off() if end == "is cut off" else lost.lose()
            noticed = "starting the trainers again (restart 1 of 3)"
            wait_for(lambda: noticed in log.read_text(), "the loss of a rank", process=process, log=log)
            joined = cluster.add(cpus=1)
            wait_for(lambda: bool(joined.running("TrainerRank")), "its place", process=process, log=log)
            assert process.wait(RUN_SECONDS) == 0, log.read_text()
        left_alone(cluster)
    assert "the trainers are up again, from checkpoint " in log.read_text()
    assert [row["rollout_id"] for row in rows(tmp_path, "train")] == list(range(LONG))


@pytest.mark.full
@pytest.mark.parametrize("end", ["is cut off", "dies"])
def test_a_node_with_the_rollout_worker_is_lost_and_the_same_command_goes_on(
    end: str, qwen3: Assets, tmp_path: Path
) -> None:
    command = train_command(qwen3, tmp_path, "--save-interval", "1", *HEALING, rollouts=LONG, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(0, 1, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            wait_for((tmp_path / "save" / "iter_0000002").is_dir, "checkpoints", process=process, log=log)
            [lost] = [machine for machine in cluster.all if machine.running("RolloutHost")]
            lost.cut_off() if end == "is cut off" else lost.lose()
            assert process.wait(RUN_SECONDS) == 1, log.read_text()
        assert "the rollout worker died" in log.read_text()
        assert not any(machine.running("TrainerRank") for machine in cluster.all if machine is not lost)
        cluster.add(cpus=1)
        text = run(cluster.first.words(*command), tmp_path / "continued.txt")
        left_alone(cluster)
    assert "continuing the run in " in text
    assert [row["rollout_id"] for row in rows(tmp_path, "train")] == list(range(LONG))


@pytest.mark.full
@pytest.mark.parametrize("part", ["TrainerRank", "sglang.launch_server"])
def test_a_network_that_is_lost_at_the_start_ends_the_run(part: str, qwen3: Assets, tmp_path: Path) -> None:
    shape = ["--actor-num-nodes", "2", "--micro-batch-size", "32", "--stall-timeout", f"{60 * slowness():g}"]
    command = train_command(qwen3, tmp_path, *shape, rollouts=2, colocate=False)
    log = tmp_path / "log.txt"
    with machines(tmp_path, cpus=(0, 1, 1, 1)) as cluster:
        with started(cluster.first.words(*command), log) as process:
            at = lambda: [machine for machine in cluster.all[1:] if machine.running(part)]  # noqa: E731
            wait_for(lambda: bool(at()), part, process=process, log=log)
            [lost, *_] = at()
            lost.cut_off()
            begun = time.monotonic()
            assert process.wait(RUN_SECONDS) == 1, log.read_text()
        print(f"ended after {time.monotonic() - begun:.0f} s\n{log.read_text()}")
        assert not any(machine.running("TrainerRank", "RolloutHost") for machine in cluster.all if machine is not lost)
    assert lost.address in log.read_text().splitlines()[-1]


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
