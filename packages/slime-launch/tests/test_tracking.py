import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slime_launch.tracking import Tracker, read_rows


def curves(output_dir):
    events = EventAccumulator(str(output_dir / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train_to(tracker, first, last, *, steps=2):
    for rollout_id in range(first, last):
        for step in range(rollout_id * steps, (rollout_id + 1) * steps):
            tracker.log("train", step=step, rollout_id=rollout_id, metrics={"train/loss": 10.0 - step})
        tracker.log("rollout", step=rollout_id, rollout_id=rollout_id, metrics={"rollout/raw_reward": rollout_id / 10})
        tracker.log(
            "eval", step=rollout_id + 1, rollout_id=rollout_id + 1, metrics={"eval/sums": float(rollout_id + 1)}
        )


def test_rows_and_curves_agree(tmp_path):
    tracker = Tracker(tmp_path)
    train_to(tracker, 0, 2)
    tracker.close()
    assert [row["train/loss"] for row in read_rows(tmp_path) if row["kind"] == "train"] == [10.0, 9.0, 8.0, 7.0]
    assert curves(tmp_path) == {
        "train/loss": [(0, 10.0), (1, 9.0), (2, 8.0), (3, 7.0)],
        "rollout/raw_reward": [(0, 0.0), (1, 0.1)],
        "eval/sums": [(1, 1.0), (2, 2.0)],
    }


def test_a_continued_run_equals_one_that_was_never_stopped(tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for directory in (whole, stopped):
        directory.mkdir()
    tracker = Tracker(whole)
    train_to(tracker, 0, 5)
    tracker.close()
    tracker = Tracker(stopped)
    train_to(tracker, 0, 4)  # the checkpoint is of 2 rollouts, so what rollouts 2 and 3 gave will come again
    tracker.close()
    tracker = Tracker(stopped, iteration=2)
    train_to(tracker, 2, 5)
    tracker.close()

    def without_time(directory):
        return [{name: value for name, value in row.items() if name != "time"} for row in read_rows(directory)]

    assert without_time(stopped) == without_time(whole)
    assert curves(stopped) == curves(whole)


def test_a_new_run_takes_nothing_over_from_an_earlier_one_in_its_directory(tmp_path):
    earlier = Tracker(tmp_path)
    earlier.log("eval", step=0, rollout_id=0, metrics={"eval/sums": 0.5})
    earlier.close()
    tracker = Tracker(tmp_path)
    assert not tracker.has_eval(0)
    tracker.close()
    assert read_rows(tmp_path) == []


def test_evaluations_up_to_the_checkpoint_are_kept(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log("eval", step=0, rollout_id=0, metrics={"eval/a": 0.5})
    train_to(tracker, 0, 3)
    tracker.close()
    tracker = Tracker(tmp_path, iteration=2)
    assert [tracker.has_eval(k) for k in range(5)] == [True, True, True, False, False]
    tracker.close()


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path):
    tracker = Tracker(tmp_path)
    train_to(tracker, 0, 2, steps=1)
    tracker.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "st')
    tracker = Tracker(tmp_path, iteration=2)
    train_to(tracker, 2, 3, steps=1)
    tracker.close()
    assert [row["rollout_id"] for row in read_rows(tmp_path) if row["kind"] == "train"] == [0, 1, 2]


def test_the_file_is_json_even_where_a_number_is_not_finite(tmp_path):
    tracker = Tracker(tmp_path, tensorboard=False)
    tracker.log("train", step=0, rollout_id=0, metrics={"train/loss": float("nan"), "train/lr": 1.0})
    tracker.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name))["train/loss"] is None
    assert not (tmp_path / "tensorboard").exists()


def test_a_row_is_on_disk_at_once(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.log("train", step=0, rollout_id=0, metrics={"train/loss": 1.0})
    assert read_rows(tmp_path)[0]["train/loss"] == 1.0
    assert curves(tmp_path) == {"train/loss": [(0, 1.0)]}
    tracker.close()
