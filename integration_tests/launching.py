"""Runs of the real launcher on tiny models, and what they left on disk."""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tiny import make_model, write_prompts

from slime_core.types import RolloutBatch
from slime_launch.metric_names import unlisted
from slime_launch.tracking import METRICS_FILE
from slime_rollout.store import RolloutStore

LAUNCHER = Path(sys.executable).with_name("slime-launch")
RUN_SECONDS = 900.0  # on a machine that is slow and busy; a quiet one takes less than a minute
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Assets:
    """A tiny model in both formats, prompts for it, and the interpreter that serves it."""

    hf: Path
    torch_dist: Path
    prompts: Path
    engine_python: str


def make_assets(family: str, base: Path) -> Assets:
    """A tiny model of a family, as everything needs it."""
    hf = make_model(family, base / "hf")
    torch_dist = base / "torch_dist"
    converter = Path(sys.executable).with_name("slime-convert")
    subprocess.run(
        [converter, "hf-to-torch-dist", "--hf-checkpoint", hf, "--save", torch_dist], check=True, timeout=120
    )
    return Assets(hf, torch_dist, write_prompts(base / "prompts.jsonl", 64), engine_python())


def train_command(
    assets: Assets, work: Path, *extra: str, rollouts: int, save: bool = True, colocate: bool = True
) -> list[str]:
    """An ordinary `slime-launch train` command; later flags in `extra` replace earlier ones."""
    flags: dict[str, list[str]] = {
        "--hf-checkpoint": [str(assets.hf)],
        "--load": [str(assets.torch_dist)],
        "--prompt-data": [str(assets.prompts)],
        "--sglang-python": [assets.engine_python],
        "--output-dir": [str(work / "out")],
        "--actor-num-nodes": ["1"],
        "--actor-num-gpus-per-node": ["1"],
        "--rollout-num-gpus": ["1"],
        "--num-rollout": [str(rollouts)],
        "--rollout-batch-size": ["8"],
        "--n-samples-per-prompt": ["8"],
        "--global-batch-size": ["64"],
        "--micro-batch-size": ["64"],
        "--rollout-max-response-len": ["6"],
        "--advantage-estimator": ["grpo"],
        "--use-kl-loss": [],
        "--kl-loss-coef": ["0.001"],
        "--lr": ["1e-3"],
        "--sglang-max-running-requests": ["64"],
        "--sglang-max-total-tokens": ["8192"],
        "--sglang-context-length": ["128"],
        "--custom-rm-path": [f"{Path(__file__).with_name('reward.py')}:every_eighth_token"],
    }
    if colocate:
        flags["--colocate"] = []
    if save:
        flags["--save"] = [str(work / "save")]
    name = ""
    for word in extra:
        if word.startswith("--"):
            name = word
            flags[name] = []
        else:
            flags[name].append(word)
    return [str(LAUNCHER), "train", *(word for flag, values in flags.items() for word in (flag, *values))]


def _end_with_this_process() -> None:
    """Have a launcher end in order if the tests are killed; it would go on to its last rollout."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher in a process group of its own; whatever happens, it is gone afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_this_process,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def run(command: list[str], log: Path, *, seconds: float = RUN_SECONDS) -> str:
    """Run a launcher to its end; returns what it printed, and fails with that unless it exits with 0."""
    with started(command, log) as process:
        code = process.wait(seconds)
    text = log.read_text(errors="replace")
    assert code == 0, f"exit code {code}\n{text[-6000:]}"
    if "--output-dir" in command:
        path = Path(command[command.index("--output-dir") + 1]) / METRICS_FILE
        names = {name for line in (path.read_text().splitlines() if path.exists() else []) for name in json.loads(line)}
        assert (new := unlisted(names)) == [], f"add {', '.join(new)} to slime_launch/metric_names.toml"
    return text


def rows(work: Path, kind: str) -> list[dict[str, Any]]:
    """The complete rows of one kind in a run's metrics.jsonl."""
    path = work / "out" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in parsed if row["kind"] == kind]


def recorded(work: Path, rollouts: int) -> list[RolloutBatch]:
    """The first rollouts that a run with --save and --keep-rollouts wrote down: whole, and no sample is in two."""
    store = RolloutStore(work / "save" / "rollouts")
    batches = [store.read(number).batch() for number in range(rollouts)]
    assert [len(batch.groups) for batch in batches] == [8] * rollouts
    indices = [sample.index for batch in batches for sample in batch.samples]
    assert len(indices) == len(set(indices)) == rollouts * 64
    return batches


def ages_of(batches: list[RolloutBatch]) -> dict[int, int]:
    """How many tokens were sampled so many weight versions before the one that they were trained from."""
    ages = Counter(
        batch.rollout_id - version
        for batch in batches
        for sample in batch.samples
        for version in sample.weight_versions
    )
    return dict(sorted(ages.items()))


def slowness() -> float:
    """How many times as long things may take as on a quiet machine; it is 1 up to eight busy threads a core."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) / 8) * max(1.0, _slower() / 1.5)


@functools.cache
def _slower() -> float:
    """How many times as long this machine computes as the one that limits of time were chosen on."""
    least = math.inf
    for _ in range(3):
        start = time.process_time()
        sum(number for number in range(10**6))
        least = min(least, time.process_time() - start)
    return least / 0.02


def wait_for(
    condition: Callable[[], bool],
    what: str,
    *,
    process: subprocess.Popen[bytes],
    log: Path,
    seconds: float = RUN_SECONDS,
) -> None:
    """Wait until `condition` holds while `process` lives."""
    deadline = time.monotonic() + seconds
    while not condition():
        alive, late = process.poll() is None, time.monotonic() > deadline
        assert alive and not late, f"{what}: never came\n{log.read_text(errors='replace')[-6000:]}"
        time.sleep(0.2)


def tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all its descendants now."""
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]


def shared_memory(processes: list[psutil.Process]) -> list[Path]:
    """The files in /dev/shm that the processes have in their memory now, and whose names others could still open."""
    paths = set()
    for process in processes:
        with suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            paths |= {
                line.partition("/")[2] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")
            }
    return sorted(Path("/", path) for path in paths)


def listening(processes: list[psutil.Process]) -> set[tuple[str, str, int]]:
    """Command, address and port of every TCP socket that the processes listen on."""
    found = set()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())[:100]
            sockets = process.net_connections("tcp")
            found |= {(command, one.laddr.ip, one.laddr.port) for one in sockets if one.status == psutil.CONN_LISTEN}
    return found


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> list[str]:
    """Wait until all are gone; returns what is left of them after `seconds`.

    Not by `psutil.wait_procs`, which Linux 6.18 answers with ENOENT where a process is just ending.
    """
    deadline = time.monotonic() + seconds
    while left := [text for process in processes if (text := _running(process)) is not None]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def _running(process: psutil.Process) -> str | None:
    """Its number and command; ``None`` if it has ended."""
    with suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    return None


def watch_to_the_end(
    process: subprocess.Popen[bytes], log: Path, seconds: float, look: Callable[[], object] = lambda: None
) -> tuple[int, list[str]]:
    """Wait for a launcher's end, and call `look` meanwhile; its exit code, and what is left of all that it started."""
    family, deadline = set[psutil.Process](), time.monotonic() + seconds
    while (code := process.poll()) is None:
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-6000:]
        with suppress(psutil.NoSuchProcess):
            family.update(tree(process))
        look()
        time.sleep(0.2)
    return code, wait_until_gone(list(family), 30)


def engine_python() -> str:
    """The interpreter that has SGLang."""
    default = Path(__file__).parents[1] / ".venv-engine" / "bin" / "python"
    return os.environ.get("SLIME_ENGINE_PYTHON", str(default))


def left_of(paths: list[Path], seconds: float) -> list[str]:
    """Wait until none of the files is there; returns the names of those that still are after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := [path.name for path in paths if path.exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
