"""A run that is killed during the turns of a rollout calls no tool again whose result was there, and ends the same."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from called_turns import HOLD
from ended import Ended, end_run, finish, send, trained
from launching import Assets, train_command
from story import HELD, ROLLOUTS, SAMPLES, Story, answered, calls

pytestmark = [pytest.mark.real, pytest.mark.timeout(3000)]


def test_what_a_tool_has_answered_is_not_asked_again(story: Story) -> None:
    again = set(calls(story.work)[story.asked :]) & story.answered
    print(f"{len(story.answered)} results were there, {len(again)} of their calls were made again")
    assert len(story.answered) >= SAMPLES and not again
    first = [one for one in calls(story.work)[: story.asked] if one[0] < HELD * SAMPLES]
    assert len(first) == len(set(first)) > HELD * SAMPLES


def test_the_calls_are_those_of_a_run_that_was_never_stopped(story: Story, whole_run: Ended) -> None:
    whole = [one for one in calls(whole_run.work) if one[0] < ROLLOUTS * SAMPLES]
    assert len(whole) == len(set(whole)) and set(whole) == set(calls(story.work))


@pytest.mark.full
def test_nor_is_it_where_generation_is_ahead_of_training(llama: Assets, tmp_path: Path) -> None:
    function = Path(__file__).with_name("called_turns.py")
    flags = ["--custom-generate-function-path", str(function), "--max-turns", "3", "--rollout-max-response-len", "40"]
    flags += ["--save-interval", "1", "--async-buffer-size", "1", "--rollout-num-gpus", "1"]
    command = train_command(llama, tmp_path, *flags, rollouts=2, colocate=False)
    (tmp_path / HOLD).write_text("64")
    end_run(command, tmp_path, send(signal.SIGKILL), ready=lambda: len(answered(tmp_path, 64)) >= 64)
    before, asked = answered(tmp_path, 64), len(calls(tmp_path))
    (tmp_path / HOLD).unlink()
    resumed = end_run(command, tmp_path, finish, ready=trained(tmp_path, 2), log="resumed.txt")
    assert resumed.code == 0, resumed.text[-4000:]
    again = set(calls(tmp_path)[asked:]) & before
    print(f"{len(before)} results were there, {len(again)} of their calls were made again")
    assert len(before) >= 64 and not again
    first = [one for one in calls(tmp_path)[:asked] if one[0] < 64]
    assert len(first) == len(set(first)) > 64
