import json
import shutil
import subprocess
import sys

import pytest

from slime_core.types import RolloutBatch, Sample
from slime_launch.flags.command import parse_train
from slime_launch.resume import RunState
from slime_launch.tracking import Tracker
from slime_launch.weights import StartWeights


@pytest.fixture
def finished(flags, to_words, workspace):
    """A run of two rollouts that is done; gives its command."""
    settings = parse_train(to_words(flags))
    weights = StartWeights(load=str(workspace / "dist"), ref_load=str(workspace / "dist"))
    state = RunState(settings, None, weights, output_dir=workspace / "out")
    state.begin({})
    (workspace / "out").mkdir()
    tracker = Tracker(workspace / "out")
    for rollout_id in range(2):
        sample = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2], response_length=1, reward=1.0)
        state.trained(RolloutBatch(rollout_id=rollout_id, groups=[[sample]]), rollout_id + 1)
        metrics = {"rollout/raw_reward": rollout_id / 2, "perf/step_time": 3.0}
        tracker.log("rollout", step=rollout_id, rollout_id=rollout_id, metrics=metrics)
    tracker.close()
    (workspace / "save" / "iter_0000002").mkdir()
    state.commit(workspace / "save" / "iter_0000002", {})
    return [sys.executable, "-m", "slime_launch.cli", "train", *to_words(flags)]


def test_a_finished_run_says_so_and_reports_again(finished, workspace):
    done = subprocess.run(finished, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"the run in {workspace / 'save'} is finished: 2 rollouts; give a larger --num-rollout" in done.stdout
    assert "mean reward per rollout" in done.stdout
    assert str(workspace / "save" / "iter_0000002") in done.stdout


def test_it_is_found_without_the_output_directory(finished):
    del finished[finished.index("--output-dir") : finished.index("--output-dir") + 2]
    done = subprocess.run(finished, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mean reward per rollout" in done.stdout


def test_another_output_directory_shows_the_same_report(finished, workspace):
    finished[finished.index("--output-dir") + 1] = str(workspace / "elsewhere")
    done = subprocess.run(finished, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mean reward per rollout" in done.stdout
    assert not (workspace / "elsewhere").exists()


def test_metrics_that_are_gone_do_not_matter(finished, workspace):
    shutil.rmtree(workspace / "out")
    done = subprocess.run(finished, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (workspace / "out").exists()


def test_a_report_that_a_kill_prevented_is_written_now(finished, workspace):
    report = workspace / "out" / "report.json"
    assert not report.exists()
    subprocess.run(finished, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(report.read_text())["rewards"] == [0.0, 0.5]
    assert (workspace / "out" / "reward_curve.png").exists()
    written = report.stat().st_mtime_ns
    subprocess.run(finished, capture_output=True, text=True, timeout=60, check=True)
    assert report.stat().st_mtime_ns == written  # it has the minutes that the run took


def test_the_report_of_the_first_part_of_a_longer_run_is_replaced(finished, workspace):
    report = workspace / "out" / "report.json"
    report.write_text(json.dumps({"rollouts": 1}))
    subprocess.run(finished, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(report.read_text())["rollouts"] == 2
