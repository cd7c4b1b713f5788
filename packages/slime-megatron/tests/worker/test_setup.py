"""Settings of the roles, checked before ranks meet."""

import functools

import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.settings.memory import stages_memory

PPO = AlgorithmConfig(advantage_estimator="ppo", gamma=0.9, lambd=0.8, eps_clip=0.05, value_clip=0.05)


def test_what_the_memory_does_not_hold_is_refused_at_the_start(ranks, tiny_model, tiny_config, rank_error):
    model, config = tiny_model("qwen3"), tiny_config()
    [actor], [critic] = (stages_memory(model.shape, config, 1, value_head=head) for head in (False, True))
    start = functools.partial(ranks.call_apart, 1, "build_in")
    for memory, turns, message in (
        (actor.total - 1, True, "the actor takes"),
        (actor.total + critic.total - 1, False, "the actor and the critic take .* and each fits alone"),
    ):
        with pytest.raises(rank_error, match=message) as caught:
            start(memory, config, PPO, model.shape, turns)
        assert caught.value.kind == "ConfigError" and "\n" not in caught.value.text
    start(actor.total, config, PPO, model.shape, True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"judge": {}}, "overrides of the role judge: no such role is trained; give actor or critic"),
        ({"critic": {"learning_rate": 1.0}}, "overrides of the role critic: unknown setting learning_rate"),
        ({"critic": {"lrs": 1.0}}, "overrides of the role critic: unknown setting lrs; near names: lr"),
        ({"critic": {"tensor_model_parallel_size": 2}}, "tensor_model_parallel_size is the same for all roles"),
        ({"critic": {"lr": "fast"}}, "overrides of the role critic: lr 'fast' must be float"),
        ({"actor": {"lr": -1.0}}, "overrides of the role actor: --lr -1.0 must be 0 or more"),
    ],
)
def test_overrides_that_cannot_be(ranks, tiny_model, tiny_config, rank_error, overrides, message):
    model = tiny_model("qwen3")
    with pytest.raises(rank_error, match=message) as caught:
        ranks.start(1, tiny_config(load=model.checkpoint), model.shape, PPO, overrides=overrides)
    assert caught.value.kind == "ConfigError"


def test_overrides_of_a_critic_that_is_not_there(ranks, tiny_model, tiny_config, rank_error):
    with pytest.raises(rank_error, match="overrides of the role critic: there is none; add --advantage-estimator ppo"):
        ranks.start(1, tiny_config(), tiny_model("qwen3").shape, overrides={"critic": {"lr": 0.5}})


def test_a_role_takes_overrides(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint)
    ranks.start(1, config, model.shape, PPO, overrides={"critic": {"lr": 0.5}, "actor": {"lr": 0.25}})
    step = ranks.first("train", make_shards(make_samples(groups=1))).steps[0]
    assert (step["lr"], step["critic-lr"]) == (0.25, 0.5)
