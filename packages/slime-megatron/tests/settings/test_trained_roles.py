"""Which roles are trained, and that each counts its own memory."""

import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.memory import stages_memory
from slime_megatron.settings.trained_roles import trained_roles

PPO = AlgorithmConfig(advantage_estimator="ppo")


@pytest.mark.parametrize(
    ("algorithm", "only_evaluates", "heads"),
    [
        (AlgorithmConfig(), False, {"actor": False}),
        (AlgorithmConfig(loss_type="rm_loss"), False, {"actor": True}),
        (PPO, False, {"actor": False, "critic": True}),
        (PPO, True, {"actor": False}),
    ],
)
def test_roles_of_an_algorithm(tiny_model, algorithm, only_evaluates, heads):
    config, shape = MegatronConfig(pipeline_model_parallel_size=2, critic_lr=1e-5, bf16=True), tiny_model("qwen3").shape
    how = {"world_size": 4, "on_gpu": False, "only_evaluates": only_evaluates}
    roles = trained_roles(config, algorithm, shape, {}, **how)
    assert {name: role.value_head for name, role in roles.items()} == heads
    for role in roles.values():
        given = {"value_head": role.value_head, "on_gpu": False, "only_evaluates": only_evaluates}
        assert role.stages() == stages_memory(shape, role.config, 4, **given)
    assert roles["actor"].activations(0, tokens=64, micro_batches=2).total > 0


def test_a_role_has_its_own_settings(tiny_model):
    how = {"world_size": 1, "on_gpu": False, "only_evaluates": False}
    overrides = {"critic": {"lr": 0.5}}
    roles = trained_roles(MegatronConfig(lr=0.1), PPO, tiny_model("qwen3").shape, overrides, **how)
    assert (roles["actor"].config.lr, roles["critic"].config.lr) == (0.1, 0.5)
