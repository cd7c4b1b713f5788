"""Strikes at processes of a run, each once and from within it: `fired` says whom, /proc that it is gone or stopped."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from launching import Assets, slowness, started, train_command, watch_to_the_end

STALL, SLOWEST = 40.0, 500.0  # of a run in which something hangs, else on a machine that is busy
SECONDS = 900.0  # of one command

# Prefill and decode are seen in the engine's log. How many rollouts are trained on, the manifest says: moments of
# training, updates and saves are those of rollouts that begin at a checkpoint.
HOOKS = """
import json, os, pathlib, threading, time
import psutil
from slime_core.ops import estimator_named

WORK = pathlib.Path({work!r})
STRIKES = json.loads((WORK / "strikes.json").read_text())
LOG = WORK / "out/logs/engine_0.log"
TITLE = pathlib.Path("/proc/self/cmdline").read_text()
rollout, scored = None, 0

def find(word):
    above = psutil.Process().parents()
    [*_, top] = [one for one in above if any(part.endswith("/bin/slime-launch") for part in one.cmdline())]
    if word == "launcher":
        return top
    found = []
    for one in top.children(recursive=True):
        try:
            line = " ".join(one.cmdline())
        except psutil.NoSuchProcess:
            continue
        if word in line and "reaper.py" not in line:
            found.append(one)
    return min(found, key=lambda one: one.create_time(), default=None)

def strike(*moment):
    for number, (*due, word, signum) in enumerate(STRIKES):
        if tuple(due) == moment:
            strike_once(number, word, signum)

def strike_once(number, word, signum):
    try:
        os.close(os.open(WORK / f"struck-{{number}}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:  # it was before, or is now in another thread
        return
    end = time.monotonic() + 60
    while (victim := find(word)) is None and time.monotonic() < end:
        time.sleep(0.01)
    new = WORK / f"fired-{{number}}.new"
    new.write_text(json.dumps([victim.pid, victim.create_time()]))
    new.rename(WORK / f"fired-{{number}}")
    victim.send_signal(signum)
    while victim.is_running() and victim.status() not in ("zombie", "stopped"):
        time.sleep(0.01)

def strike_when_logged(moment, word):
    start = LOG.stat().st_size
    while word not in LOG.read_text()[start:]:
        time.sleep(0.001)
    strike(*moment)

def before(owner, name, moment):
    real = getattr(owner, name)
    def struck(*args, **kwargs):
        strike(*moment(*args))
        return real(*args, **kwargs)
    setattr(owner, name, struck)

def generate(self, rollout_id, **kwargs):
    global rollout, scored
    rollout, scored = rollout_id, 0
    for _, name, *_ in [one for one in STRIKES if one[0] == rollout and one[1] in ("prefill", "decode")]:
        watched = (rollout, name), name.capitalize() + " batch"
        threading.Thread(target=strike_when_logged, args=watched, daemon=True).start()
    try:
        return real_generate(self, rollout_id, **kwargs)
    finally:
        rollout = None

def reward(args, sample):
    global scored
    scored += 1
    if scored == 4:
        strike(rollout, "score")
    return sum(token % 8 == 0 for token in sample.response_tokens) / max(len(sample.response_tokens), 1)

def trained_on():
    return json.loads((WORK / "save/manifest.json").read_text())["iteration"]

def advantages(inputs):
    from slime_megatron.checkpoints import writer
    from slime_rollout.weights.channel import EngineChannel
    strike(trained_on(), "train")
    if "struck" not in EngineChannel.send.__name__:  # after the first step: not what is sent at the start
        before(EngineChannel, "send", lambda *_: (trained_on(), "push"))
        before(writer, "write_state", lambda *_: (trained_on(), "save"))
    return estimator_named("grpo")(inputs)

if "RolloutHost" in TITLE:
    from slime_rollout.data.source import AccountedSource
    from slime_rollout.engine.fleet import EngineFleet
    from slime_rollout.rollout import RolloutManager
    from slime_rollout.store import RolloutStore
    real_generate, RolloutManager.generate = RolloutManager.generate, generate
    before(EngineFleet, "_wait_until_ready", lambda *_: (None, "start"))
    before(AccountedSource, "get_samples", lambda *_: (rollout, "prompts read"))
    before(RolloutStore, "write", lambda _, batch, *__: (batch.rollout_id, "write-down"))
    before(RolloutManager, "evaluate", lambda _, rollout_id, *__: (rollout_id - 1, "evaluate"))
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
Strike = tuple[str, int, str]
"""A victim, a rollout and a moment of it."""


def command_of(
    assets: Assets, work: Path, strikes: Sequence[Strike], *more: str, rollouts: int, colocate: bool = False
) -> list[str]:
    """A run on one engine and one rank that evaluates after every second rollout; and its hooks."""
    work.mkdir(exist_ok=True)
    hooks = work / "hooks.py"
    hooks.write_text(HOOKS.format(work=str(work)))
    hurt = [(VICTIMS[who], rollout, moment) for who, rollout, moment in strikes]
    due = [(None if moment == "start" else rollout, moment, one.word, one.signum) for one, rollout, moment in hurt]
    (work / "strikes.json").write_text(json.dumps(due))
    stall = STALL * slowness() if any(one.signum == signal.SIGSTOP for one, *_ in hurt) else SLOWEST
    flags = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16"]
    flags += ["--micro-batch-size", "16", "--rollout-max-response-len", "24", "--sglang-decode-log-interval", "1"]
    flags += ["--save-interval", "1", "--stall-timeout", str(stall)]
    if not colocate:  # engines that sleep are not asked for their health
        flags += ["--use-fault-tolerance", "--rollout-health-check-interval", "0.5"]
        flags += ["--rollout-health-check-timeout", "10"]
    flags += ["--eval-prompt-data", "held", f"{assets.prompts}@[0:4]", "--eval-interval", "2"]
    flags += ["--skip-eval-before-train", "--n-samples-per-eval-prompt", "1"]
    flags += ["--custom-rm-path", f"{hooks}:reward", "--custom-advantage-function-path", f"{hooks}:advantages"]
    return train_command(assets, work, *flags, *more, rollouts=rollouts, colocate=colocate)


def are_struck(work: Path) -> set[int]:
    """The numbers of the strikes whose victim /proc shows gone, or stopped."""
    found = set()
    for path in work.glob("fired-*[0-9]"):
        pid, created = json.loads(path.read_text())
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
            if process.create_time() == created and not ended:
                continue
        found.add(int(path.name.removeprefix("fired-")))
    return found


def run(command: list[str], work: Path, name: str) -> tuple[int, str, set[int]]:
    """Run to the end, and see that nothing is left: the exit code, what it printed, which victims were struck."""
    log, struck = work / name, set[int]()
    with started(command, log) as process:
        code, left = watch_to_the_end(process, log, SECONDS, lambda: struck.update(are_struck(work)))
        assert left == []
    return code, log.read_text(errors="replace"), struck
