"""Runs that follow each other in one output folder, and runs that meet in one."""

import json
import subprocess
import sys
from unittest.mock import Mock

import pytest

from slime_launch.calls import Watch
from slime_launch.errors import FlagError
from slime_launch.flags import parse_train
from slime_launch.output_dir import find_run_dir, make_room
from slime_launch.preflight import Checked
from slime_launch.replay import replay
from slime_launch.report import report_if_finished
from slime_launch.resume import StartWeights
from slime_launch.run import own_directories, run
from slime_launch.step_sums import SumLog
from slime_launch.tracking import Tracker
from slime_launch.train import new_directory


@pytest.fixture
def left(tmp_path):
    """Makes what a run leaves in a folder, by its ``--save`` and a mark in all of its files."""

    def making(directory, save, mark):
        directory.mkdir(exist_ok=True)
        tracker = Tracker(directory)
        tracker.log("train", step=0, rollout_id=0, metrics={"train/loss": mark})
        tracker.close()
        settings = {"settings": {"save": {"value": None if save is None else str(save), "origin": "command line"}}}
        (directory / "settings.json").write_text(json.dumps(settings))
        for name in ("logs/launch.log", "samples/0.json.gz", "rollouts/rollout_0000000.npz", "report.html"):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(str(mark))
        return directory

    return making


def content(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and "earlier" not in path.relative_to(directory).parts
    }


def test_a_new_run_moves_an_earlier_ones_files_and_says_so(left, tmp_path):
    out = tmp_path / "out"
    assert list(make_room(out, None)) == []
    before = [content(left(out, save, mark)) for save, mark in ((None, 1.0),)]
    for number, (save, mark) in enumerate(((tmp_path / "save", 2.0), (None, 3.0)), 1):
        [line] = make_room(out, None)
        assert line == f"{out} holds an earlier run; its files are in {out}/earlier/{number} now"
        assert content(out) == {}
        before.append(content(left(out, save, mark)))
    assert [content(out / "earlier" / str(number)) for number in (1, 2)] == before[:2]
    assert content(out) == before[2]


def test_a_run_that_is_continued_has_its_own_files_whatever_came_between(left, tmp_path):
    out, save = tmp_path / "out", tmp_path / "save"
    own = content(left(out, save, 1.0))
    assert list(make_room(out, save)) == [] and content(out) == own
    list(make_room(out, None))
    evaluation = content(left(out, None, 2.0))
    assert find_run_dir(out, save) == out / "earlier" / "1"
    lines = list(make_room(out, save))
    assert lines == [
        f"{out} holds an earlier run; its files are in {out}/earlier/2 now",
        f"{out} has the files of this run back, from {out}/earlier/1",
    ]
    assert content(out) == own and content(out / "earlier" / "2") == evaluation
    assert not (out / "earlier" / "1").exists() and list(make_room(out, save)) == []
    assert find_run_dir(out, tmp_path / "other") is None


def test_rollouts_of_a_save_in_the_same_folder_stay(left, tmp_path):
    out = left(tmp_path / "out", tmp_path / "out", 1.0)
    (out / "manifest.json").write_text("{}")
    (out / "iter_0000001").mkdir()
    list(make_room(out, None))
    assert sorted(path.name for path in out.iterdir()) == ["earlier", "iter_0000001", "manifest.json", "rollouts"]


def test_logs_of_a_start_that_failed_are_no_run(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "settings.json").write_text("{}")
    assert list(make_room(tmp_path, None)) == [] and (tmp_path / "logs").is_dir()


def test_a_finished_run_is_shown_from_where_its_files_are(left, tmp_path, capsys):
    out, save = tmp_path / "out", tmp_path / "save"
    left(out, save, 1.0)
    list(make_room(out, None))
    evaluation = content(left(out, None, 2.0))
    manifest = Mock(iteration=1, checkpoint=None, output_dir=str(out))
    settings = Mock(num_rollout=1)
    settings.kind.only_evaluates = False
    settings.megatron.save, settings.rollout.evaluation.has_eval_sets = str(save), False
    assert report_if_finished(Mock(manifest=manifest, settings=settings), out)
    assert f"the run in {save} is finished" in capsys.readouterr().out
    assert (out / "earlier" / "1" / "report.json").exists() and content(out) == evaluation


@pytest.fixture
def running(tmp_path):
    """A process that writes to `out`."""
    code = (
        "import sys, time; from pathlib import Path; from slime_launch.manifest import locked\n"
        "with locked(Path(sys.argv[1]), check=lambda: None, flag='--output-dir'): print(1, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.wait()


COMMANDS = {
    "train": "--num-rollout 1 --load l --colocate",
    "train with --save": "--num-rollout 1 --load l --colocate --save save",
    "eval": "--num-rollout 0 --eval-prompt-data p --rollout-num-gpus 1",
    "sft": "--loss-type sft_loss --num-rollout 1 --load l",
    "generation": "--debug-rollout-only --num-rollout 1",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_second_run_in_the_folder_of_a_running_one_changes_nothing(
    command, tmp_path, left, running, capsys, monkeypatch
):
    monkeypatch.setattr("slime_launch.manifest.LOCK_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    before = content(left(tmp_path / "out", None, 1.0))
    words = f"--hf-checkpoint hf --prompt-data p --rollout-batch-size 2 --output-dir out {COMMANDS[command]}".split()
    checked = Checked(
        settings=parse_train(words), shape=Mock(), manifest=None, weights=StartWeights(load="l", ref_load="l"),
        overrides={}, topology=None, num_engines=1,
    )  # fmt: skip
    assert run(checked, Watch()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"slime-launch: --output-dir out is in use by another run (process {running.pid}")
    assert said.count("\n") == 1 and content(tmp_path / "out") == before and not (tmp_path / "save").exists()


def test_a_directory_is_locked_once_whatever_it_is_for(tmp_path):
    words = f"--hf-checkpoint hf --prompt-data p --rollout-batch-size 2 {COMMANDS['train']}".split()
    words += ["--advantage-estimator", "ppo", "--save", "s", "--output-dir", "./s", "--critic-save", "c"]
    settings = parse_train(words)
    found = own_directories(settings.kind, settings.megatron, settings.run.output_dir)
    assert {str(path): flag for path, flag in found.items()} == {"s": "--save", "c": "--critic-save"}


def test_runs_that_start_in_one_second_have_folders_of_their_own(tmp_path):
    made = [new_directory(tmp_path / "outputs", "20261129-120000") for _ in range(3)]
    assert [path.name for path in made] == ["20261129-120000", "20261129-120000-2", "20261129-120000-3"]


def test_a_replay_does_not_write_to_its_run(left, tmp_path, monkeypatch):
    out = left(tmp_path / "out", None, 1.0)
    SumLog(out, None).close()
    (out / "sums.jsonl").write_text('{"rollout_id": 0, "shards": [], "samples": {}, "index": []}\n')
    before = content(out)
    monkeypatch.setattr("slime_launch.replay.find_start", Mock())
    with pytest.raises(FlagError, match="is the run itself; give another"):
        replay([str(out), "--step", "1", "--output-dir", f"{out}/../out"])
    assert content(out) == before
