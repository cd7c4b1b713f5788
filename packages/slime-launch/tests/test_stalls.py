"""A wait without progress ends and says why; so does a process that hangs itself. Ray is real, the times are short."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slime_launch.calls import Call, Watch, Worker, gather, prepare
from slime_launch.config import ClusterConfig
from slime_launch.derived import answers_in_time
from slime_launch.errors import RayDiedError, RunError, TrainerLostError
from slime_launch.processes import Place, end_processes, own_place
from slime_launch.ray_runtime import RayRuntime, ray_runtime
from slime_launch.remote import Question, Remote
from slime_launch.stalls import STACKS_FILE, StallWatch
from slime_rollout.engine.config import EngineConfig

pytestmark = pytest.mark.real
CLUSTER = ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=1)
FEW_SECONDS = 5.0  # to look at two ranks
CHILD = """import sys, time
def child_sleeps():
    print("ready", file=sys.stderr, flush=True); time.sleep(600)
child_sleeps()
"""


class Part:
    def __init__(self, log_path: str) -> None:
        prepare(str(Path(log_path).parent), log_path, threads=1)

    def introduce(self) -> Place:
        return own_place()

    def wait_for_nothing(self) -> None:
        time.sleep(600)

    def start_child(self) -> int:
        child = subprocess.Popen([sys.executable, "-c", CHILD], stderr=subprocess.PIPE)
        assert child.stderr is not None and child.stderr.readline()
        return child.pid


@pytest.fixture(scope="module")
def own_ray() -> Iterator[RayRuntime]:
    with ray_runtime(CLUSTER, address=None) as runtime:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers don't look in the working folder
        yield runtime


@pytest.fixture
def run(own_ray, tmp_path):
    """Two workers that have said where they are, and what watches over them."""
    import ray

    watch = Watch()
    workers = []
    for rank in range(2):
        path = tmp_path / f"trainer-{rank}.log"
        actor = ray.remote(Part).options(num_cpus=0).remote(str(path))
        workers.append(Worker(f"trainer rank {rank}", actor, path, watch, lost=TrainerLostError))
        workers[-1].introduce()
    places = [ray.get(worker._introduced) for worker in workers]
    stalls = StallWatch(1.0, watch, tmp_path)
    yield workers, [psutil.Process(place.process.pid) for place in places], stalls
    stalls.close()
    end_processes([place.process for place in places])


@pytest.mark.parametrize("by", ["py-spy", "the process itself"])
def test_a_wait_without_progress_ends_with_who_is_waited_for_where_and_the_stacks(run, tmp_path, monkeypatch, by):
    if by == "the process itself":
        monkeypatch.setattr("slime_launch.processes.shutil.which", lambda *args, **kwargs: None)
    workers, processes, stalls = run
    stalls.progress("train")
    begun = time.monotonic()
    calls = {worker.start_call("wait_for_nothing"): worker for worker in workers}
    expected = (
        r"^trainer rank 0, trainer rank 1 did not end: no progress for 1 s \(--stall-timeout\) in the phase: train; "
        rf"the stacks of all ranks are in {tmp_path}/{STACKS_FILE}$"
    )
    with pytest.raises(TrainerLostError, match=expected):
        gather(calls)
    assert time.monotonic() - begun < 1.0 + FEW_SECONDS
    stacks = (tmp_path / STACKS_FILE).read_text()
    for rank, process in enumerate(processes):
        own = stacks.split(f"trainer rank {rank} (process {process.pid}):\n")[1].split("trainer rank")[0]
        assert "wait_for_nothing" in own
        assert own.startswith(f"Process {process.pid}: ") == (by == "py-spy"), own
    assert stacks.count("in gather") == 1  # the launcher's own


def test_what_a_signal_has_stopped_is_named_and_has_its_stacks_as_children_have(run, own_ray, tmp_path):
    workers, processes, stalls = run
    child = psutil.Process(gather({workers[0].start_call("start_child"): workers[0]})[0])
    for process in (child, processes[1]):
        process.suspend()
    [raylet] = [psutil.Process(pid) for pid, name in own_ray.processes.items() if name == "raylet"]
    raylet.suspend()
    words = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    other = subprocess.Popen(words, stdout=subprocess.PIPE)  # writes to no log of the run, as a rank that begins
    assert other.stdout is not None and other.stdout.readline()
    other.send_signal(signal.SIGSTOP)
    try:
        stalls.progress("save checkpoint 7")
        calls = {worker.start_call("wait_for_nothing"): worker for worker in workers}
        with pytest.raises(RayDiedError) as caught:  # nothing can be started again
            gather(calls)
    finally:
        for process in (raylet, child, processes[1]):
            process.resume()
        child.kill()
        other.kill()
        other.communicate(timeout=10)
    [_, stopped] = str(caught.value).split("stopped by a signal: ")
    assert f"trainer rank 1 (process {processes[1].pid})" in stopped
    assert f"{Path(sys.executable).name} -c import sys, time of trainer rank 0 (process {child.pid})" in stopped
    assert f"raylet (process {raylet.pid})" in stopped
    assert f"(process {other.pid})" in stopped and stopped.count("(process") == 4
    stacks = (tmp_path / STACKS_FILE).read_text()
    assert "child_sleeps (<string>:3)" in stacks and "<module> (<string>:1)" in stacks
    assert stacks.count("no stacks") == 1 and f"raylet (process {raylet.pid}):\n  no stacks: " in stacks
    assert "main_loop" in stacks.split(f"trainer rank 1 (process {processes[1].pid}):\n")[1]  # it got no call any more


def test_progress_keeps_a_wait_alive_and_a_question_is_not_blamed(run):
    workers, _, stalls = run
    call = Call({workers[0].start_call("wait_for_nothing"): workers[0]})
    question = Question([Remote(workers[1])], Part.wait_for_nothing)
    start = time.monotonic()
    with pytest.raises(RunError, match=r"trainer rank 0 did not end"):
        while not call.done(0.05):
            assert question.answers() == []
            stalls.progress("generate", min(10, int(4 * (time.monotonic() - start))))
    assert time.monotonic() - start > 3.0


@pytest.mark.parametrize(("stall", "given", "limit"), [(30, 300, 15), (100, 300, 70), (100, 20, 20), (3600, 300, 300)])
def test_an_engine_is_given_up_during_an_update_before_the_run_stalls(stall, given, limit):
    assert answers_in_time(EngineConfig(update_weight_timeout=given), stall).update_weight_timeout == limit


HANGS = """
import sys, threading
from pathlib import Path
from slime_launch.calls import Watch
from slime_launch.errors import RestartsExhaustedError, Stopped
from slime_launch.stalls import StallWatch
import slime_launch.stalls
slime_launch.stalls.TAKE_SECONDS = 0.5
stalls = StallWatch(0.5, Watch(), Path(sys.argv[1]))
if sys.argv[2] == "waits":
    stalls.progress("start Ray")
else:
    stalls.stop(Stopped(15) if sys.argv[2] == "is stopped" else RestartsExhaustedError("the first cause"))
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("does", "code", "said"),
    [
        ("waits", 1, ["slime-launch: no progress for 0.5 s (--stall-timeout) in the phase: start Ray"]),
        ("is stopped", 143, ["slime-launch: stopped by SIGTERM", "slime-launch: no progress for 0.5 s"]),
        ("stops", 3, ["slime-launch: the first cause", "slime-launch: no progress for 0.5 s"]),
    ],
)
def test_a_launcher_that_hangs_itself_ends(tmp_path, does, code, said):
    command = [sys.executable, "-c", HANGS, str(tmp_path), does]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    lines = done.stderr.splitlines()
    assert done.returncode == code and len(lines) == len(said), done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, said, strict=True))
    assert "in wait" in (tmp_path / STACKS_FILE).read_text()
