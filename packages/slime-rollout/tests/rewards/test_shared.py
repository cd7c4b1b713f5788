import asyncio

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_core.types import Sample
from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.rewards import Scorers

GIVEN = {"hf_checkpoint": "m", "prompt_data": "p", "rollout_batch_size": 1}


@pytest.fixture
def config(tmp_path):
    def build(datasets, **changes):
        (tmp_path / "sets.yaml").write_text(f"eval: {{datasets: {datasets}}}")
        return RolloutConfig(**GIVEN, eval_config=str(tmp_path / "sets.yaml"), **changes)

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
    with pytest.raises(ConfigError, match=r"^held-out set aime: --custom-rm-path .*own\.py:score takes \(args\)"):
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
        sample.reward = asyncio.run(scorers.of(one).reward(sample))
        assert sample.scalar_reward(one.reward_key) == 0.0
        assert isinstance(sample.reward, float) == (one.reward_key is None)
    shared = config("{named: {path: x, reward_key: style}}", custom_rm_path=f"{tmp_path}/own.py:score")
    assert asyncio.run(Scorers(shared, HookArgs({}), read_eval_sets(shared)).of(shared).reward(sample)) == 0.0
