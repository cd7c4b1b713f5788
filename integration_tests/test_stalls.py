"""Whatever stops, at the start, while samples are generated or while the trainers work: no run waits without an end.

Each case strikes a real run once, and says by `fired` that it has. The run then heals (0), or ends (1, 2) and says what
was stopped, or who waited for what. Of the twelve kinds in three phases a dash is what a phase does not have:

    kind                    starting  generating  training
    a trainer rank          1         0 [1]       0
    the rollout worker      1         1           1
    an engine's scheduler   1         1           1
    the router              1         1           1
    a judge, a tool         -         1           -         only generation asks them
    a data worker           -         1 [2]       1 [2]     they start with the first prompts
    the raylet              1 [4]     1           1
    the GCS                 2         1           1
    unequal collectives     -         -           0         only training has them
    a full disk             2         1           1         no stall: the first write fails
    a lost network          1         [3]         [3]       `test_nodes.py`

    [1] once it has to train   [2] once what was read ahead is used   [3] an engine's node; that of a rank
    [4] once Ray is up: before, Ray waits for it in a call that has no limit and holds the interpreter's lock
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from launching import Assets, slowness, started, train_command, tree, wait_for, wait_until_gone

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
# These are for a quiet machine.
STALL = 45.0  # the slowest part of a start takes less
MOMENT_SECONDS = 240.0
# From the strike until everything is gone: the stall is noticed, stacks are written, all parts are stopped.
END_SECONDS = STALL + 200.0

# Functions of the run. Each waits at its moment until the test has struck, so that the moment is not over by then. The
# sample that waits while samples are generated has yet to ask the tool, the engine and the judge: whichever was struck
# is asked afterwards, however far the others have come.
HOOKS = """
import asyncio
import time
from pathlib import Path
import torch
from slime_core.ops import estimator_named
from slime_rollout import post
from slime_rollout.generate.context import generate_sample
from slime_rollout import current
from slime_rollout.http import call

WORK, PHASE, URLS = Path({work!r}), {phase!r}, {urls!r}
begun = steps = 0

def moment(phase):
    if PHASE != phase or (WORK / "fired").exists():
        return
    (WORK / "ready").touch()
    end = time.monotonic() + {seconds}
    while not (WORK / "fired").exists() and time.monotonic() < end:
        time.sleep(0.05)

async def generate(args, sample, sampling_params):
    global begun
    begun += 1
    if begun == 70:  # in the second rollout: weights have been sent, and the next ones wait for this sample
        await asyncio.to_thread(moment, "generating")
    await post(URLS["tool"], {{"text": "1 + 1"}})
    [sample] = await generate_sample(sample, current().context)
    return sample

def reward(args, sample):
    return float(call("POST", URLS["judge"], {{"tokens": sample.response_tokens}})["score"])

def advantages(inputs):
    global steps
    steps += 1
    if steps == 2 and torch.distributed.get_rank() == 1:
        if PHASE == "apart" and not (WORK / "fired").exists():
            WORK.joinpath("fired").touch()
            torch.distributed.all_reduce(torch.zeros(1))
        moment("training")
    if steps == 2 and PHASE == "sending":
        from slime_rollout.weights.channel import EngineChannel
        real = EngineChannel.send
        def send(*args, **kwargs):
            moment("sending")
            return real(*args, **kwargs)
        EngineChannel.send = send
    return estimator_named("grpo")(inputs)
"""
SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        content = json.dumps({"score": len(self.path) % 2}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass
ThreadingHTTPServer.request_queue_size = 128  # 64 samples call at once; of Python's own 5 the kernel resets the others
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, psutil.Process]]:
    """A small HTTP server in a process of its own: a judge, or a tool."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait(10)


DATA_WORKER = "multiprocessing.spawn"
VICTIMS = {
    "rank": "ray::TrainerRank",
    "rollout worker": "ray::RolloutHost",
    "scheduler": "sglang::scheduler",
    "router": "sglang::router",
    "data worker": DATA_WORKER,
    "raylet": "raylet/raylet",
    "gcs": "gcs/gcs_server",
    "tool": None,
    "judge": None,
}
"""What is stopped → a word in its command line; tool and judge are not processes of the run."""
STOPPED = {
    "starting": ("rank", "rollout worker", "scheduler", "router", "raylet", "gcs"),
    "generating": ("rank", "rollout worker", "scheduler", "router", "tool", "judge", "data worker", "raylet", "gcs"),
    "training": ("rank", "rollout worker", "scheduler", "router", "data worker", "raylet", "gcs"),
    "sending": ("scheduler",),
}
OF_RAY = {("gcs", "starting")}  # Ray itself gives up, after half a minute
HEALS = {("rank", "generating"), ("rank", "training")}
NORMAL = ("scheduler", "generating")
# To look at all processes. What goes on without the victim, as others do at the start, ends within a minute and a half.
FEW_SECONDS, LATER_SECONDS = 10.0, 90.0
LATER = {"data worker", "raylet", "gcs"}
NOT_PYTHON = {"raylet", "gcs", "tool", "judge"}
DISK_MIB = 64


@dataclass(frozen=True)
class Struck:
    """A run after its fault; ``noticed`` is when its ``stacks`` were there, in seconds, ``slow`` its `slowness`."""

    code: int
    text: str
    seconds: float
    noticed: float
    stacks: str
    left: list[str]
    slow: float


def find(family: list[psutil.Process], word: str) -> psutil.Process | None:
    """The last process of the run whose command line has the word."""
    for process in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(process.cmdline())
            above = process.parent() if word == DATA_WORKER else None
            if word in line and "reaper.py" not in line and (above is None or "RolloutHost" in above.cmdline()[0]):
                return process
    return None


def run_struck(
    assets: Assets,
    work: Path,
    phase: str,
    strike: Callable[[list[psutil.Process]], bool],
    urls: dict[str, str],
    *extra: str,
) -> Struck:
    """Run until the moment comes; ``strike`` says whether it has struck. Then wait for the end of everything."""
    work.mkdir(parents=True)
    slow = slowness()
    hooks = work / "hooks.py"
    hooks.write_text(HOOKS.format(work=str(work), phase=phase, urls=urls, seconds=MOMENT_SECONDS * slow))
    flags = ["--stall-timeout", f"{STALL * slow:g}", "--actor-num-gpus-per-node", "2", "--micro-batch-size", "32"]
    flags += ["--custom-generate-function-path", f"{hooks}:generate", "--custom-rm-path", f"{hooks}:reward"]
    flags += ["--custom-advantage-function-path", f"{hooks}:advantages", "--num-data-workers", "1"]
    flags += ["--streaming-data", "--trainer-max-restarts", "1", "--save-interval", "1"]
    flags += ["--rollout-batch-size", "32", "--n-samples-per-prompt", "2"]  # two of which are read ahead
    command = train_command(assets, work, *flags, *extra, rollouts=4, colocate=False)
    stacks = work / "out" / "logs" / "stacks.txt"
    log = work / "log.txt"
    with started(command, log) as process:
        family: list[psutil.Process] = []

        def struck() -> bool:
            family[:] = tree(process)
            return (phase in ("starting", "apart") or (work / "ready").exists()) and strike(family)

        wait_for(struck, f"the moment of {phase}", process=process, log=log)
        (work / "fired").touch()
        begun, seen, noticed = time.monotonic(), set(family), 0.0
        while (code := process.poll()) is None and time.monotonic() < begun + END_SECONDS * slow:
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.update(tree(process))
            noticed = noticed or (time.monotonic() - begun) * stacks.exists()
            time.sleep(0.3)
        seconds = time.monotonic() - begun
        text = log.read_text(errors="replace")
        assert code is not None, f"no end after {END_SECONDS * slow:g} s\n{text[-6000:]}"
        left = wait_until_gone(list(seen), 30)
    return Struck(code, text, seconds, noticed, stacks.read_text() if stacks.exists() else "", left, slow)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, phase, marks=[pytest.mark.full] * ((kind, phase) != NORMAL))
        for phase, kinds in STOPPED.items()
        for kind in kinds
    ],
)
def test_what_a_signal_stops_is_named_and_no_wait_is_endless(
    llama: Assets, tmp_path: Path, kind: str, phase: str
) -> None:
    victims: list[psutil.Process] = []
    with serving() as (tool_url, tool), serving() as (judge_url, judge):
        others = {"tool": tool, "judge": judge}

        def strike(family: list[psutil.Process]) -> bool:
            found = others.get(kind) or find(family, VICTIMS[kind] or "")
            ray_is_up = "placement: " in (tmp_path / "run" / "log.txt").read_text(errors="replace")
            if found is None or ((kind, phase) == ("raylet", "starting") and not ray_is_up):
                return False
            victims.append(found)
            os.kill(found.pid, signal.SIGSTOP)
            return True

        urls = {"tool": tool_url, "judge": judge_url}
        struck = run_struck(llama, tmp_path / "run", phase, strike, urls)
    print(f"{kind} stopped while {phase}: exit code {struck.code} after {struck.seconds:.0f} s, ", end="")
    print(f"noticed after {struck.noticed:.1f} s\n{struck.text[-2500:]}")
    assert struck.left == []
    healed = (kind, phase) in HEALS
    if (kind, phase) in OF_RAY:
        assert struck.code == 2 and f"stopped by a signal: {VICTIMS[kind].rpartition('/')[2]}" in struck.text
        assert f"(process {victims[0].pid})" in struck.text
        return
    if "did not answer when it was given engines" in struck.text:  # the router was up when it was stopped: no stall
        assert (kind, phase, struck.code) == ("router", "starting", 2)
        assert f"see process {victims[0].pid}, stopped by a signal, and the end of its log" in struck.text
        return
    assert struck.code == (0 if healed else 1)
    before, again, after = struck.text.partition("the trainers are up again, from ")
    assert bool(again) == healed
    if "saved checkpoint 1" in before:  # or else a busy machine was still writing it
        assert not healed or re.match(r"checkpoint 1\b", after)
    if phase == "sending" or (kind, phase) == ("scheduler", "training"):  # given up before that is a stall
        assert re.search(r"weight version \d+: POST http://127.0.0.1:\d+/\w+: no answer: ", struck.text)
        assert "trainer rank" not in struck.text
        return
    said = f"no answer from {urls[kind].rstrip('/')}" if kind in urls else f"(process {victims[0].pid})"
    assert said in struck.text, said
    is_later = kind in LATER or phase == "starting" or (kind, phase) == ("rank", "generating")
    assert 0 < struck.noticed < struck.slow * (STALL + (LATER_SECONDS if is_later else FEW_SECONDS))
    assert "the launcher (process " in struck.stacks
    if kind not in NOT_PYTHON:  # those of a process that is stopped, too
        assert f"(process {victims[0].pid}):\nProcess {victims[0].pid}: " in struck.stacks


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount a file system")
@pytest.mark.parametrize("phase", ["starting", "generating", "training"])
def test_a_full_disk_ends_the_run_with_the_cause(llama: Assets, tmp_path: Path, phase: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], check=True)

    def fill(family: list[psutil.Process]) -> bool:
        if phase == "starting" and find(family, "ray::RolloutHost") is None:
            return False
        with contextlib.suppress(OSError), (disk / "others").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        return True

    where = ["--save", str(disk / "save"), "--output-dir", str(disk / "out")]
    try:
        with serving() as (tool_url, _), serving() as (judge_url, _):
            urls = {"tool": tool_url, "judge": judge_url}
            struck = run_struck(llama, tmp_path / "run", phase, fill, urls, *where)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    print(f"disk full while {phase}: exit code {struck.code} after {struck.seconds:.0f} s\n{struck.text[-2500:]}")
    assert (struck.code, struck.left) == (2 if phase == "starting" else 1, [])
    assert re.search("the disk is full|No space left on device", struck.text)


@pytest.mark.full
def test_ranks_that_do_not_communicate_alike_are_named(llama: Assets, tmp_path: Path) -> None:
    """One rank runs one more all-reduce than the other."""
    with serving() as (tool_url, _), serving() as (judge_url, _):
        urls = {"tool": tool_url, "judge": judge_url}
        struck = run_struck(llama, tmp_path / "run", "apart", lambda _: (tmp_path / "run/fired").exists(), urls)
    print(f"exit code {struck.code} after {struck.seconds:.0f} s\n{struck.text[-2500:]}")
    assert (struck.code, struck.left) == (0, [])
    assert f"trainer rank 0, trainer rank 1 did not end: no progress for {STALL * struck.slow:g} s" in struck.text
    assert "the trainers are up again, from checkpoint 1" in struck.text
