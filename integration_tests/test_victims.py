"""Whoever dies or hangs, at whatever moment of a step: the end is that of a run to which nothing happened, to the bit.

Each case strikes one victim once, from within the run: `fired` says whom, and /proc that it is gone or stopped.
Trainer ranks, engines and the router are replaced within the run. Where the rollout actor, the Ray node or the launcher
is gone, or anything at the start, the run ends, and the same command continues it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from launching import Assets, started, train_command, tree, wait_until_gone
from test_healing import assert_same, weights

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
ROLLOUTS = 3
STALL, SLOWEST = 40.0, 150.0  # of a run in which something hangs, else on a machine that is busy
SECONDS = 200.0  # of one command

# Moments are those of the second rollout. Prefill and decode are seen in the engine's log.
HOOKS = """
import json, os, pathlib, signal, threading, time
import psutil
import torch
from slime_core.ops import estimator_named

WORK, MOMENT, VICTIM, SIGNAL = pathlib.Path({work!r}), {moment!r}, {word!r}, {signum}
LOG = WORK / "out/logs/engine_0.log"
TITLE = pathlib.Path("/proc/self/cmdline").read_text()
rollout, scored, steps = None, 0, 0

def find():
    above = psutil.Process().parents()
    [*_, top] = [one for one in above if any(word.endswith("/bin/slime-launch") for word in one.cmdline())]
    if VICTIM == "launcher":
        return top
    found = []
    for one in top.children(recursive=True):
        try:
            line = " ".join(one.cmdline())
        except psutil.NoSuchProcess:
            continue
        if VICTIM in line and "reaper.py" not in line:
            found.append(one)
    return min(found, key=lambda one: one.create_time(), default=None)

def strike():
    try:
        os.close(os.open(WORK / "struck", os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # it was before, or is now in another thread
        return
    end = time.monotonic() + 60
    while (victim := find()) is None and time.monotonic() < end:
        time.sleep(0.01)
    (WORK / "fired.new").write_text(json.dumps([victim.pid, victim.create_time()]))
    (WORK / "fired.new").rename(WORK / "fired")
    victim.send_signal(SIGNAL)
    while victim.is_running() and victim.status() not in ("zombie", "stopped"):
        time.sleep(0.01)

def strike_when_logged(word):
    start = LOG.stat().st_size
    while word not in LOG.read_text()[start:]:
        time.sleep(0.001)
    strike()

def before(owner, name, due=lambda *args: True):
    real = getattr(owner, name)
    def struck(*args, **kwargs):
        if due(*args):
            strike()
        return real(*args, **kwargs)
    setattr(owner, name, struck)

def generate(self, rollout_id, **kwargs):
    global rollout
    rollout = rollout_id
    if rollout == 1 and MOMENT in ("prefill", "decode"):
        threading.Thread(target=strike_when_logged, args=(MOMENT.capitalize() + " batch",), daemon=True).start()
    try:
        return real_generate(self, rollout_id, **kwargs)
    finally:
        rollout = None

def reward(args, sample):
    global scored
    scored += rollout == 1
    if scored == 4 and MOMENT == "score":
        strike()
    return sum(token % 8 == 0 for token in sample.response_tokens) / max(len(sample.response_tokens), 1)

def advantages(inputs):
    global steps
    steps += 1
    if steps == 2 and MOMENT == "train":
        strike()
    elif steps == 2 and MOMENT == "push":
        from slime_rollout.weights.channel import EngineChannel
        before(EngineChannel, "send")
    elif steps == 2 and MOMENT == "save":
        from slime_megatron.checkpoint_writer import InProcessSave
        before(InProcessSave, "save")
    return estimator_named("grpo")(inputs)

if "RolloutHost" in TITLE:
    from slime_rollout.data.source import AccountedSource
    from slime_rollout.engine.fleet import EngineFleet
    from slime_rollout.rollout import RolloutManager
    from slime_rollout.store import RolloutStore
    real_generate, RolloutManager.generate = RolloutManager.generate, generate
    if MOMENT == "start":
        before(EngineFleet, "_wait_until_ready")
    elif MOMENT == "prompts read":
        before(AccountedSource, "get_samples", lambda *_: rollout == 1)
    elif MOMENT == "write-down":
        before(RolloutStore, "write", lambda _, batch, *__: batch.rollout_id == 1)
    elif MOMENT == "evaluate":
        before(RolloutManager, "evaluate", lambda _, rollout_id: rollout_id == 2)
"""


@dataclass(frozen=True)
class Victim:
    """A word in its command line, how it is struck, whether it heals in the run, else the exit codes; what is said."""

    word: str
    heals: bool
    said: str
    codes: tuple[int, ...] = (1,)
    signum: int = signal.SIGKILL


VICTIMS = {
    "a trainer rank dies": Victim("ray::TrainerRank", True, "trainer rank 0 died"),
    "a trainer rank hangs": Victim(
        "ray::TrainerRank", True, "stopped by a signal: trainer rank 0", signum=signal.SIGSTOP
    ),
    "the rollout actor dies": Victim("ray::RolloutHost", False, "the rollout worker died"),
    "an engine dies": Victim("sglang.launch_server", True, ""),
    "the router dies": Victim("sglang::router", True, ""),
    "the Ray node dies": Victim("raylet/raylet", False, "Ray's raylet (process "),
    "the launcher dies": Victim("launcher", False, "", (-signal.SIGKILL,)),
}
MOMENTS = ("start", "prompts read", "prefill", "decode", "score", "write-down", "train", "push", "save", "evaluate")
NORMAL = {  # the launcher's is in test_resume.py
    "a trainer rank dies": "push",
    "a trainer rank hangs": "train",
    "the rollout actor dies": "score",
    "an engine dies": "decode",
    "the router dies": "prefill",
    "the Ray node dies": "write-down",
}


def command_of(assets: Assets, work: Path, moment: str, victim: Victim) -> list[str]:
    """A run on one engine and one rank that evaluates once and saves after each rollout; and its hooks."""
    work.mkdir(exist_ok=True)
    hooks = work / "hooks.py"
    hooks.write_text(HOOKS.format(work=str(work), moment=moment, word=victim.word, signum=int(victim.signum)))
    stall = STALL if victim.signum == signal.SIGSTOP else SLOWEST
    flags = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16"]
    flags += ["--micro-batch-size", "16", "--rollout-max-response-len", "24", "--sglang-decode-log-interval", "1"]
    flags += ["--save-interval", "1", "--stall-timeout", str(stall), "--use-fault-tolerance"]
    flags += ["--rollout-health-check-interval", "0.5", "--rollout-health-check-timeout", "10"]
    flags += ["--eval-prompt-data", "held", f"{assets.prompts}@[0:4]", "--eval-interval", "2"]
    flags += ["--skip-eval-before-train", "--n-samples-per-eval-prompt", "1"]
    flags += ["--custom-rm-path", f"{hooks}:reward", "--custom-advantage-function-path", f"{hooks}:advantages"]
    return train_command(assets, work, *flags, rollouts=ROLLOUTS, colocate=False)


def is_struck(work: Path) -> bool:
    """Whether /proc shows the victim gone, or stopped."""
    pid, created = json.loads((work / "fired").read_text())
    try:
        process = psutil.Process(pid)
        return process.create_time() != created or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return True


def run(command: list[str], work: Path, name: str) -> tuple[int, str, bool]:
    """Run to the end, and see that nothing is left: the exit code, what it printed, whether a victim was struck."""
    log, struck = work / name, False
    with started(command, log) as process:
        family, deadline = set(), time.monotonic() + SECONDS
        while (code := process.poll()) is None:
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
            with contextlib.suppress(psutil.NoSuchProcess):
                family.update(tree(process))
            struck = struck or ((work / "fired").exists() and is_struck(work))
            time.sleep(0.2)
        assert wait_until_gone(list(family), 30) == []
    return code, log.read_text(errors="replace"), struck


@pytest.fixture(scope="session")
def undisturbed(qwen3: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, which nothing happens to."""
    work = tmp_path_factory.mktemp("undisturbed")
    code, text, struck = run(command_of(qwen3, work, "never", VICTIMS["an engine dies"]), work, "log.txt")
    assert (code, struck) == (0, False), text[-4000:]
    return work


def test_the_comparison_sees_all_weights(undisturbed: Path) -> None:
    found = weights(undisturbed, ROLLOUTS)
    assert all(np.isfinite(tensor.float().numpy()).all() for tensor in found.values())
    first = weights(undisturbed, 1)
    assert len([name for name in found if not torch.equal(first[name], found[name])]) > 10


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(victim, moment, marks=[pytest.mark.full] * (NORMAL.get(victim) != moment))
        for victim in VICTIMS
        for moment in MOMENTS
    ],
)
def test_the_end_is_that_of_a_run_to_which_nothing_happened(
    qwen3: Assets, undisturbed: Path, tmp_path: Path, victim: str, moment: str
) -> None:
    work, one = tmp_path / "run", VICTIMS[victim]
    command = command_of(qwen3, work, moment, one)
    begun = time.monotonic()
    code, text, struck = run(command, work, "log.txt")
    print(f"{victim}, {moment}: exit code {code} after {time.monotonic() - begun:.0f} s\n{text[-1500:]}")
    heals = one.heals and moment != "start"
    assert struck or (not heals and is_struck(work))  # a run that ends with its victim may be gone before a look at it
    assert one.said in text
    if heals:
        assert code == 0
        assert ("the trainers are up again" in text) == ("rank" in victim)
    else:  # what does not come up may also be an error of the command's
        assert code in (*one.codes, *((2,) if moment == "start" else ()))
        code, text, _ = run(command, work, "continued.txt")
        assert code == 0, text[-4000:]
    assert_same(work, undisturbed, ROLLOUTS)
    print(f"equal to the undisturbed run after {time.monotonic() - begun:.0f} s")
    ours, theirs = (json.loads((one / "save" / "manifest.json").read_text()) for one in (work, undisturbed))
    assert ours["source_state"] == theirs["source_state"]
