import asyncio
import logging

import pytest

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import RewardError
from slime_rollout.rewards import Tolerance, Tolerant, VerifierError, make_reward


def build(**changes):
    config = RolloutConfig(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, **changes)
    return make_reward(config, HookArgs.from_configs(config))


def sample(response, label="1", index=3, **more):
    return Sample(index=index, group_index=0, prompt="1 + 1 =", label=label, response=response, **more)


def score(reward, *samples):
    async def all_of_them():
        return await asyncio.gather(*(reward(one) for one in samples))

    return asyncio.run(asyncio.wait_for(all_of_them(), 60))


def test_mathematics_in_two_event_loops_of_one_reward():
    reward = build(rm_type="math", rm_workers=1)
    for _ in range(2):
        assert score(reward, sample(r"\boxed{\frac22}"), sample(r"\boxed{2}"), sample("1")) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("policy", "dropped"), [("zero", False), ("drop", True)])
def test_a_sample_that_cannot_be_scored_counts_as_wrong(policy, dropped, caplog):
    reward = build(rm_type="math", rm_workers=1, rm_timeout=2.0, rm_on_failure=policy)
    endless, good = sample(r"\boxed{10000000!}", index=7), sample(r"\boxed{1}")
    with caplog.at_level(logging.WARNING):
        assert score(reward, good, endless) == [1.0, 0.0]
    assert "sample 7 could not be scored and counts as wrong: it took more than 2 s" in caplog.text
    assert endless.metadata == {"reward_failure": "it took more than 2 s"}
    assert (endless.remove_sample, good.remove_sample, good.metadata) == (dropped, False, {})


def test_what_a_wrong_answer_gets_is_the_rules_own():
    async def fails(given):
        raise VerifierError("no")

    wrong = {"score": -1.0, "acc": 0.0}
    first, second = score(Tolerant(fails, Tolerance(wrong, drop=False)), sample("a"), sample("b"))
    assert first == second == wrong and first is not second


def test_other_errors_end_the_run():
    async def fails(given):
        raise RewardError("no")

    with pytest.raises(RewardError):
        score(Tolerant(fails, Tolerance(drop=False)), sample("a"))
    with pytest.raises(DataError, match="sample 3 has no label"):
        score(build(rm_type="math"), sample(r"\boxed{1}", label=None))


def test_metadata_takes_part_where_a_rule_asks_for_it():
    reward = build(rm_type="gpqa", rm_workers=1)
    choices = {"choices": ["iron", "water"], "other": 5}
    given = [sample("The answer is B", label=label, metadata=choices) for label in ("water", "iron")]
    assert score(reward, *given) == [1.0, 0.0]


def test_random_is_even_and_the_same_again():
    samples = [sample("text", label=None, index=index) for index in range(1000)]
    first, again = (score(build(rm_type="random"), *samples) for _ in range(2))
    assert first == again
    assert set(first) == {0.0, 1.0}
    assert 430 < sum(first) < 570  # 4.4 standard deviations
