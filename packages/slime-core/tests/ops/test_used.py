import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.ops.losses import Batch
from slime_core.ops.used import check_settings, check_used


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        (
            {},
            {"ref_log_probs"},
            "ref_log_probs has no effect in this loss; algorithm_loss uses it with --use-kl-loss",
        ),
        ({}, {"rewards", "advantages"}, "rewards has no effect with --advantages, which was given too"),
        ({}, {"rewards", "values"}, "values has no effect in this loss; algorithm_loss uses it with"),
        ({"use_kl_loss": True}, {"ref_log_probs", "rewards", "group_ids"}, None),
        ({}, {"rewards", "values", "estimator"}, None),
        ({}, {"entropy", "num_tokens", "lengths"}, None),
    ],
)
def test_an_argument_that_nothing_uses_is_refused(settings, given, message):
    assert given <= Batch.__annotations__.keys()
    config, batch = AlgorithmConfig(**settings), dict.fromkeys(given, 1.0)
    if message is None:
        return check_used(config, batch)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_used(config, batch)


def test_a_setting_without_its_argument_is_refused():
    check_settings("ppo_loss", {"gamma": 0.9, "rewards": [1.0]})
    check_settings("ppo_loss", {"gamma": 0.0})
    with pytest.raises(ConfigError, match=r"gamma 0\.9 has no effect in ppo_loss without rewards; give rewards, or"):
        check_settings("ppo_loss", {"gamma": 0.9})
