"""The settings of a role, and who is told what about them."""

import pytest

from slime_core.errors import ConfigError
from slime_core.flags import collected_problems
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.overrides import role_config

BAD = {
    "precision": {"bf16": True, "fp32": True},
    "a value": {"lr": -1.0},
    "rates": {"min_lr": 1.0, "lr_decay_style": "linear", "lr_decay_iters": 10},
}


@pytest.mark.parametrize("values", BAD.values(), ids=BAD)
def test_what_is_wrong_with_the_flags_is_not_said_again_for_a_role(values):
    with collected_problems() as problems:
        config = MegatronConfig(**values)
        assert len(problems) == 1
    assert role_config(config, "actor", {}).lr == config.lr
    assert role_config(config, "actor", {"actor": {"seed": 3}}).seed == 3


@pytest.mark.parametrize(
    ("flags", "overrides", "message"),
    [
        (
            {"critic_lr": 1e-7, "min_lr": 1e-6, "lr_decay_style": "linear", "lr_decay_iters": 10},
            {},
            "critic: --min-lr 1e-06 is above --lr 1e-07; give at most 1e-07",
        ),
        ({}, {"critic": {"lr": -1.0}}, "overrides of the role critic: --lr -1.0 must be 0 or more"),
    ],
)
def test_what_is_wrong_with_a_role_alone_is_said_of_the_role(flags, overrides, message):
    with pytest.raises(ConfigError) as caught:
        role_config(MegatronConfig(lr=1e-6, **flags), "critic", overrides)
    assert str(caught.value) == message


def test_what_an_override_mends_is_no_problem_of_the_role():
    with collected_problems():
        config = MegatronConfig(lr=1e-6, min_lr=1e-5)
    assert role_config(config, "actor", {"actor": {"min_lr": 0.0}}).min_lr == 0.0
