import copy
import dataclasses
import decimal
import gc
import json
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout.data.group_state import copied_group, copied_value, groups_from_plain, plain_groups

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


def parts(value):
    """All lists and dictionaries in a value, by identity."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = {id(value)} if isinstance(value, dict | list) else set()
    return own.union(*map(parts, inner))


@given(value=plain_values)
def test_a_copy_is_equal_and_shares_nothing(value):
    copied = copied_value(value)
    assert copied == copy.deepcopy(value)
    assert repr(copied) == repr(value)  # True is no 1
    assert not parts(copied) & parts(value)


def test_what_json_cannot_hold_is_copied_too():
    inner = [1]
    value = {"a": (inner, decimal.Decimal(1)), "b": {2, 3}}
    copied = copied_value(value)
    assert copied == value
    assert copied["a"][0] is not inner


def group(**fields):
    return [Sample(index=0, group_index=0, prompt=[{"role": "user", "content": "a"}], tokens=[1, 2], **fields)]


def test_neither_state_nor_copies_share_anything_with_the_samples():
    given = group(response_length=1, rollout_log_probs=[-0.5], metadata={"tags": ["x"]}, reward={"a": 1.0})
    before = copy.deepcopy(given)
    (state,) = plain_groups([given])
    (again,) = groups_from_plain([state])
    for other in (vars(again[0]), vars(copied_group(given)[0]), state[0]):
        assert not parts(other) & parts(vars(given[0]))
    assert not parts(vars(again[0])) & parts(state[0])
    again[0].metadata["tags"].append("y")
    again[0].prompt[0]["content"] = "b"
    again[0].tokens.append(3)
    assert given == before
    assert groups_from_plain([state]) == [before]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    broken = group()
    broken[0].response = 5
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        groups_from_plain(plain_groups([group()]))
        assert gc.isenabled() is enabled
        with pytest.raises(DataError, match="response must be a string"):
            plain_groups([broken])
        with pytest.raises(DataError, match="needs the fields"):
            groups_from_plain([[{}]])
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


ODD = [
    {"index": 2**70},
    {"reward": 2**70},
    {"reward": math.nan},
    {"tokens": (1, 2)},
    {"rollout_log_probs": [1]},
    {"status": "completed"},
    {"metadata": {"images": [{"type": "image", "data": b"png", "size": (1, 2.0)}], "score": math.nan}},
    {"train_metadata": {"nested": [[], {}, {"a": {"b": None}}]}},
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "n": 1.0}]}]},
    {"label": type("Text", (str,), {})("a")},
]


def numbered(sizes, odd):
    """Groups of these sizes, in which the samples with these numbers are odd."""
    numbers = iter(range(sum(sizes)))
    groups = [[Sample(index=next(numbers), group_index=0, prompt="p", tokens=[1, 2]) for _ in range(n)] for n in sizes]
    for sample in [sample for group in groups for sample in group]:
        sample.append_response([3], log_probs=[-0.0], weight_version=1)
        if sample.index in odd:
            vars(sample).update(odd[sample.index])
    return groups


def one_by_one(groups):
    """What `Sample` itself makes of each."""
    for sample in [sample for group in groups for sample in group]:
        sample.validate()
    return [[sample.to_dict() for sample in group] for group in groups]


@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    odd=st.dictionaries(st.integers(0, 12), st.sampled_from(ODD), max_size=2),
)
def test_many_at_once_are_the_same_as_one_by_one(sizes, odd):
    expected = one_by_one(numbered(sizes, odd))
    groups = numbered(sizes, odd)
    state = plain_groups(groups)
    again = groups_from_plain(state)
    assert repr(state) == repr(expected)
    assert repr(again) == repr([[Sample.from_dict(row) for row in group] for group in expected])
    assert repr(one_by_one(groups)) == repr(expected)
    of_samples, of_copies = ([[vars(sample) for sample in group] for group in made] for made in (groups, again))
    assert not parts(state) & parts(of_samples)
    assert not parts(state) & parts(of_copies)


def test_what_is_plain_is_not_checked_one_by_one(monkeypatch):
    groups = numbered([300, 8, 0, 8], {})
    before = copy.deepcopy(groups)
    monkeypatch.setattr(Sample, "validate", lambda sample: pytest.fail("a call for one sample"))
    assert groups_from_plain(plain_groups(groups)) == before


@pytest.mark.parametrize("place", [0, 255, 256, 299])
def test_one_invalid_sample_among_many_is_named(place):
    groups = numbered([8] * 40, {})
    state = plain_groups(groups)
    groups[place // 8][place % 8].tokens[1] = -1
    with pytest.raises(DataError, match=rf"sample {place}: tokens\[1\] is -1"):
        plain_groups(groups)
    state[place // 8][place % 8]["status"] = "done"
    with pytest.raises(DataError, match=f"sample {place}: status 'done' is unknown"):
        groups_from_plain(state)


def test_a_status_given_as_text_becomes_one_in_the_sample_too():
    groups = numbered([2], {1: {"status": "aborted"}})
    plain_groups(groups)
    assert groups[0][1].status is Status.ABORTED


def test_a_state_of_fewer_fields_is_read():
    state = plain_groups(numbered([2, 2], {}))
    for group_of_rows in state:
        for row in group_of_rows:
            del row["train_metadata"], row["session_id"]
    assert groups_from_plain(state) == numbered([2, 2], {})


def test_a_sample_is_copied_while_somebody_adds_to_its_metadata():
    sample, over = Sample(index=3, group_index=0, prompt="a", metadata={"row": {"a": [1]}}), threading.Event()

    def add():
        number = 0
        while not over.is_set():
            number += 1
            sample.metadata[f"{number % 5000}"] = []
            sample.metadata.pop(f"{(number * 7) % 5000}", None)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            copied_group([sample])
    finally:
        over.set()
        thread.join(20)


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
        "index": draw(st.integers(0, 2**63 - 1)),
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
        "kept_tokens": draw(st.none() | st.just("5 17;" * length)),
        "routed_experts": draw(st.none() | st.just("2x1:AAE=" if length > 1 else "2x1:")),
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


def outcome(call, *args):
    try:
        return repr(call(*args))
    except DataError as error:
        return str(error)


@given(st.lists(plain_rows(), min_size=1, max_size=4))
def test_plain_samples_come_out_the_same(rows):
    expected = [Sample.from_dict(copy.deepcopy(row)) for row in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "validate", lambda sample: pytest.fail("a call for one sample"))
        (samples,) = groups_from_plain([rows])
        (again,) = plain_groups([samples])
    assert repr(samples) == repr(expected)
    assert [type(sample) for sample in samples] == [Sample] * len(rows)
    assert repr(again) == repr([sample.to_dict() for sample in expected]) == repr(rows)
    for sample, row in zip(samples, rows, strict=True):
        assert all(type(vars(sample)[name]) is type(row[name]) for name in row if name != "status")


@given(st.lists(any_rows(), min_size=1, max_size=3))
def test_any_rows_give_what_each_gives(rows):
    before = repr(rows)
    expected = outcome(lambda: [[Sample.from_dict(copy.deepcopy(row)) for row in rows]])
    assert outcome(groups_from_plain, [rows]) == expected
    assert repr(rows) == before


@given(st.lists(any_rows(), min_size=1, max_size=3))
def test_any_samples_give_what_each_gives(rows):
    def made():
        samples = [Sample(index=0, group_index=0, prompt="") for _ in rows]
        for sample, row in zip(samples, copy.deepcopy(rows), strict=True):
            vars(sample).update(row)  # as a user's function may assign anything
            if row.get("status") in list(Status):
                sample.status = Status(row["status"])
        return [samples]

    assert outcome(plain_groups, made()) == outcome(one_by_one, made())


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
def test_each_odd_value_is_treated_as_if_alone(fields):
    def made():
        samples = [Sample(**copy.deepcopy(BASE)) for _ in range(5)]
        vars(samples[3]).update(fields)
        return [samples]

    assert outcome(plain_groups, made()) == outcome(one_by_one, made())


def test_other_classes_and_unknown_or_missing_fields():
    samples = [Sample(**copy.deepcopy(BASE)), Own(**BASE)]
    (rows,) = plain_groups([samples])
    assert rows[0] == rows[1] and repr(groups_from_plain([rows])) == repr([[Sample(**copy.deepcopy(BASE))] * 2])
    samples[0].colour = "red"
    assert plain_groups([samples]) == [rows]
    row = rows[0]
    for fields in ({"colour": 1}, {"status": "done"}, {"status": []}, {"index": 1.0}):
        with pytest.raises(DataError):
            groups_from_plain([[row, row | fields]])
    missing = row | {"colour": 1}
    del missing["label"]
    with pytest.raises(DataError, match="no fields"):
        groups_from_plain([[row, missing]])
    assert list(row) == [field.name for field in dataclasses.fields(Sample)]


def test_rows_are_dictionaries_of_their_own():
    samples = [Sample(**copy.deepcopy(BASE), session_id="s") for _ in range(3)]
    before = json.dumps([sample.to_dict() for sample in samples])
    (rows,) = plain_groups([samples])
    rows[0]["index"] = 5
    rows[0]["colour"] = "red"
    del rows[1]["label"]
    rows[2]["tokens"].append(4)
    rows[0]["tokens"].clear()
    assert json.dumps([sample.to_dict() for sample in samples]) == before
    assert set(rows[2]) == {field.name for field in dataclasses.fields(Sample)} and "colour" not in rows[1]
