"""A run that is killed during the turns of a rollout calls no tool again whose result was there, and ends the same."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from called_turns import FIRST_BLOCKED
from ended import end_run, finish, send, trained
from launching import Assets, rows, run, train_command

pytestmark = [pytest.mark.real, pytest.mark.timeout(500)]
ROLLOUTS, SAMPLES = 2, 64


def command_of(assets: Assets, work: Path, *more: str) -> list[str]:
    function = Path(__file__).with_name("called_turns.py")
    flags = ["--custom-generate-function-path", str(function), "--max-turns", "3", "--rollout-max-response-len", "40"]
    return train_command(assets, work, "--save-interval", "1", *flags, *more, rollouts=ROLLOUTS)


def calls(work: Path) -> list[tuple[int, int]]:
    path = work / "calls.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(index), int(turn)) for index, turn in map(str.split, lines)]


def known(work: Path) -> set[tuple[int, int]]:
    """Calls of the second rollout whose results are written down."""
    path = work / "save" / "turns.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    values = [json.loads(line)["value"] for line in lines if line.endswith(b"}")]
    results = [value[0] for value in values if isinstance(value, list)]
    return {(one["index"], one["turn"]) for one in results if one["index"] >= FIRST_BLOCKED}


@pytest.mark.parametrize("how", ["in step", pytest.param("ahead", marks=pytest.mark.full)])
def test_what_a_tool_has_answered_is_not_asked_again(llama: Assets, tmp_path: Path, how: str) -> None:
    ahead = ["--async-buffer-size", "1", "--rollout-num-gpus", "1"] if how == "ahead" else []
    killed = tmp_path / "killed"
    killed.mkdir()
    command = command_of(llama, killed, *ahead)
    if ahead:
        command.remove("--colocate")
    end_run(command, killed, send(signal.SIGKILL), ready=lambda: len(known(killed)) >= SAMPLES)
    before, asked = known(killed), len(calls(killed))
    (killed / "go").touch()
    resumed = end_run(command, killed, finish, ready=trained(killed, ROLLOUTS), log="resumed.txt")
    assert resumed.code == 0, resumed.text[-4000:]
    again = set(calls(killed)[asked:]) & before
    print(f"{how}: {len(before)} results were there, {len(again)} of their calls were made again")
    assert len(before) >= SAMPLES and not again
    first = [one for one in calls(killed)[:asked] if one[0] < FIRST_BLOCKED]
    assert len(first) == len(set(first)) > SAMPLES
    if ahead:
        return
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "go").touch()
    run(command_of(llama, whole), whole / "log.txt")
    assert len(calls(whole)) == len(set(calls(whole))) and set(calls(whole)) == set(calls(killed))
    for kind, name in (("train", "train/loss"), ("train", "train/grad_norm"), ("rollout", "rollout/raw_reward")):
        assert [row[name] for row in rows(killed, kind)] == [row[name] for row in rows(whole, kind)]
