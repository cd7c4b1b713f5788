import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import RolloutBatch, Sample

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SAMPLE = Sample(index=0, group_index=0, prompt="p")


def make_batch(group_sizes, reward=1.0):
    groups, index = [], 0
    for group, size in enumerate(group_sizes):
        groups.append([Sample(index=index + i, group_index=group, prompt="naïve ", reward=reward) for i in range(size)])
        index += size
    return RolloutBatch(
        rollout_id=4,
        groups=groups,
        weight_version=3,
        metrics={"a": 0.1},
        seconds={"generate": 2.0},
    )


@given(st.lists(st.integers(0, 3), max_size=4), FINITE)
def test_round_trip_is_lossless(group_sizes, reward):
    batch = make_batch(group_sizes, reward)
    assert batch.columns().batch() == batch


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_id": "4"}, "a rollout: rollout_id must be an integer, got '4'"),
        ({"rollout_id": -1}, "a rollout: rollout_id is -1; it must be 0 or more"),
        ({"groups": None}, "rollout 4: groups must be a list of lists of samples, got NoneType"),
        ({"groups": [SAMPLE]}, "rollout 4: groups must be a list of lists of samples, got list"),
        ({"groups": [["s"]]}, "rollout 4: groups must hold samples, got str"),
        ({"weight_version": "1"}, "rollout 4: weight_version must be an integer, got '1'"),
        ({"weight_version": -1}, "rollout 4: weight_version is -1; it must be 0 or more"),
        ({"metrics": [1.0]}, "rollout 4: metrics must be a dictionary, got list"),
        ({"metrics": {"a": "b"}}, r"rollout 4: metrics\['a'\] must be a number, got 'b'"),
        ({"seconds": {3: 1.0}}, "rollout 4: seconds has the key 3; its numbers are named by strings"),
    ],
)
def test_validation_names_the_field_and_the_values(fields, message):
    with pytest.raises(DataError, match=message):
        RolloutBatch(**({"rollout_id": 4, "groups": [[SAMPLE]]} | fields))


def test_what_would_not_come_back_is_refused():
    batch = make_batch([1])
    batch.samples[0].metadata = {"order": (1, 2)}
    with pytest.raises(DataError, match=r"metadata\.order is a tuple"):
        batch.columns()
    batch = make_batch([1])
    batch.metrics = None
    with pytest.raises(DataError, match="rollout 4: metrics must be a dictionary"):
        batch.columns()


def test_lone_surrogates_are_not_joined():
    sample = Sample(index=0, group_index=0, prompt="\U0001f600 \ud83d", label="\\ud83d", metadata={"nan": math.nan})
    sample.response = "\ud83d\ude00"
    batch = RolloutBatch(rollout_id=0, groups=[[sample]])
    assert repr(batch.columns().batch()) == repr(batch)
