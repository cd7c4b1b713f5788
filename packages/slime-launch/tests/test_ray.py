"""Ray itself: started, used, failing in every way that the launcher must put into words, and gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from slime_core.errors import DataError
from slime_core.user_functions import load_function
from slime_launch.calls import SIGNALS, Watch, Worker, gather, prepare
from slime_launch.config import ClusterConfig
from slime_launch.errors import LostContactError, PlacementError, RunError, Stopped, TrainerLostError
from slime_launch.placement import bundle_nodes, order_bundles, plan_layout, reserve
from slime_launch.processes import Place, own_place
from slime_launch.ray_runtime import (
    RAY_FILES,
    TEMP_PREFIX,
    RayAhead,
    _own_processes,
    ray_runtime,
    temp_dir,
)
from slime_launch.trainers import Seat, TrainerGroup, TrainerRank, TrainerSpec
from slime_megatron.config import MegatronConfig
from slime_megatron.errors import CheckpointError
from slime_rollout.supervise.reaper import is_alive

pytestmark = pytest.mark.real
CLUSTER = ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=1)


class Part:
    def __init__(self, log_path: str) -> None:
        prepare(str(Path(log_path).parent.parent), log_path, threads=1)

    def introduce(self) -> Place:
        return own_place()

    def add(self, a: int, b: int) -> int:
        return a + b

    def refuse(self) -> None:
        raise DataError("row 3 is bad; mend it")

    def fail(self) -> None:
        raise ZeroDivisionError("seven by nothing")

    def die(self) -> None:
        print("my last words", flush=True)
        os.system("echo and those of a child")
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self) -> None:
        time.sleep(60)

    def lose(self) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2461")

    def lose_in_save(self) -> None:
        raise CheckpointError("cannot write it: [gloo/transport/tcp/pair.cc:538] Connection closed by peer")

    def die_later(self) -> None:
        time.sleep(1.5)
        self.die()

    def where(self) -> tuple[str, list[str], bool]:
        return str(Path.cwd()), sys.path, sys.flags.safe_path

    def load(self, path: str) -> str:
        return str(load_function(path, "--custom-rm-path")())

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def priority(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def threads(self) -> str | None:
        return os.environ.get("OMP_NUM_THREADS")


@pytest.fixture(scope="module")
def group():
    with ray_runtime(CLUSTER, address=None) as runtime:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't look in the working folder
        yield reserve(plan_layout(CLUSTER, cuda=runtime.cuda), timeout=60, watch=Watch())


@pytest.fixture
def part(group, tmp_path):
    import ray  # not above: its settings are read when it is imported

    path = tmp_path / "logs" / "part.log"
    worker = Worker("part 0", ray.remote(Part).options(num_cpus=0).remote(str(path)), path, Watch())
    yield worker
    worker.kill()


def test_only_what_a_run_needs_is_started(group):
    """No monitor, collector of logs, API server or agent of metrics; an agent that sets environments up is there."""
    words = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            words.append(" ".join(one.cmdline()))
    assert [
        name for name in ("gcs_server", "raylet", "sleep infinity") if not any(name in line for line in words)
    ] == []
    unwanted = ("monitor.py", "log_monitor", "dashboard", "DashboardAgent")
    assert [line for line in words if any(name in line.partition(" --")[0] for name in unwanted)] == []


def test_an_actor_gets_variables_and_the_priority_of_the_run(part, tmp_path):
    import ray

    path = tmp_path / "other.log"
    there = ray.remote(Part).options(num_cpus=0, runtime_env={"env_vars": {"OTHER": "7"}}).remote(str(path))
    other = Worker("part 1", there, path, Watch())
    assert other.call("variable", "OTHER") == "7"
    assert part.call("variable", "OTHER") is None
    assert part.call("priority") == os.getpriority(os.PRIO_PROCESS, 0)
    other.kill()


def test_only_this_user_reaches_the_files_of_ray_and_of_the_launcher(group):
    """Ray lets everybody write into its own directory, and what is unpickled lies next to that one."""
    [directory] = temp_dirs(os.getpid())
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [path.name for path in directory.iterdir()] == [RAY_FILES]


@pytest.mark.parametrize("length", [4, 13, 14, 15, 40, 90])
def test_paths_of_rays_sockets_are_short_enough_wherever_temporary_files_are(monkeypatch, length):
    base = Path("/tmp" if length == 4 else f"/tmp/{'t' * (length - 5)}")
    existed = base.exists()
    base.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    try:
        with temp_dir() as directory:
            name = str(directory).replace(f"-{os.getpid()}-", "-4194304-")
            socket_path = f"{name}/{RAY_FILES}/session_2026-11-28_11-59-30_790359_4194304/sockets/plasma_store"
            assert len(socket_path) <= 107
    finally:
        if not existed:
            base.rmdir()


def test_a_stop_of_every_start_is_in_nobodys_power(monkeypatch):
    """Anybody may put a link, or any other name, where temporary files are."""
    base = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # short enough to be used
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    ended = subprocess.Popen(["true"])
    ended.wait(10)
    try:
        mine = base / "mine"
        mine.mkdir()
        links = [f"{TEMP_PREFIX}{rest}" for rest in ("1-x", "1z-x", f"{'9' * 30}-x", f"{ended.pid}-x")]
        for name in links:
            (base / name).symlink_to("nowhere" if name.endswith("1-x") else mine)
        left, used = (base / f"{TEMP_PREFIX}{pid}-{'a' * 8}" for pid in (ended.pid, os.getpid()))
        left.mkdir()
        used.mkdir()
        with temp_dir() as directory:
            assert directory.parent == base
        assert sorted(path.name for path in base.iterdir()) == sorted([*links, "mine", used.name])
    finally:
        shutil.rmtree(base)


def test_bundles_are_on_this_node(group):
    assert order_bundles(bundle_nodes(group), {}) == [0, 1, 2]


def test_results_come_in_order(part):
    calls = {part.start_call("add", number, b=1): part for number in range(5)}
    assert gather(calls) == [1, 2, 3, 4, 5]


def test_an_error_of_ours_arrives_as_it_was(part):
    with pytest.raises(DataError, match="row 3 is bad; mend it"):
        part.call("refuse")


def test_another_error_names_the_worker_and_its_log(part):
    with pytest.raises(
        RunError, match=r"part 0 failed with ZeroDivisionError: seven by nothing; its log is .*part\.log"
    ):
        part.call("fail")


def test_a_death_comes_with_the_last_words(part):
    with pytest.raises(RunError) as caught:
        part.call("die")
    assert "part 0 died; the last lines of" in str(caught.value)
    assert "my last words\nand those of a child" in str(caught.value)


def test_the_first_failure_ends_the_wait(group, part, tmp_path):
    import ray

    path = tmp_path / "other.log"
    other = Worker("part 1", ray.remote(Part).options(num_cpus=0).remote(str(path)), path, Watch())
    start = time.monotonic()
    with pytest.raises(DataError):
        gather({other.start_call("sleep"): other, part.start_call("refuse"): part})
    assert time.monotonic() - start < 30
    other.kill()


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("die_later", r"^part 1 died; the last lines of"),
        ("sleep", r"^part 1 did not end, and others have waited in vain: part 0 failed with RuntimeError: \[gloo"),
        ("lose", r"^part [01] failed with RuntimeError: \[gloo"),
    ],
)
def test_what_befell_the_other_comes_first(part, tmp_path, monkeypatch, end, message):
    import ray

    # One that dies is waited for, however busy the machine is; one that sleeps is not.
    monkeypatch.setattr("slime_launch.calls.CAUSE_SECONDS", 60.0 if end == "die_later" else 5.0)
    path = tmp_path / "other.log"
    other = Worker("part 1", ray.remote(Part).options(num_cpus=0).remote(str(path)), path, part.watch)
    with pytest.raises(RunError, match=message):
        gather({part.start_call("lose"): part, other.start_call(end): other})
    other.kill()


def test_a_checkpoint_that_lacks_another_rank_is_lost_contact(part):
    with pytest.raises(LostContactError, match=r"^part 0 failed with CheckpointError: cannot write it: \[gloo"):
        part.call("lose_in_save")


def test_a_trainer_rank_that_dies_ends_a_wait_for_something_else(part, tmp_path):
    import ray

    workers = []
    for rank in range(2):
        path = tmp_path / f"trainer-{rank}.log"
        actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(path), Seat(1, 0, 1))
        workers.append(Worker(f"trainer rank {rank}", actor, path, part.watch))
    trainers = TrainerGroup(lambda: workers, MegatronConfig())
    pid = workers[1].call("alive")
    polls = []

    def poll() -> None:
        trainers.check()
        polls.append(1)
        if len(polls) == 5:
            os.kill(pid, signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(RunError, match="trainer rank 1 died; its log is"):
        part.call("sleep", on_poll=poll)
    print(f"noticed after {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 20
    trainers.kill()


def test_nobody_takes_the_port_where_ranks_will_meet(group, tmp_path):
    import ray

    actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(tmp_path / "log"), Seat(1, 0, 1))
    worker = Worker("trainer rank 0", actor, tmp_path / "log", Watch())
    meeting = worker.call("meeting_point", 4, 2)
    address, port = meeting.address, meeting.port
    with pytest.raises(OSError, match="in use"):
        socket.create_server((address, port))
    socket.create_connection((address, port), 5).close()  # ranks that come early wait
    worker.kill()


def test_ranks_of_one_node_meet_where_nobody_else_gets_in(group, tmp_path):
    import ray

    actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(tmp_path / "log"), Seat(1, 0, 1))
    worker = Worker("trainer rank 0", actor, tmp_path / "log", Watch())
    alone = worker.call("meeting_point", 1, 1)
    assert (alone.port, alone.file) == (0, None)
    meeting = worker.call("meeting_point", 2, 1)
    folder = Path(meeting.file).parent
    assert meeting.port == 0 and folder.stat().st_mode & 0o777 == 0o700
    worker.call("close")
    assert not folder.exists()
    worker.kill()


class Rank(TrainerRank):
    """A rank that builds nothing."""

    def build(self, spec, rendezvous) -> None:
        self.resume_from, self.rank = spec.resume_from, rendezvous.rank

    def call(self, verb: str, *arguments: object) -> object:
        if verb == "finish_loading" and self.rank == 1:
            raise CheckpointError("cannot read it")
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
    with pytest.raises(CheckpointError, match="cannot read it") if has_rest else contextlib.nullcontext():
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
        return gather({worker.start_call("call", "where"): worker for worker in trainers._workers})

    trainers = TrainerGroup(lambda: two_ranks(tmp_path), MegatronConfig())
    gather(trainers.build(TrainerSpec(None, None, None, "old", str(tmp_path), None)))
    before = [psutil.Process(pid) for pid, *_ in where()]
    before[0].suspend()
    before[1].kill()
    with pytest.raises(TrainerLostError, match="trainer rank 1 died"):
        gather({worker.start_call("call", "wait"): worker for worker in trainers._workers})
    polls = []
    trainers.restart(tmp_path / "iter_7", on_poll=lambda: polls.append(1))
    assert not any(process.is_running() and process.status() != "zombie" for process in before)
    after = where()
    assert [place[1:] for place in after] == [(str(tmp_path / "iter_7"), 0), (str(tmp_path / "iter_7"), 1)]
    trainers.kill()


def test_a_signal_is_heard_while_waiting(part):
    old = {signum: signal.getsignal(signum) for signum in SIGNALS}
    part.watch.listen(at_once=False)
    polls = []

    def poll() -> None:
        polls.append(1)
        if len(polls) == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()  # comes while Ray waits

    try:
        start = time.monotonic()
        with pytest.raises(Stopped) as caught:
            part.call("sleep", on_poll=poll)
        assert caught.value.exit_code == 143
        assert time.monotonic() - start < 10
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def test_a_worker_works_where_the_launcher_does(part, tmp_path):
    folder, path, is_safe = part.call("where")
    assert folder == str(tmp_path)
    assert is_safe and not {folder, "", str(Path.cwd())} & {*path}
    assert part.call("variable", "PYTHONSAFEPATH") is None, "what functions of the user start looks everywhere"
    (tmp_path / "of_the_user.py").write_text("import json\ndef score(): return json.__file__\n")
    (tmp_path / "json.py").write_text("raise ZeroDivisionError")
    assert part.call("load", "of_the_user.score") == json.__file__
    assert part.call("where")[1] == [*path, folder]


def test_threads_are_limited(part):
    assert part.call("threads") == "1"


def test_no_room_is_said_in_figures(group):
    big = plan_layout(ClusterConfig(actor_num_gpus_per_node=500, rollout_num_gpus=1), cuda=False)
    notes: list[str] = []
    with pytest.raises(PlacementError, match=r"no room on the Ray cluster after 1 s: CPU needed 501, free \d+ of \d+"):
        reserve(big, timeout=1, watch=Watch(), on_wait=notes.append)
    assert notes


ONE_RUN = """
import os, sys, time
from slime_launch.config import ClusterConfig
from slime_launch.errors import RayDiedError
from slime_launch.ray_runtime import ray_runtime
with ray_runtime(ClusterConfig(colocate=True), address=None) as runtime:
    print("up", flush=True)
    while sys.argv[1] == "watch":
        try:
            runtime.check()
        except RayDiedError as error:
            print(error, flush=True)
            os._exit(1)
        time.sleep(0.05)
"""


def run_once(mode: str, home: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.Popen([sys.executable, "-c", ONE_RUN, mode], stdout=subprocess.PIPE, text=True, env=environment)


def temp_dirs(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}{pid}-*"))


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in 20 s. (Linux 6.18 may answer `psutil.wait_procs` with ENOENT.)"""
    deadline = time.monotonic() + 20
    while (left := [one for one in processes if is_alive(one.pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.fixture(scope="module")
def without_raylet(tmp_path_factory):
    """A run whose raylet was killed: its process, the raylet's pid and what it said, with everything of it ended."""
    process = run_once("watch", tmp_path_factory.mktemp("home"))
    assert process.stdout.readline() == "up\n"
    assert temp_dirs(process.pid) != []
    [raylet] = [child for child in psutil.Process(process.pid).children() if child.name() == "raylet"]
    children = psutil.Process(process.pid).children(recursive=True)
    raylet.kill()
    said = process.stdout.read()
    process.wait(10)
    for child in children:  # the launcher's supervisor does this
        if child.is_running():
            child.kill()
    assert left_of(children) == []
    return process, raylet.pid, said


def test_a_ray_that_is_gone_is_noticed_at_once(without_raylet):
    _, pid, said = without_raylet
    assert f"Ray's raylet (process {pid}) ended by itself; the run cannot go on without it\n" in said


def test_nothing_is_left_of_an_embedded_ray_nor_of_one_that_ended_badly(without_raylet, tmp_path):
    earlier, *_ = without_raylet
    process = run_once("end", tmp_path)
    assert process.stdout.readline() == "up\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    assert process.wait(60) == 0
    assert left_of(children) == []
    assert temp_dirs(process.pid) == []
    assert temp_dirs(earlier.pid) == []
    assert list(tmp_path.iterdir()) == []  # Ray's token stays out of the home directory


def test_only_a_child_that_lives_and_started_last_is_taken_for_rays(tmp_path):
    """A raylet that Ray gave up waiting for may be there still, and what a raylet starts has its name at first."""
    (tmp_path / "raylet").symlink_to(shutil.which("sleep"))
    command = [str(tmp_path / "raylet"), "60"]
    dead, earlier = subprocess.Popen(command), subprocess.Popen(command)
    dead.kill()
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    time.sleep(1.5 / os.sysconf("SC_CLK_TCK"))  # the clock of start times
    last = subprocess.Popen(command)
    words = f"import subprocess; own = subprocess.Popen({command}); print(own.pid, flush=True); own.wait()"
    parent = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True)
    grandchild = int(parent.stdout.readline())
    try:
        found = _own_processes()
        assert [pid for pid, name in found.items() if name == "raylet"] == [last.pid]
    finally:
        os.kill(grandchild, signal.SIGKILL)
        for process in (last, earlier, dead):
            process.kill()
        for process in (parent, last, earlier, dead):
            process.wait(10)


def test_a_cluster_that_does_not_answer():
    program = (
        "from slime_launch.config import ClusterConfig\n"
        "from slime_launch.ray_runtime import ray_runtime\n"
        "from slime_launch.errors import PlacementError\n"
        "try:\n"
        "    with ray_runtime(ClusterConfig(colocate=True), address='127.0.0.1:9'): pass\n"
        "except PlacementError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:9" in done.stdout, done.stderr


def test_what_went_wrong_ahead_is_said_by_the_block_alone(monkeypatch, tmp_path):
    @contextlib.contextmanager
    def stopped(*_args, **_kwargs):
        raise Stopped(signal.SIGTERM)
        yield

    monkeypatch.setattr("slime_launch.ray_runtime.ray_runtime", stopped)
    ahead = RayAhead(ClusterConfig(colocate=True), tmp_path)
    with pytest.raises(Stopped), ahead:
        pass
    ahead.close()
