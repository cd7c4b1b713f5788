import copy
import decimal
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample
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
