"""Trainer ranks in actors of Ray: where they meet, what they load while nobody waits, and how they start again."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from slime_launch.calls import Watch, Worker, gather
from slime_launch.errors import TrainerLostError
from slime_launch.remote import Remote
from slime_launch.trainers import Seat, TrainerGroup, TrainerRank, TrainerSpec
from slime_megatron.errors import TrainerCheckpointError
from slime_megatron.settings.config import MegatronConfig

pytestmark = pytest.mark.real


def test_nobody_takes_the_port_where_ranks_will_meet(group, tmp_path):
    import ray

    actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(tmp_path / "log"), Seat(1, 0, 1))
    worker = Worker("trainer rank 0", actor, tmp_path / "log", Watch())
    meeting = Remote(worker).call(TrainerRank.meeting_point, 4, 2)
    address, port = meeting.address, meeting.port
    with pytest.raises(OSError, match="in use"):
        socket.create_server((address, port))
    socket.create_connection((address, port), 5).close()  # ranks that come early wait
    worker.kill()


def test_ranks_of_one_node_meet_where_nobody_else_gets_in(group, tmp_path):
    import ray

    actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(tmp_path / "log"), Seat(1, 0, 1))
    worker = Worker("trainer rank 0", actor, tmp_path / "log", Watch())
    alone = Remote(worker).call(TrainerRank.meeting_point, 1, 1)
    assert (alone.port, alone.file) == (0, None)
    meeting = Remote(worker).call(TrainerRank.meeting_point, 2, 1)
    folder = Path(meeting.file).parent
    assert meeting.port == 0 and folder.stat().st_mode & 0o777 == 0o700
    Remote(worker).call(TrainerRank.close)
    assert not folder.exists()
    worker.kill()


class Rank(TrainerRank):
    """A rank that builds nothing."""

    def build(self, spec, rendezvous) -> None:
        self.resume_from, self.rank = spec.resume_from, rendezvous.rank

    def call_held(self, method: str, *arguments: object) -> object:
        if method == "finish_loading" and self.rank == 1:
            raise TrainerCheckpointError("cannot read it")
        return (os.getpid(), self.resume_from, self.rank)


@pytest.mark.parametrize(("resume_from", "weights_first"), [("old", True), ("old", False), (None, True)])
def test_ranks_load_the_rest_of_a_checkpoint_while_nobody_waits(group, tmp_path, resume_from, weights_first):
    """Where there is a rest, once; what goes wrong is raised by a check."""
    trainers = TrainerGroup(lambda: two_ranks(tmp_path), MegatronConfig())
    spec = TrainerSpec(None, None, None, resume_from, str(tmp_path), None, weights_first=weights_first)
    gather(trainers.build(spec))
    trainers.finish_loading()
    trainers.finish_loading()
    has_rest = trainers._loading is not None
    assert has_rest == (weights_first and resume_from is not None)
    deadline = time.monotonic() + 60
    with pytest.raises(TrainerCheckpointError, match="cannot read it") if has_rest else contextlib.nullcontext():
        while time.monotonic() < deadline and trainers._loading is not None:
            trainers.check()
    trainers.kill()


def two_ranks(directory: Path) -> list[Worker]:
    import ray

    workers = []
    for rank in range(2):
        path = directory / f"trainer-{rank}.log"
        actor = ray.remote(Rank).options(num_cpus=0).remote(str(directory), str(path), Seat(1, 0, 1))
        workers.append(Worker(f"trainer rank {rank}", actor, path, Watch(), lost=TrainerLostError))
    return workers


def test_trainers_start_again_in_the_place_of_those_that_died_or_hang(group, tmp_path):
    def where() -> list[tuple[int, str | None, int]]:
        return gather({worker.start_call("call_held", "where"): worker for worker in trainers._workers})

    trainers = TrainerGroup(lambda: two_ranks(tmp_path), MegatronConfig())
    gather(trainers.build(TrainerSpec(None, None, None, "old", str(tmp_path), None)))
    before = [psutil.Process(pid) for pid, *_ in where()]
    before[0].suspend()
    before[1].kill()
    with pytest.raises(TrainerLostError, match="trainer rank 1 died"):
        gather({worker.start_call("call_held", "wait"): worker for worker in trainers._workers})
    polls = []
    trainers.restart(tmp_path / "iter_7", on_poll=lambda: polls.append(1))
    assert not any(process.is_running() and process.status() != "zombie" for process in before)
    after = where()
    assert [place[1:] for place in after] == [(str(tmp_path / "iter_7"), 0), (str(tmp_path / "iter_7"), 1)]
    trainers.kill()
