import contextlib

import pytest

from slime_core.errors import DataError
from slime_core.types import RolloutBatch, Sample
from slime_rollout.errors import BatchError
from slime_rollout.limits import ModelLimits
from slime_rollout.prepare import check_limits, check_scored, check_versions


@pytest.mark.parametrize(
    ("versions", "most_behind", "allowed"),
    [
        ([3, 3], 0, None),
        ([3, -1], 0, None),
        ([], 0, None),
        ([3, 2], 0, "3: "),
        ([4, 4], 0, "3: "),
        ([3, 2], 1, None),
        ([3, 1], 1, "2 to 3: "),
        ([3, 4], 1, "2 to 3: "),
        ([0, -1], None, None),
        ([3, 4], None, "3 or less: "),
    ],
)
def test_no_token_is_of_another_policy_than_it_may_be(versions, most_behind, allowed):
    sample = Sample(
        index=9, group_index=0, prompt="p", tokens=[1, 2, 3], response_length=2, reward=1.0, weight_versions=versions
    )
    batch = RolloutBatch(rollout_id=7, weight_version=3, groups=[[sample]])
    refused = pytest.raises(BatchError, match=f"sample 9 of step 8 .* must be {allowed}")
    with contextlib.nullcontext() if allowed is None else refused:
        check_versions(batch.columns(), most_behind=most_behind)


@pytest.mark.parametrize(
    ("rollout_id", "reasons", "fine"),
    [(0, ["TypeError: x"] * 4, False), (0, ["TypeError: x"] * 3, True), (0, [], True), (1, ["TypeError: x"] * 4, True)],
)
def test_a_run_whose_first_rollout_has_no_reward_ends(rollout_id, reasons, fine):
    samples = [Sample(index=i, group_index=0, prompt="p", tokens=[1, 2], response_length=1) for i in range(4)]
    for sample, reason in zip(samples, reasons, strict=False):
        sample.metadata["reward_failure"] = reason
    expected = r"none of the 4 samples of the first rollout could be scored: TypeError: x; correct the reward"
    with contextlib.nullcontext() if fine else pytest.raises(BatchError, match=expected):
        check_scored(RolloutBatch(rollout_id=rollout_id, groups=[samples]).columns())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 50], "token 50 is outside the model's vocabulary of 50"),
        ([1] * 17, "17 tokens with the prompt are more than the model's context of 16"),
    ],
)
def test_whatever_a_rollout_comes_from_its_tokens_are_the_models(tokens, message):
    one = Sample(index=3, group_index=0, prompt="p", tokens=tokens, response_length=1, reward=0.0)
    batch = RolloutBatch(rollout_id=4, groups=[[one]])
    with pytest.raises(DataError, match=f"sample 3 of step 5 is not of this model: {message}"):
        check_limits(batch.columns(), ModelLimits(vocab_size=50, context=16))
