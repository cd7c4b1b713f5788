import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_core.types.arrays import columns_of, samples_of
from slime_core.types.kept import kept_text
from slime_core.types.routed import routed_rows

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
        kept_tokens=draw(st.none() | per_token(st.lists(st.integers(0, 200_000), max_size=3)).map(kept_text)),
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
        ({"prompt": [{"role": "user"}, "hi"]}, r"sample 7: prompt\[1\] must be a message, got 'hi'"),
        ({"label": 42}, r"sample 7: label must be a string or None, got 42 \(int\)"),
        ({"response_length": 4}, "sample 7: response_length 4 is not between 0 and 3 tokens"),
        ({"response_length": -1}, "sample 7: response_length -1 is not between 0 and 3 tokens"),
        ({"loss_mask": [1]}, "sample 7: loss_mask has 1 entries, response_length is 2"),
        ({"rollout_log_probs": [0.0] * 3}, "sample 7: rollout_log_probs has 3 entries, response_length is 2"),
        ({"weight_versions": [0]}, "sample 7: weight_versions has 1 entries, response_length is 2"),
        ({"loss_mask": [1, 2]}, r"sample 7: loss_mask may hold 0 and 1 only, got \[1, 2\]"),
        ({"loss_mask": [1, "1"]}, r"sample 7: loss_mask may hold 0 and 1 only, got \['1'\]"),
        ({"loss_mask": "11"}, "sample 7: loss_mask must be a list of zeros and ones, got str"),
        ({"tokens": None}, "sample 7: tokens must be a list of integers, got NoneType"),
        ({"tokens": [1, 2.5, 3]}, r"sample 7: tokens\[1\] must be an integer, got 2.5 \(float\)"),
        ({"tokens": [1, 2, -3]}, r"sample 7: tokens\[2\] is -3; it must be 0 or more"),
        ({"tokens": [1, 2, -(10**5000)]}, r"sample 7: tokens\[2\] is an integer of 16610 bits"),
        ({"tokens": [1, 2, 10**5000]}, r"sample 7: tokens\[2\] is an integer of 16610 bits"),
        ({"tokens": {1, 2, 3}}, "sample 7: tokens must be a list of integers, got set"),
        ({"weight_versions": [0, -2]}, r"sample 7: weight_versions\[1\] is -2; it must be -1 or more"),
        ({"teacher_log_probs": [0.0]}, "sample 7: teacher_log_probs has 1 entries, response_length is 2"),
        ({"rollout_log_probs": [0.0, None]}, r"sample 7: rollout_log_probs\[1\] must be a number, got None"),
        ({"rollout_log_probs": [0.0, "-1"]}, r"sample 7: rollout_log_probs\[1\] must be a number, got '-1'"),
        ({"index": "7"}, "a sample: index must be an integer, got '7'"),
        ({"index": -1}, "a sample: index is -1; it must be 0 or more"),
        ({"index": 10**5000}, "a sample: index is an integer of 16610 bits; at most 1024 are allowed"),
        ({"group_index": -1}, "sample 7: group_index is -1; it must be 0 or more"),
        ({"trajectory_id": -1}, "sample 7: trajectory_id is -1; it must be 0 or more"),
        ({"group_index": None}, "sample 7: group_index must be an integer, got None"),
        ({"response_length": 1.0}, "sample 7: response_length must be an integer, got 1.0"),
        ({"trajectory_id": "a"}, "sample 7: trajectory_id must be an integer, got 'a'"),
        ({"reward": "good"}, "sample 7: reward must be a number, got 'good'"),
        ({"reward": 10**400}, "sample 7: reward must be a number that a float can hold; it is too large"),
        ({"reward": {1: 2.0}}, "sample 7: reward has the key 1; its numbers are named by strings"),
        ({"response": None}, "sample 7: response must be a string, got NoneType"),
        ({"session_id": 3}, "sample 7: session_id must be a string or None, got 3"),
        ({"remove_sample": 1}, "sample 7: remove_sample must be true or false, got 1"),
        ({"metadata": []}, "sample 7: metadata must be a dictionary, got list"),
        ({"train_metadata": None}, "sample 7: train_metadata must be a dictionary, got NoneType"),
        ({"status": "done"}, "sample 7: status 'done' is unknown; allowed: pending, completed"),
    ],
)
def test_validation_names_the_field_and_the_values(fields, message):
    with pytest.raises(DataError, match=message):
        Sample(**(BASE | fields))


def test_routed_experts_grow_with_what_the_engine_has_read():
    """Of what was observed they come with the next turn."""
    sample = Sample(index=7, group_index=0, prompt="p", tokens=[1, 2])
    rows = np.arange(14).reshape(7, 2)
    sample.append_response([3, 4], routed_experts=rows[:3])
    sample.append_response([5, 6], trained=False)
    assert routed_rows("s", sample.routed_experts).tolist() == rows[:3].tolist()
    before = sample.to_dict()
    with pytest.raises(DataError, match=r"known for 3 tokens, and \[3, 2\] numbers more do not make the rows of 7"):
        sample.append_response([7, 8], routed_experts=rows[4:])
    with pytest.raises(DataError, match=r"known for 3 tokens, and \[4, 1\] numbers more do not make the rows of 7"):
        sample.append_response([7, 8], routed_experts=rows[3:, :1])
    assert sample.to_dict() == before
    sample.append_response([7, 8], routed_experts=rows[3:])
    assert routed_rows("s", sample.routed_experts).tolist() == rows.tolist()


def test_kept_tokens_grow_with_the_response():
    sample = Sample(index=7, group_index=0, prompt="p", tokens=[1])
    sample.append_response([4], trained=False)
    sample.append_response([2, 3], log_probs=[-1.0, -2.0], kept_tokens="2 9;3;")
    sample.append_response([5], trained=False)
    assert sample.kept_tokens == ";2 9;3;;"
    with pytest.raises(DataError, match="the 1 trained tokens to append come without kept_tokens, unlike those before"):
        sample.append_response([6], log_probs=[-1.0])
    with pytest.raises(DataError, match="kept_tokens has 2 sets, each to end with ';', for 1 tokens"):
        sample.append_response([6], log_probs=[-1.0], kept_tokens="6;7;")
    assert sample.kept_tokens == ";2 9;3;;"
    plain = Sample(index=7, group_index=0, prompt="p", tokens=[1])
    plain.append_response([2], log_probs=[-1.0])
    with pytest.raises(DataError, match="the 1 trained tokens to append come with kept_tokens, unlike those before"):
        plain.append_response([6], log_probs=[-1.0], kept_tokens="6;")


def test_from_dict_refuses_unknown_and_missing_fields():
    with pytest.raises(DataError, match=r"no fields \['colour'\]"):
        Sample.from_dict(BASE | {"colour": "red"})
    with pytest.raises(DataError, match=r"no fields \['3', 'colour'\]"):
        Sample.from_dict(BASE | {"colour": "red", 3: 4})
    with pytest.raises(DataError, match=r"needs the fields \['index'\]"):
        Sample.from_dict({"group_index": 0, "prompt": "p"})
    with pytest.raises(DataError, match="sample 7: status 'done' is unknown; allowed: pending, completed, truncated"):
        Sample.from_dict(BASE | {"status": "done"})


def test_numbers_of_other_libraries_become_plain():
    import torch

    sample = Sample(
        **(BASE | {"tokens": torch.tensor([1, 2, 3]), "index": torch.tensor(7)}),
        loss_mask=[True, 0.0],
        rollout_log_probs=torch.tensor([-0.5, -1.0]),
        weight_versions=(3, 4),
        reward=torch.tensor(0.25),
        status="completed",
    )
    assert repr(sample) == repr(
        Sample(
            **BASE,
            loss_mask=[1, 0],
            rollout_log_probs=[-0.5, -1.0],
            weight_versions=[3, 4],
            reward=0.25,
            status=Status.COMPLETED,
        )
    )
    json.dumps(sample.to_dict())


def test_a_reward_carries_parts_that_are_no_numbers():
    import numpy

    parts = {"score": numpy.float32(0.5), "right": numpy.True_, "answer": "42", "tried": numpy.arange(2), "none": None}
    sample = Sample(**BASE, reward=parts | {"loop": {1, 2}, "huge": 10**400, "callable": print})
    plain = {"score": 0.5, "right": True, "answer": "42", "tried": [0, 1], "none": None}
    assert repr(sample.reward) == repr(plain)  # what JSON cannot hold is left out
    assert sample.scalar_reward("score") == 0.5
    with pytest.raises(DataError, match="the reward's answer is '42', which is not a number"):
        sample.scalar_reward("answer")
    (again,) = samples_of(columns_of([sample]))
    assert again.reward == plain


@pytest.mark.parametrize("given", ["numpy.True_", "numpy.array([True])", "torch.tensor(True)"])
def test_a_sample_may_be_removed_by_a_truth_value_of_another_library(given):
    import numpy
    import torch

    sample = Sample(**BASE, remove_sample=eval(given, {"numpy": numpy, "torch": torch}))
    assert sample.remove_sample is True


def test_validation_leaves_plain_values_the_same_objects():
    tokens, reward = [1, 2, 3], {"a": 1.0}
    sample = Sample(**(BASE | {"tokens": tokens}), reward=reward)
    assert sample.tokens is tokens and sample.reward is reward


def test_a_large_integer_reward_is_not_rounded():
    assert Sample(**BASE, reward=2**60 + 1).reward == 2**60 + 1


def test_a_removed_sample_trains_nothing():
    sample = Sample(**BASE, loss_mask=[1, 1], remove_sample=True)
    assert sample.trained_mask == [0, 0] and sample.trained_tokens == 0
    assert Sample(**BASE, loss_mask=[0, 1]).trained_tokens == 1


def test_the_trajectory_is_the_index_where_none_is_given():
    assert Sample(**BASE).trajectory == 7
    assert Sample(**BASE, trajectory_id=0).trajectory == 0


def test_appending_turns_and_observations():
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9])
    sample.append_response([1, 2], text="ab", log_probs=[-0.5, -0.25], weight_version=3)
    sample.append_response([5, 6, 7], text="obs", trained=False)
    sample.append_response([3], text="c", log_probs=[-1.0], weight_version=[4])
    sample.append_response([])
    sample.validate()
    assert sample.tokens == [9, 1, 2, 5, 6, 7, 3]
    assert sample.prompt_tokens == [9]
    assert sample.response == "abobsc"
    assert sample.loss_mask == [1, 1, 0, 0, 0, 1]
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, 0.0, -1.0]
    assert sample.weight_versions == [3, 3, -1, -1, -1, 4]


def test_appending_without_log_probs_and_versions_keeps_the_short_forms():
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9])
    sample.append_response([1, 2])
    sample.append_response([3])
    assert (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions) == (None, None, [])
    assert sample.trained_tokens == 3


def test_an_observation_first_is_filled_up_with_zeros():
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9])
    sample.append_response([5], trained=False)
    sample.append_response([1], log_probs=[-2.0], weight_version=1)
    sample.validate()
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 1], [0.0, -2.0])
    assert sample.weight_versions == [-1, 1]


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"log_probs": [0.0]}, "sample 0: 2 tokens to append, but 1 log_probs"),
        ({"log_probs": [-1.0]}, {}, "the 2 trained tokens to append come without log_probs, unlike those before"),
        ({}, {"log_probs": [-1.0, 0.0]}, "the 2 trained tokens to append come with log_probs, unlike those before"),
        # An observation's log-probs would make zeros of those that the trained tokens lack.
        ({}, {"log_probs": [-1.0, 0.0], "trained": False}, "the 2 untrained tokens to append come with log_probs"),
        ({}, {"text": None}, "text must be a string, got NoneType"),
        ({}, {"weight_version": -2}, "weight_version is -2; it must be -1 or more"),
        ({}, {"log_probs": [-1.0, "x"], "trained": False}, r"log_probs\[1\] must be a number, got 'x'"),
        ({}, {"weight_version": [1]}, "2 tokens to append, but 1 weight versions"),
        ({}, {"weight_version": [1, -2]}, r"weight_version\[1\] is -2; it must be -1 or more"),
        ({}, {"weight_version": "v"}, "weight_version must be an integer, got 'v'"),
    ],
)
def test_an_append_that_fails_changes_nothing(first, then, message):
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9])
    sample.append_response([1], **first)
    before = repr(sample)
    with pytest.raises(DataError, match=message):
        sample.append_response([2, 3], **then)
    assert repr(sample) == before
    sample.teacher_log_probs = [0.0]
    with pytest.raises(DataError, match="teacher_log_probs are there already"):
        sample.append_response([2])


def test_appending_no_tokens_makes_up_no_log_probs():
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9])
    sample.append_response([], log_probs=[], trained=False)
    sample.append_response([1, 2])
    sample.append_response([], text="x", log_probs=[], weight_version=3)
    assert (sample.rollout_log_probs, sample.loss_mask, sample.weight_versions) == (None, None, [])
    assert (sample.tokens, sample.response) == ([9, 1, 2], "x")


@pytest.mark.parametrize("log_probs", [None, [-0.5]])
def test_an_empty_response_with_log_probs_is_one_without(log_probs):
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[9], rollout_log_probs=[], loss_mask=[])
    sample.append_response([1], log_probs=log_probs)
    sample.validate()
    assert (sample.rollout_log_probs, sample.loss_mask) == (log_probs, [1])


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.booleans(), st.integers(-1, 2)),
        max_size=6,
    )
)
def test_no_sequence_of_appends_gives_a_trained_token_a_log_prob_that_no_engine_gave(appends):
    sample, expected = Sample(index=0, group_index=0, prompt="p", tokens=[9]), []
    for number, (count, trained, scored, version) in enumerate(appends, start=1):
        log_probs = [-float(number)] * count if scored else None
        try:
            sample.append_response([number] * count, trained=trained, log_probs=log_probs, weight_version=version)
        except DataError:
            continue
        expected += [(number, trained, -float(number) if scored else None, version)] * count
    sample.validate()
    assert sample.response_tokens == [token for token, *_ in expected]
    assert sample.trained_mask == [int(trained) for _, trained, *_ in expected]
    assert (sample.weight_versions or [-1] * len(expected)) == [version for *_, version in expected]
    given = sample.rollout_log_probs
    for place, (_, trained, log_prob, _) in enumerate(expected):
        if trained or given is not None:
            assert (None if given is None else given[place]) == (0.0 if log_prob is None and not trained else log_prob)


def test_scalar_reward():
    assert Sample(**BASE, reward=1).scalar_reward() == 1.0
    assert Sample(**BASE, reward={"a": 2}).scalar_reward("a") == 2.0
    with pytest.raises(DataError, match=r"entries \['a'\]; choose one"):
        Sample(**BASE, reward={"a": 2}).scalar_reward()
    with pytest.raises(DataError, match="sample 7 has no reward"):
        Sample(**BASE).scalar_reward()


@pytest.mark.parametrize(
    ("reward", "key", "message"),
    [
        ({"score": 1, "n": 2, "note": "x"}, None, r"the reward has the entries ['n', 'score']; choose one with"),
        ({"score": 1, "n": 2, "note": "x"}, "scor", "the reward has no entry 'scor'; its numbers are ['n', 'score']: "),
        ({"score": 1, "note": "x"}, "note", "the reward's note is 'x', which is not a number; its numbers are ['score"),
        ({"note": "x"}, "score", "no entry of the reward ['note'] is a number; return one that is"),
        ({"note": "x"}, None, "no entry of the reward ['note'] is a number; return one that is"),
    ],
)
def test_a_reward_of_parts_names_those_that_can_be_chosen(reward, key, message):
    with pytest.raises(DataError, match=f"^sample 7: {re.escape(message)}"):
        Sample(**BASE, reward=reward).scalar_reward(key)
