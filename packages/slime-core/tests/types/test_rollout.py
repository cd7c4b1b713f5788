import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import RolloutBatch, Sample

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def make_batch(group_sizes, reward=1.0):
    groups, index = [], 0
    for group, size in enumerate(group_sizes):
        groups.append([Sample(index=index + i, group_index=group, prompt="naïve ", reward=reward) for i in range(size)])
        index += size
    return RolloutBatch(
        rollout_id=4,
        groups=groups,
        source_state={"offset": 3, "epoch": 0},
        metrics={"a": 0.1},
        seconds={"generate": 2.0},
    )


@given(st.lists(st.integers(0, 3), max_size=4), FINITE)
def test_round_trip_is_lossless(group_sizes, reward):
    batch = make_batch(group_sizes, reward)
    assert RolloutBatch.from_jsonl(batch.to_jsonl()) == batch


def test_line_separators_inside_text_do_not_split_a_sample():
    batch = make_batch([1])
    batch.samples[0].response = "one\u2028two\x85three\r\nfour"
    assert RolloutBatch.from_jsonl(batch.to_jsonl()) == batch


def test_numbers_survive_to_the_last_bit():
    batch = make_batch([1], math.nextafter(0.1, 1))
    assert RolloutBatch.from_jsonl(batch.to_jsonl()).samples[0].reward == math.nextafter(0.1, 1)


def test_a_truncated_or_foreign_file_is_refused():
    text = make_batch([2, 1]).to_jsonl()
    with pytest.raises(DataError, match="rollout 4: 2 samples, its head says 3"):
        RolloutBatch.from_jsonl("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="a rollout file is empty"):
        RolloutBatch.from_jsonl("")
    head, *rest = text.splitlines()
    foreign = json.dumps(json.loads(head) | {"format_version": 99})
    with pytest.raises(DataError, match="format_version 99; this slime reads 1"):
        RolloutBatch.from_jsonl("\n".join([foreign, *rest]))
    with pytest.raises(DataError, match="not JSON"):
        RolloutBatch.from_jsonl(text[:-20])


@pytest.mark.parametrize("key", ["rollout_id", "group_sizes", "source_state", "metrics", "seconds"])
def test_a_head_that_lacks_an_entry_is_refused(key):
    head, *rest = make_batch([1]).to_jsonl().splitlines()
    lacking = {name: value for name, value in json.loads(head).items() if name != key}
    with pytest.raises(DataError, match=f"missing or of a wrong type .*{key}.*; generate that rollout again"):
        RolloutBatch.from_jsonl("\n".join([json.dumps(lacking), *rest]))


@pytest.mark.parametrize("damage", [{"tokens": None}, {"loss_mask": 1}, {"response_length": "2"}])
def test_a_sample_with_an_entry_of_a_wrong_type_is_refused(damage):
    head, row = make_batch([1]).to_jsonl().splitlines()
    with pytest.raises(DataError, match="line 2 of a rollout file: an entry is missing or of a wrong type"):
        RolloutBatch.from_jsonl("\n".join([head, json.dumps(json.loads(row) | damage)]))


def test_numbers_that_are_none_survive_json_lines():
    batch = make_batch([1])
    batch.samples[0].tokens, batch.samples[0].response_length = [1, 2, 3], 3
    batch.samples[0].rollout_log_probs = [math.nan, -math.inf, -0.0]
    assert repr(RolloutBatch.from_jsonl(batch.to_jsonl())) == repr(batch)
