"""A run whose trainer rank dies or hangs goes on with others, and ends as if nothing had happened.

Here are two ranks and no engine; `test_victims.py` has all parts of a run, and every moment of a step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launching import Assets, rows, slowness, started, train_command, watch_to_the_end
from test_recorded import record
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

ROLLOUTS = 4
RANKS = 2
SECONDS = 1500.0
# Wall time; an engine's own log-probs are rounded by what else is in its batch.
DIFFERENT = ("time", "perf/", "train/train_rollout_")
# The advantages of a step are computed on every rank. In the rollout of number 2, rank 1 is struck once: at once, or
# when it saves next.
FAULT = """
import os, pathlib, signal, time
import psutil
import torch
from slime_core.ops import estimator_named

def stop(name):
    driver = psutil.Process().parent().parent()
    [found] = [process for process in driver.children(recursive=True) if name in "".join(process.cmdline()[:1])]
    found.suspend()

FIRED = pathlib.Path({fired!r})
calls = 0

def strike(*args, **kwargs):
    if not FIRED.exists():
        FIRED.write_text(str(os.getpid()))
        {fault}

def before(owner, name):
    real = getattr(owner, name)
    def struck(*args, **kwargs):
        strike()
        return real(*args, **kwargs)
    setattr(owner, name, struck)

def advantages(inputs):
    global calls
    calls += 1
    if calls == {call} and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        if {moment!r} == "save":
            from slime_megatron.checkpoints import writer
            before(writer, "write_state")
        else:
            strike()
    return estimator_named("grpo")(inputs)

if {moment!r} == "start" and "TrainerRank" in pathlib.Path("/proc/self/cmdline").read_text():
    strike()
"""
DIES = "os.kill(os.getpid(), signal.SIGKILL)"


@dataclass(frozen=True)
class Healed:
    """A run that was struck: its exit code, what it printed, the process that was struck and what is left of it."""

    code: int
    text: str
    struck: int | None
    left: list[str]


def strike_run(assets: Assets, work: Path, *extra: str, moment: str = "train", fault: str = DIES) -> Healed:
    """Run on recorded rollouts with a fault; `moment` "never" lets it be."""
    work.mkdir()
    fired = work / "fired"
    # A start from a checkpoint calls the function less often: the number is counted in a process.
    call = {"never": -1, "first": 1}.get(moment, 3)
    (work / "fault.py").write_text(FAULT.format(fired=str(fired), fault=fault, call=call, moment=moment))
    flags = ["--save-interval", "2", "--micro-batch-size", "32", "--actor-num-gpus-per-node", str(RANKS)]
    flags += ["--load-debug-rollout-data", record(work / "recorded", ROLLOUTS), "--debug-train-only"]
    flags += ["--custom-advantage-function-path", f"{work}/fault.py:advantages"]
    command = train_command(assets, work, *flags, *extra, rollouts=ROLLOUTS)
    log = work / "log.txt"
    with started(command, log) as process:
        code, left = watch_to_the_end(process, log, SECONDS)
    return Healed(code, log.read_text(errors="replace"), int(fired.read_text()) if fired.exists() else None, left)


def weights(work: Path, rollouts: int = ROLLOUTS) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights and optimizer state."""
    directory = work / "save" / f"iter_{rollouts:07d}"
    metadata = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if hasattr(entry, "properties")
    }
    load_checkpoint(found, storage_reader=FileSystemReader(str(directory)), no_dist=True)
    return found


def assert_same(work: Path, whole: Path, rollouts: int = ROLLOUTS, rollouts_of_both: int | None = None) -> None:
    """The same weights, optimizer state, metrics but for wall time, and rollouts.

    Args:
        work: The run.
        whole: What it is compared with.
        rollouts: The checkpoint of both.
        rollouts_of_both: Rollouts that are compared, where one of the runs has more; and evaluations that both have.
    """
    ours, theirs = weights(work, rollouts), weights(whole, rollouts)
    assert ours.keys() == theirs.keys() and len(ours) > 10
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []
    for kind in ("train", "rollout", "eval"):
        got, expected = (
            [{k: v for k, v in row.items() if not k.startswith(DIFFERENT)} for row in rows(one, kind)]
            for one in (work, whole)
        )
        if rollouts_of_both is not None:
            common = {row["rollout_id"] for row in got} & {row["rollout_id"] for row in expected}
            assert common >= set(range(rollouts_of_both)) or (kind == "eval" and common)
            got, expected = ([row for row in one if row["rollout_id"] in common] for one in (got, expected))
        assert got == expected


@pytest.fixture(scope="module")
def whole(llama: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happens to."""
    work = tmp_path_factory.mktemp("whole") / "run"
    healed = strike_run(llama, work, moment="never")
    assert (healed.code, healed.struck) == (0, None), healed.text[-4000:]
    return work


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("moment", ["train", "first", "save"])
def test_a_rank_that_is_killed_changes_nothing(llama: Assets, whole: Path, tmp_path: Path, moment: str) -> None:
    healed = strike_run(llama, tmp_path / "run", moment=moment)
    assert healed.struck is not None
    assert (healed.code, healed.left) == (0, []), healed.text[-4000:]
    assert "trainer rank 1 died" in healed.text
    before, again, after = healed.text.partition("starting the trainers again (restart 1 of 3)")
    # Rollout 2 is trained on first in the third call, beside which the checkpoint of two rollouts may still be written.
    is_saved = "saved checkpoint 2" in before
    assert again and {"first": not is_saved, "save": is_saved}.get(moment, True)
    start = "checkpoint 2" if is_saved else "the weights it began with"
    assert f"the trainers are up again, from {start}" in after
    assert_same(tmp_path / "run", whole)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_rank_that_dies_again_and_again_ends_the_run(llama: Assets, tmp_path: Path) -> None:
    fault = f"FIRED.unlink(); {DIES}"
    healed = strike_run(llama, tmp_path / "run", "--trainer-max-restarts", "2", moment="first", fault=fault)
    assert (healed.code, healed.left) == (3, [])
    [line] = [line for line in healed.text.splitlines() if line.startswith("slime-launch: ")]
    assert re.search(r"lost once more after 2 restarts, .*; the first cause: trainer rank 1 died", line)
    assert healed.text.count("starting the trainers again") == 2


STALLS = {
    "a rank is stopped in a step": ("train", "os.kill(os.getpid(), signal.SIGSTOP)", 0, "trainer rank 1 (process {})"),
    "a rank waits for the others in a step": ("train", "torch.distributed.barrier()", 0, ""),
    "a rank is stopped in a save": ("save", "os.kill(os.getpid(), signal.SIGSTOP)", 0, "trainer rank 1 (process {})"),
    "a rank is stopped at the start": (
        "start",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        1,
        "trainer rank . (process {})",
    ),
    "the raylet is stopped": ("train", "stop('raylet/raylet')", None, "raylet (process "),
    "Ray's gcs_server is stopped": ("train", "stop('gcs/gcs_server')", None, "gcs_server (process "),
}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", STALLS)
def test_a_run_that_makes_no_progress_heals_or_ends_and_says_why(
    llama: Assets, whole: Path, tmp_path: Path, case: str
) -> None:
    moment, fault, code, said = STALLS[case]
    healed = strike_run(llama, tmp_path / "run", "--stall-timeout", f"{60 * slowness():g}", moment=moment, fault=fault)
    print(f"{case}: exit code {healed.code}\n{healed.text[-3000:]}")
    assert healed.struck is not None and healed.left == []
    assert healed.code == code if code is not None else healed.code in (0, 1)
    if healed.code:
        assert re.search(re.escape(said.format(healed.struck)).replace(r"\.", "."), healed.text)
    else:
        assert f"{said.format(healed.struck)}" in healed.text
        assert_same(tmp_path / "run", whole)
