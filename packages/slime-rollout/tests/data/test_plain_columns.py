import copy
import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout.data import plain_columns as columns


class Text(str):
    """A string, but not of the very type."""


class Whole(int):
    """An integer, but not of the very type."""


class Named(dict):
    """A dictionary, but not of the very type."""


class Own(Sample):
    """A sample of somebody else's class."""


INTEGERS = st.integers(-2, 3) | st.sampled_from([2**63 - 1, 2**63, 2**64, 2**1024, -(2**63)])
ODD = st.sampled_from([None, True, 1.0, math.nan, "1", Text("completed"), Whole(1), (), Named(a=1), {}, [], {1: 2.0}])
FLOATS = st.sampled_from([-0.5, 0.0, -0.0, 1e300, math.inf, -math.inf, math.nan])
NUMBERS = FLOATS | INTEGERS | ODD
NESTED = st.recursive(
    NUMBERS | st.text(max_size=2), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner)
)


@st.composite
def plain_rows(draw):
    """What `Sample.to_dict` gives of a valid sample."""
    length = draw(st.integers(0, 3))

    def per_token(values):
        return st.lists(values, min_size=length, max_size=length)

    return {
        "index": draw(st.integers(0, 2**63)),
        "group_index": draw(st.integers(0, 3)),
        "prompt": draw(st.text(max_size=2) | st.lists(st.dictionaries(st.text(), NESTED, max_size=2), max_size=2)),
        "label": draw(st.none() | st.text(max_size=2)),
        "trajectory_id": draw(st.none() | st.integers(0, 3)),
        "tokens": draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length + 3)),
        "response": draw(st.text(max_size=2)),
        "response_length": length,
        "loss_mask": draw(st.none() | per_token(st.integers(0, 1))),
        "rollout_log_probs": draw(st.none() | per_token(FLOATS)),
        "teacher_log_probs": draw(st.none() | per_token(FLOATS)),
        "weight_versions": draw(st.just([]) | per_token(st.integers(-1, 3))),
        "reward": draw(
            st.none() | st.booleans() | st.integers(-3, 3) | FLOATS | st.dictionaries(st.text(max_size=2), FLOATS)
        ),
        "status": draw(st.sampled_from([status.value for status in Status])),
        "remove_sample": draw(st.booleans()),
        "session_id": draw(st.none() | st.text(max_size=2)),
        "metadata": draw(st.dictionaries(st.text(max_size=2), NESTED, max_size=2)),
        "train_metadata": draw(st.dictionaries(st.text(max_size=2), NESTED, max_size=2)),
    }


@st.composite
def any_rows(draw):
    """Rows with a few fields changed to anything, many of them wrong or not quite plain."""
    row = draw(plain_rows())
    for name in draw(st.lists(st.sampled_from([*row, "colour"]), max_size=2)):
        row[name] = draw(NUMBERS | st.lists(NUMBERS, max_size=3) | st.dictionaries(st.text(max_size=1), NUMBERS))
    if draw(st.integers(0, 9)) == 0:
        del row[draw(st.sampled_from(list(row)))]
    return row


def fast_samples(rows):
    found = columns.columns_of_rows(rows)
    return None if found is None or not columns.are_valid(found) else columns.samples_of(found)


def fast_rows(samples):
    found = columns.columns_of_samples(samples)
    return None if found is None or not columns.are_valid(found) else columns.rows_of(found)


def test_the_fields_are_those_of_a_sample_in_their_order():
    made = Sample(index=0, group_index=0, prompt="p")
    assert list(columns.NAMES) == [field.name for field in dataclasses.fields(Sample)] == list(made.to_dict())
    (row,) = fast_rows([made])
    assert list(row) == list(columns.NAMES)
    (again,) = columns.samples_of({name: [name] for name in columns.NAMES})
    assert vars(again) == {name: name for name in columns.NAMES}


@given(st.lists(plain_rows(), min_size=1, max_size=4))
def test_plain_samples_go_the_fast_way_and_come_out_the_same(rows):
    expected = [Sample.from_dict(copy.deepcopy(row)) for row in rows]
    samples = fast_samples(rows)
    assert repr(samples) == repr(expected)
    assert [type(sample) for sample in samples] == [Sample] * len(rows)
    assert repr(fast_rows(samples)) == repr([sample.to_dict() for sample in expected]) == repr(rows)
    for sample, row in zip(samples, rows, strict=True):
        assert all(type(vars(sample)[name]) is type(row[name]) for name in row if name != "status")


@given(st.lists(any_rows(), min_size=1, max_size=3))
def test_rows_that_are_not_plain_are_left_to_the_checks_of_each(rows):
    before = repr(rows)
    samples = fast_samples(rows)
    assert repr(rows) == before
    if samples is None:
        return
    assert repr(samples) == repr([Sample.from_dict(row) for row in rows])  # which must not raise


@given(st.lists(any_rows(), min_size=1, max_size=3))
def test_samples_that_are_not_plain_are_left_to_the_checks_of_each(rows):
    samples = [Sample(index=0, group_index=0, prompt="") for _ in rows]
    for sample, row in zip(samples, rows, strict=True):
        vars(sample).update(row)  # as a user's function may assign anything
        if row.get("status") in list(Status):
            sample.status = Status(row["status"])
    before = repr(samples)
    found = fast_rows(samples)
    assert repr(samples) == before
    if found is None:
        return
    for sample in samples:
        sample.validate()
    assert repr(samples) == before
    assert repr(found) == repr([sample.to_dict() for sample in samples])


BASE = {
    **{"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2},
    **{"loss_mask": [0, 1], "rollout_log_probs": [0.5, math.nan], "weight_versions": [-1, 2], "reward": {"a": 1}},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"index": -1},
        {"index": True},
        {"group_index": 2**64},
        {"trajectory_id": -1},
        {"prompt": ["hi"]},
        {"prompt": [Named(role="user")]},
        {"prompt": Text("p")},
        {"tokens": [1, True, 3]},
        {"tokens": [1, -2, 3]},
        {"tokens": [1, 2.0, 3]},
        {"tokens": (1, 2, 3)},
        {"tokens": [1]},
        {"response_length": -1, "loss_mask": None, "rollout_log_probs": None, "weight_versions": []},
        {"loss_mask": [1, 2]},
        {"loss_mask": [1, True]},
        {"loss_mask": []},
        {"rollout_log_probs": [0.5, 1]},
        {"teacher_log_probs": [0.5]},
        {"teacher_log_probs": [0.5, 1]},
        {"weight_versions": [1, -2]},
        {"weight_versions": [1]},
        {"reward": 2**63},
        {"reward": {"a": None}},
        {"reward": {1: 1.0}},
        {"reward": "1"},
        {"status": "completed"},
        {"metadata": Named()},
        {"remove_sample": 0},
    ],
)
def test_each_odd_value_is_seen_among_many(fields):
    samples = [Sample(**copy.deepcopy(BASE)) for _ in range(5)]
    assert fast_rows(samples) is not None
    vars(samples[3]).update(fields)
    assert fast_rows(samples) is None


def test_other_classes_and_missing_fields_are_left_to_the_checks_of_each():
    samples = [Sample(**copy.deepcopy(BASE)), Own(**BASE)]
    assert fast_rows(samples) is None
    del samples[0].tokens
    assert fast_rows(samples[:1]) is None
    row = Sample(**copy.deepcopy(BASE)).to_dict()
    assert fast_samples([row]) == [Sample(**copy.deepcopy(BASE))]
    for fields in ({"colour": 1}, {"status": "done"}, {"status": []}, {"index": 1.0}):
        assert fast_samples([row, row | fields]) is None
    assert fast_samples([row, Named(row)]) is None
    missing = row | {"colour": 1}
    del missing["label"]
    assert fast_samples([row, missing]) is None
    with pytest.raises(DataError, match="no fields"):
        Sample.from_dict(missing)


@pytest.mark.parametrize("place", range(8))
def test_long_lists_are_checked_in_pieces(monkeypatch, place):
    monkeypatch.setattr(columns, "_AT_ONCE", 5)
    samples = [Sample(**copy.deepcopy(BASE)) for _ in range(8)]
    assert max(map(len, columns._pieces([sample.tokens for sample in samples]))) == 3
    assert fast_rows(samples) == [sample.to_dict() for sample in samples]
    samples[place].tokens[2] = -1
    assert fast_rows(samples) is None


def test_rows_are_dictionaries_of_their_own():
    samples = [Sample(**copy.deepcopy(BASE), session_id="s") for _ in range(3)]
    before = json.dumps([sample.to_dict() for sample in samples])
    rows = fast_rows(samples)
    rows[0]["index"] = 5
    rows[0]["colour"] = "red"
    del rows[1]["label"]
    rows[2]["tokens"].append(4)
    rows[0]["tokens"].clear()
    assert json.dumps([sample.to_dict() for sample in samples]) == before
    assert set(rows[2]) == set(columns.NAMES) and "colour" not in rows[1]
