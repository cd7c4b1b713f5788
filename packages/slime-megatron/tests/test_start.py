import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.ops import estimator_named
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.start import check_algorithm

ESTIMATOR = "slime_core.ops.advantages.outcome"


def test_what_the_trainer_can_run():
    assert check_algorithm(AlgorithmConfig(advantage_estimator="ppo"), MegatronConfig(critic_lr=1e-5)) is None
    assert check_algorithm(AlgorithmConfig(advantage_estimator="gspo")) is None
    config = AlgorithmConfig(advantage_estimator="ppo", custom_advantage_function_path=ESTIMATOR)
    assert check_algorithm(config) is estimator_named("grpo")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"custom_advantage_function_path": "none.here"}, "--custom-advantage-function-path none.here: none does not"),
        (
            {"custom_advantage_function_path": "slime_core.ops.whiten"},
            r"it is called with 1 argument, \(inputs\)",
        ),
    ],
)
def test_what_it_cannot(values, message):
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig(**values))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"critic_lr": 1e-5},
            "--critic-lr 1e-05 has no effect with --advantage-estimator grpo; give --advantage-estimator ppo",
        ),
        ({"num_critic_only_steps": 2}, "--num-critic-only-steps 2 has no effect with --advantage-estimator grpo"),
        ({"opd_teacher_load": "big"}, "--opd-teacher-load big has no effect without --use-opd; give --use-opd"),
        ({"opd_teacher_ckpt_step": 3}, "--opd-teacher-ckpt-step 3 has no effect without --opd-teacher-load; give"),
    ],
)
def test_settings_of_a_role_that_is_not_needed(settings, message):
    with pytest.raises(ConfigError, match=message):
        check_algorithm(AlgorithmConfig(), MegatronConfig(**settings))


def test_a_reward_model_has_more_to_train_than_adapters():
    with pytest.raises(ConfigError, match="--lora-rank trains adapters alone, and --loss-type rm_loss a new head, too"):
        check_algorithm(AlgorithmConfig(loss_type="rm_loss"), MegatronConfig(lora_rank=4, lora_alpha=8))
    with pytest.raises(ConfigError, match="--lora-rank trains adapters alone, and --loss-type rm_loss a new head, too"):
        check_algorithm(AlgorithmConfig(loss_type="rm_loss"), MegatronConfig(), {"actor": {"lora_rank": 4}})
    critic = {"critic": {"lora_rank": 4}}
    with pytest.raises(ConfigError, match="role critic: lora_rank trains adapters alone, and a critic has a new head"):
        check_algorithm(AlgorithmConfig(advantage_estimator="ppo"), MegatronConfig(), critic)
    check_algorithm(AlgorithmConfig(advantage_estimator="ppo"), MegatronConfig(), critic, only_evaluates=True)
