"""Ray itself: started, used, failing in every way that the launcher must put into words, and gone."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
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
from slime_launch.errors import LostContactError, PlacementError, RunError, Stopped
from slime_launch.placement import bundle_nodes, order_bundles, plan_layout, reserve
from slime_launch.processes import Place, own_place
from slime_launch.ray_runtime import (
    RAY_FILES,
    TEMP_PREFIX,
    RayAhead,
    _own_processes,
    temp_dir,
)
from slime_launch.remote import Remote
from slime_launch.trainers import Seat, TrainerGroup, TrainerRank
from slime_megatron.errors import TrainerCheckpointError
from slime_megatron.settings.config import MegatronConfig
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
        raise TrainerCheckpointError("cannot write it: [gloo/transport/tcp/pair.cc:538] Connection closed by peer")

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
    assert Remote(other).call(Part.variable, "OTHER") == "7"
    assert Remote(part).call(Part.variable, "OTHER") is None
    assert Remote(part).call(Part.priority) == os.getpriority(os.PRIO_PROCESS, 0)
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
        Remote(part).call(Part.refuse)


def test_another_error_names_the_worker_and_its_log(part):
    with pytest.raises(
        RunError, match=r"part 0 failed with ZeroDivisionError: seven by nothing; its log is .*part\.log"
    ):
        Remote(part).call(Part.fail)


def test_a_death_comes_with_the_last_words(part):
    with pytest.raises(RunError) as caught:
        Remote(part).call(Part.die)
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
    with pytest.raises(LostContactError, match=r"^part 0 failed with TrainerCheckpointError: cannot write it: \[gloo"):
        Remote(part).call(Part.lose_in_save)


def test_a_trainer_rank_that_dies_ends_a_wait_for_something_else(part, tmp_path):
    import ray

    workers = []
    for rank in range(2):
        path = tmp_path / f"trainer-{rank}.log"
        actor = ray.remote(TrainerRank).options(num_cpus=0).remote(str(tmp_path), str(path), Seat(1, 0, 1))
        workers.append(Worker(f"trainer rank {rank}", actor, path, part.watch))
    trainers = TrainerGroup(lambda: workers, MegatronConfig())
    pid = Remote(workers[1]).call(TrainerRank.alive)
    polls = []

    def poll() -> None:
        trainers.check()
        polls.append(1)
        if len(polls) == 5:
            os.kill(pid, signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(RunError, match="trainer rank 1 died; its log is"):
        Remote(part).start(Part.sleep).wait(poll)
    print(f"noticed after {time.monotonic() - start:.1f} s")
    assert time.monotonic() - start < 20
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
            Remote(part).start(Part.sleep).wait(poll)
        assert caught.value.exit_code == 143
        assert time.monotonic() - start < 10
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def test_a_worker_works_where_the_launcher_does(part, tmp_path):
    folder, path, is_safe = Remote(part).call(Part.where)
    assert folder == str(tmp_path)
    assert is_safe and not {folder, "", str(Path.cwd())} & {*path}
    assert Remote(part).call(Part.variable, "PYTHONSAFEPATH") is None, (
        "what functions of the user start looks everywhere"
    )
    (tmp_path / "of_the_user.py").write_text("import json\ndef score(): return json.__file__\n")
    (tmp_path / "json.py").write_text("raise ZeroDivisionError")
    assert Remote(part).call(Part.load, "of_the_user.score") == json.__file__
    assert Remote(part).call(Part.where)[1] == [*path, folder]


def test_threads_are_limited(part):
    assert Remote(part).call(Part.threads) == "1"


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
