import asyncio
import logging

import pytest

from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import RewardError, Tolerance
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.rewards import Scorers, VerifierError, make_scorer

LOOP = asyncio.Runner()  # one event loop for all calls, as in a run


def build(**changes):
    config = RolloutConfig.of(hf_checkpoint="m", prompt_data="p", rollout_batch_size=1, **changes)
    return make_scorer(config, HookArgs.from_configs(config)).reward


def sample(response, label="1", index=3, **more):
    return Sample(index=index, group_index=0, prompt="1 + 1 =", label=label, response=response, **more)


def score(reward, *samples):
    async def all_of_them():
        return await asyncio.gather(*(reward(one) for one in samples))

    return LOOP.run(asyncio.wait_for(all_of_them(), 60))


def test_one_reward_serves_two_rollouts():
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
    first, second = score(Tolerance(wrong, drop=False).each(fails), sample("a"), sample("b"))
    assert first == second == wrong and first is not second


def test_other_errors_end_the_run():
    async def fails(given):
        raise RewardError("no")

    with pytest.raises(RewardError):
        score(Tolerance(drop=False).each(fails), sample("a"))
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


GIVEN = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}


@pytest.fixture
def config(tmp_path):
    def build(datasets, **changes):
        (tmp_path / "sets.yaml").write_text(f"eval: {{datasets: {datasets}}}")
        return RolloutConfig.of(**GIVEN, eval_config=str(tmp_path / "sets.yaml"), **changes)

    return build


def test_only_what_is_scored_alike_is_shared(config):
    given = config(
        "{same: {path: x, temperature: 0}, named: {path: x, rm_type: math}, other: {path: x, rm_type: f1}}",
        rm_type="math",
    )
    scorers = Scorers(given, HookArgs({}), read_eval_sets(given))
    same, named, other = (scorers.of(held_out.config) for held_out in read_eval_sets(given))
    assert scorers.of(given) is same is named
    assert other.reward is not same.reward


def test_models_made_with_other_arguments_are_others(config, tmp_path):
    (tmp_path / "own.py").write_text(
        "class CustomRewardModel:\n"
        "    def __init__(self, size, name='m'): pass\n"
        "    def compute_reward(self, prompts, responses): return [0.0] * len(prompts)\n"
    )
    own = f"path: x, custom_rm_path: '{tmp_path}/own.py', custom_rm_kwargs"
    given = config(
        f"{{same: {{{own}: {{name: a, size: 1}}}}, smaller: {{{own}: {{size: 0}}}}}}",
        custom_rm_path=f"{tmp_path}/own.py",
        custom_rm_kwargs='{"size": 1, "name": "a"}',
    )
    scorers = Scorers(given, HookArgs({}), read_eval_sets(given))
    same, smaller = (scorers.of(held_out.config) for held_out in read_eval_sets(given))
    assert scorers.of(given) is same
    assert smaller.reward is not same.reward


def test_a_group_reward_is_for_those_who_ask_for_it(config, tmp_path):
    (tmp_path / "own.py").write_text("def score(args, samples): return [1.0 for _ in samples]\n")
    given = config(
        "{a: {path: x, group_rm: false}, b: {path: x}}", custom_rm_path=f"{tmp_path}/own.py:score", group_rm=True
    )
    scorers = Scorers(given, HookArgs({}), read_eval_sets(given))
    assert [scorers.of(one.config).group_reward is None for one in read_eval_sets(given)] == [True, False]


def test_a_function_that_cannot_be_used_is_told_at_once_with_its_set(config, tmp_path):
    (tmp_path / "own.py").write_text("def score(args): return 1.0\n")
    given = config(f"{{aime: {{path: x, custom_rm_path: '{tmp_path}/own.py:score'}}}}")
    with pytest.raises(ConfigError, match=r"^held-out set aime: custom_rm_path .*own\.py:score takes \(args\)"):
        Scorers(given, HookArgs({}), read_eval_sets(given))


def test_what_fails_before_there_is_a_reward_suits_all_who_share_what_scores(config, tmp_path):
    (tmp_path / "own.py").write_text("def score(args, sample): raise ValueError\ndef other(args, sample): 1 / 0\n")
    own = f"path: x, custom_rm_path: '{tmp_path}/own.py"
    given = config(
        f"{{style: {{{own}:other', reward_key: style}}, tone: {{{own}:other', reward_key: tone}}}}",
        custom_rm_path=f"{tmp_path}/own.py:score",
    )
    scorers = Scorers(given, HookArgs({}), read_eval_sets(given))
    for one in (given, *(held_out.config for held_out in read_eval_sets(given))):
        sample = Sample(index=0, group_index=0, prompt="a", response="b")
        sample.reward = LOOP.run(scorers.of(one).reward(sample))
        assert sample.scalar_reward(one.rewards.reward_key) == 0.0
        assert isinstance(sample.reward, float) == (one.rewards.reward_key is None)
    shared = config("{named: {path: x, reward_key: style}}", custom_rm_path=f"{tmp_path}/own.py:score")
    assert LOOP.run(Scorers(shared, HookArgs({}), read_eval_sets(shared)).of(shared).reward(sample)) == 0.0
