"""From where a rollout is trained on again, and what is said of it.

On real trainers: `integration_tests/test_replay.py` of the root.
"""

import os
import shutil
from pathlib import Path

import pytest

import slime_launch.replay
from slime_launch.diff import WrittenRun
from slime_launch.errors import FlagError, PreflightError
from slime_launch.replay import Replay, find_start, outcome, replay
from slime_rollout.store import RolloutStore
from support.written import Written


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Three rollouts, all kept, and checkpoints after the first and the second."""
    directory = tmp_path / "run"
    Written().write(directory)
    taken = [directory / "save" / f"iter_{number:07d}" for number in (1, 2)]
    for checkpoint in taken:
        checkpoint.mkdir()

    def find(path):
        if Path(path) not in taken:
            raise slime_launch.replay.TrainerCheckpointError(f"{path} is not a checkpoint")
        return type("Found", (), {"directory": Path(path)})

    monkeypatch.setattr(slime_launch.replay, "find_checkpoint", find)
    return WrittenRun(directory)


def forget(run, rollout_id):
    RolloutStore(run.directory / "save" / "rollouts").path(rollout_id).unlink()


@pytest.mark.parametrize(
    ("step", "first", "checkpoint"), [(2, 2, "iter_0000002"), (1, 1, "iter_0000001"), (0, 0, None)]
)
def test_it_begins_at_the_newest_checkpoint_before_it(run, step, first, checkpoint):
    found = find_start(run, step)
    assert (found.first, found.last) == (first, step)
    assert (found.checkpoint and found.checkpoint.name) == checkpoint
    assert Path(found.template.format(rollout_id=step)).is_file()


def test_without_a_checkpoint_it_begins_at_the_beginning(run):
    for checkpoint in (run.directory / "save").glob("iter_*"):
        checkpoint.rmdir()
    run.resolved["settings"]["save"]["value"] = None
    (run.directory / "save" / "rollouts").rename(run.directory / "rollouts")
    assert find_start(run, 2)[:3] == (0, 2, None)


def test_what_is_gone_is_named(run):
    forget(run, 2)
    with pytest.raises(PreflightError, match=r"step 3 of .* can't be .* so --step 1 to 2 can be; --keep-rollouts"):
        find_start(run, 2)
    with pytest.raises(PreflightError, match="has no step 8; it has 1 to 3"):
        find_start(run, 7)


def test_without_a_save_nothing_was_written_down_and_that_is_said(run):
    run.resolved["settings"]["save"]["value"] = None
    with pytest.raises(PreflightError, match=r"step 2 of .*: the run had no --save, so what .* run it with --save DIR"):
        find_start(run, 1)


def test_a_save_that_keeps_none_says_what_keeps_them(run):
    for number in range(3):
        forget(run, number)
    with pytest.raises(PreflightError, match=r"has none of what it was trained on: .* with --keep-rollouts"):
        find_start(run, 1)


def test_steps_are_counted_as_on_the_console(run, monkeypatch, capsys):
    """Step 1 is the first one, and a 0 of the former way of counting is refused in a line that says so."""
    seen = []
    monkeypatch.setattr(slime_launch.replay, "checked_replay", lambda run, found, out: seen.append(found))
    monkeypatch.setattr(slime_launch.replay, "supervise", lambda checked, out: 1)
    assert replay([str(run.directory), "--step", "3"]) == 1 and seen[0][:2] == (2, 2)
    with pytest.raises(FlagError, match=r"--step 0: steps are counted from 1.* rollout_id 0 is --step 1"):
        replay([str(run.directory), "--step", "0"])


def test_the_verdict_comes_first_and_what_training_printed_is_in_a_file(run, monkeypatch, capfd):
    def train(checked, out):
        os.write(1, b"a line of training\n")
        shutil.copytree(run.directory, out, ignore=lambda *_: ["replays", "save"], dirs_exist_ok=True)
        return 0

    monkeypatch.setattr(slime_launch.replay, "checked_replay", lambda run, found, out: None)
    monkeypatch.setattr(slime_launch.replay, "supervise", train)
    assert replay([str(run.directory), "--step", "2"]) == 0
    first, last = capfd.readouterr().out.splitlines()
    assert first.startswith("equal: trained again from checkpoint 1, step 2 (rollout_id 1) is equal to the last bit")
    log = run.directory / "replays" / "2" / "logs" / "replay.log"
    assert last == f"what the replay printed: {log}" and log.read_text() == "a line of training\n"


def test_what_the_command_takes(run, capsys):
    for words in ([str(run.directory)], ["--step", "1"], [str(run.directory), "other", "--step", "1"]):
        with pytest.raises(FlagError, match="replay needs a run's --output-dir and a step"):
            replay(words)
    with pytest.raises(FlagError, match="--lr"):
        replay([str(run.directory), "--step", "1", "--lr", "1"])
    assert replay(["--help"]) == 0 and "replays/N" in capsys.readouterr().out


def test_what_comes_out_equal_is_one_line(run):
    found = Replay(1, 2, run.directory / "save" / "iter_0000001", "")
    [line] = outcome(run, run, found)
    assert line.startswith(
        "equal: trained again from checkpoint 1, steps 2 to 3 (rollout_id 1 to 2) are equal to the last bit"
    )
    assert line.endswith("and 3 weights after each")


def test_what_does_not_is_named_with_what_else_is_other(run, tmp_path):
    other = Written(packages={"torch": "2.14.0"}, environment={"OMP_X": "1"})
    other.weights = other.weights.copy()
    other.weights[2, 1, 0] += 1
    other.write(tmp_path / "again")
    lines = list(outcome(run, WrittenRun(tmp_path / "again"), Replay(1, 2, None, "")))
    assert lines[0] == (
        "not equal: trained again from the run's beginning, in step 3 (rollout_id 2) 1 of 3 weights differ after it: "
        "layers.0.weight"
    )
    assert lines[1:3] == ["  torch: 2.13.0 in the run, 2.14.0 now", "  only in the replay: $OMP_X 1"]
    assert "something else on the same samples" in lines[3]
