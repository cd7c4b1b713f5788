"""Checksums of rollouts that a run writes down."""

import json
import types

import numpy as np

from slime_core.types import TrainReport
from slime_launch.step_sums import SUMS_FILE, SumLog, read_pairs, read_sums
from slime_launch.tracking import Tracker
from support.written import Written


def test_a_run_that_is_continued_goes_on_after_its_checkpoint(tmp_path):
    written = Written()
    directory = tmp_path / "a"
    written.write(directory)
    tracker = Tracker(directory, iteration=2, tensorboard=False)
    tracker.close()
    assert [json.loads(line)["rollout_id"] for line in (directory / "sums.jsonl").read_text().splitlines()] == [0, 1]


def write(directory, rollout_ids, iteration=None):
    directory.mkdir(exist_ok=True)
    log = SumLog(directory, iteration)
    for number in rollout_ids:
        sums = {"index": np.arange(2), "tokens": np.array([number, 7], np.uint32)}
        batch = types.SimpleNamespace(rollout_id=number, shard_sums=[number], sample_sums=sums)
        weights = np.full((2, 3), number, np.uint32)
        log.log(batch, TrainReport(rollout_id=number, steps=[], weight_names=["a", "b"], weight_sums=weights))
    log.close()


def test_sums_are_read_as_they_were_written_and_a_line_that_was_cut_off_is_left_out(tmp_path):
    write(tmp_path, [0, 1])
    with (tmp_path / SUMS_FILE).open("a") as file:
        file.write('{"rollout_id": 2, "sha')
    first, second = read_sums(tmp_path)
    assert (first.rollout_id, first.index, first.shards, first.fields) == (0, [0, 1], [0], {"tokens"})
    assert second.field("tokens").tolist() == [1, 7] and second.field("rewards") is None
    assert second.names == ["a", "b"] and second.weights.tolist() == [[1] * 3] * 2


def test_rollouts_that_both_runs_have_are_paired(tmp_path):
    write(tmp_path / "one", [0, 1, 3])
    write(tmp_path / "other", [1, 2, 3])
    pairs = read_pairs(tmp_path / "one", tmp_path / "other")
    assert [(one.rollout_id, other.rollout_id) for one, other in pairs] == [(1, 1), (3, 3)]
