import dataclasses
import math

import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, SlimeError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"advantage_estimator": "grop"}, "--advantage-estimator grop is unknown; allowed: grpo"),
        ({"kl_loss_type": "k9"}, "--kl-loss-type k9 is unknown; allowed: k1, k2, k3, low_var_kl"),
        ({"eps_clip": -0.1}, "--eps-clip -0.1 must be a finite number, 0 or more"),
        ({"eps_clip_high": -1.0}, "--eps-clip-high -1.0 must be a finite number, 0 or more"),
        ({"kl_loss_coef": -1e-3}, "--kl-loss-coef -0.001 must be a finite number, 0 or more"),
        ({"kl_loss_coef": math.nan}, "--kl-loss-coef nan must be a finite number, 0 or more"),
        ({"eps_clip": math.inf}, "--eps-clip inf must be a finite number, 0 or more"),
        ({"entropy_coef": math.nan}, "--entropy-coef nan must be a finite number"),
    ],
)
def test_bad_values(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        AlgorithmConfig(**values)
    assert isinstance(caught.value, SlimeError)


def test_derived_values_and_immutability():
    assert AlgorithmConfig(eps_clip=0.1).clip_high == 0.1
    assert AlgorithmConfig(eps_clip=0.1, eps_clip_high=0.28).clip_high == 0.28
    assert AlgorithmConfig(use_kl_loss=True).needs_reference
    assert not AlgorithmConfig().needs_reference
    with pytest.raises(dataclasses.FrozenInstanceError):
        AlgorithmConfig().eps_clip = 0.3
