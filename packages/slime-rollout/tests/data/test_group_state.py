import copy
import decimal
import gc
import math
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout.data import group_state
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


@given(
    sizes=st.lists(st.integers(0, 5), max_size=6),
    odd=st.dictionaries(st.integers(0, 12), st.sampled_from(ODD), max_size=2),
    portion=st.integers(1, 8),
)
def test_many_at_once_are_the_same_as_one_by_one(sizes, odd, portion):
    expected = [[group_state._plain(sample) for sample in group] for group in numbered(sizes, odd)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_state, "_AT_ONCE", portion)
        groups = numbered(sizes, odd)
        state = plain_groups(groups)
        again = groups_from_plain(state)
    assert repr(state) == repr(expected)
    assert repr(again) == repr([[group_state._sample(row) for row in group] for group in expected]) == repr(groups)
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
