import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw):
    length = draw(st.integers(0, 4))
    tokens = draw(st.lists(st.integers(0, 200_000), min_size=length, max_size=length + 3))

    def per_token(values):
        return st.lists(values, min_size=length, max_size=length)

    return Sample(
        index=draw(st.integers(0)),
        group_index=draw(st.integers(0)),
        prompt=draw(st.text() | st.just([{"role": "user", "content": "hi"}])),
        label=draw(st.none() | st.text()),
        trajectory_id=draw(st.none() | st.integers(0)),
        tokens=tokens,
        response=draw(st.text()),
        response_length=length,
        loss_mask=draw(st.none() | per_token(st.integers(0, 1))),
        rollout_log_probs=draw(st.none() | per_token(FINITE)),
        weight_versions=draw(per_token(st.integers(-1))),
        reward=draw(st.none() | FINITE | st.dictionaries(st.text(), FINITE)),
        status=draw(st.sampled_from(Status)),
        metadata=draw(st.dictionaries(st.text(), st.integers() | st.text())),
    )


@given(samples())
def test_round_trip_through_json_is_lossless(sample):
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample


@given(samples())
def test_prompt_and_response_make_up_the_tokens(sample):
    assert sample.prompt_tokens + sample.response_tokens == sample.tokens
    assert len(sample.response_tokens) == len(sample.trained_mask) == sample.response_length


BASE = {"index": 7, "group_index": 0, "prompt": "p", "tokens": [1, 2, 3], "response_length": 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 5}, "sample 7: prompt must be a string or chat messages, got int"),
        ({"response_length": 4}, "sample 7: response_length 4 is not between 0 and 3 tokens"),
        ({"response_length": -1}, "sample 7: response_length -1 is not between 0 and 3 tokens"),
        ({"loss_mask": [1]}, "sample 7: loss_mask has 1 entries, response_length is 2"),
        ({"rollout_log_probs": [0.0] * 3}, "sample 7: rollout_log_probs has 3 entries, response_length is 2"),
        ({"weight_versions": [0]}, "sample 7: weight_versions has 1 entries, response_length is 2"),
        ({"loss_mask": [1, 2]}, r"sample 7: loss_mask may hold 0 and 1 only, got \[1, 2\]"),
    ],
)
def test_validation_names_the_field_and_the_values(fields, message):
    with pytest.raises(DataError, match=message):
        Sample(**(BASE | fields))


def test_from_dict_refuses_unknown_and_missing_fields():
    with pytest.raises(DataError, match=r"no fields \['colour'\]"):
        Sample.from_dict(BASE | {"colour": "red"})
    with pytest.raises(DataError, match=r"needs the fields \['index'\]"):
        Sample.from_dict({"group_index": 0, "prompt": "p"})
    with pytest.raises(DataError, match="sample 7: status 'done' is unknown; allowed: pending, completed, truncated"):
        Sample.from_dict(BASE | {"status": "done"})


def test_scalar_reward():
    assert Sample(**BASE, reward=1).scalar_reward() == 1.0
    assert Sample(**BASE, reward={"a": 2}).scalar_reward("a") == 2.0
    with pytest.raises(DataError, match=r"entries \['a'\]; choose one"):
        Sample(**BASE, reward={"a": 2}).scalar_reward()
    with pytest.raises(DataError, match="sample 7 has no reward"):
        Sample(**BASE).scalar_reward()
