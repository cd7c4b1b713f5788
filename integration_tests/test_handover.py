"""Trainer and engines that take turns: the order of every move, what is left in memory, and the same weights."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from ended import Ended
from launching import Assets, rows, run, train_command
from story import ROLLOUTS as TOLD
from test_healing import ROLLOUTS, assert_same


def engine_moves(work: Path) -> list[str]:
    """What the engine was asked, in order, from its log."""
    [log] = (work / "out" / "logs").glob("**/engine_0.log")
    found = re.findall(r"POST /(release|resume|generate|begin_weight)_?\w*", log.read_text(errors="replace"))
    return [name for name, _ in itertools.groupby(found)]


ONCE = ["release", "resume", "begin_weight", "resume", "generate"]


def test_trainer_and_engine_take_turns_in_memory(whole_run: Ended) -> None:
    """That it ends as a run whose halves both stay: `test_victims.py`."""
    sleeps_and_wakes(rows(whole_run.work, "rollout")[:TOLD])
    assert engine_moves(whole_run.work)[: len(ONCE) * TOLD] == ONCE * TOLD


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("saves", [(), ("--no-async-save",)], ids=["save", "waits"])
def test_a_run_that_hands_its_memory_over_ends_as_one_that_does_not(
    saves: tuple[str, ...], qwen3: Assets, tmp_path: Path
) -> None:
    """fp32, with the evaluation, the saves and the reference of an ordinary run; bit for bit."""
    flags = ("--save-interval", "2", "--eval-interval", "1", "--eval-prompt-data", "sums", str(qwen3.prompts))
    logged = ("--sglang-log-level-http", "info")
    works = {name: tmp_path / name for name in ("turns", "both stay")}
    for work, more in zip(works.values(), (saves, ("--no-offload-train", "--no-offload-rollout")), strict=True):
        run(train_command(qwen3, work, *flags, *logged, *more, rollouts=ROLLOUTS), work / "log")
    assert_same(works["turns"], works["both stay"])
    turns, plain = (rows(work, "rollout") for work in works.values())
    assert len(turns) == ROLLOUTS
    sleeps_and_wakes(turns)
    assert not any("asleep" in name for row in plain for name in row)
    assert engine_moves(works["turns"]) == ONCE * (ROLLOUTS + 1)
    assert engine_moves(works["both stay"]) == ["begin_weight", "generate"] * (ROLLOUTS + 1)


def sleeps_and_wakes(turns: list[dict[str, Any]]) -> None:
    """In each rollout the trainer has slept, with nothing of it on the device."""
    for row in turns:
        assert row["perf/trainer_asleep_device_bytes"] == 0 < row["perf/trainer_asleep_waiting_bytes"]
        assert row["perf/sleep_time"] > 0 < row["perf/wake_up_time"]
        print(
            {
                name: value
                for name, value in row.items()
                if name.startswith(("perf/trainer_a", "perf/sleep", "perf/wake"))
            }
        )
