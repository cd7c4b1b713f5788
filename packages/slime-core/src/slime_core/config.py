"""The algorithm's settings, checked when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_core.errors import ConfigError
from slime_core.flags import flag

ADVANTAGE_ESTIMATORS = ("grpo",)
KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a loss.

    Raises:
        ConfigError: A value is outside its range, with the value, the range and what to do.
    """

    advantage_estimator: str = flag("grpo", choices=ADVANTAGE_ESTIMATORS, help="how rewards become advantages")
    disable_rewards_normalization: bool = flag(False, help="leave out subtracting the group's mean reward")
    disable_grpo_std_normalization: bool = flag(
        False, help="leave out dividing by the group's standard deviation of rewards (Dr.GRPO)"
    )
    eps_clip: float = flag(
        0.2, help="lower clip range of the policy ratio; the upper one too unless --eps-clip-high is given"
    )
    eps_clip_high: float | None = flag(None, help="upper clip range of the policy ratio (DAPO's clip-higher)")
    entropy_coef: float = flag(0.0, help="coefficient of the entropy bonus in the loss")
    use_kl_loss: bool = flag(False, help="add the KL divergence to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, help="coefficient of the KL loss")
    kl_loss_type: str = flag("k1", choices=KL_LOSS_TYPES, help="estimator of the KL divergence")
    calculate_per_token_loss: bool = flag(
        False, help="average the loss over all tokens of the step instead of over samples"
    )

    def __post_init__(self) -> None:
        if self.advantage_estimator not in ADVANTAGE_ESTIMATORS:
            raise ConfigError(
                f"--advantage-estimator {self.advantage_estimator} is unknown; "
                f"allowed: {', '.join(ADVANTAGE_ESTIMATORS)}"
            )
        if self.kl_loss_type not in KL_LOSS_TYPES:
            raise ConfigError(f"--kl-loss-type {self.kl_loss_type} is unknown; allowed: {', '.join(KL_LOSS_TYPES)}")
        for name in ("eps_clip", "eps_clip_high", "kl_loss_coef"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be a finite number, 0 or more")
        if not math.isfinite(self.entropy_coef):
            raise ConfigError(f"--entropy-coef {self.entropy_coef} must be a finite number")

    @property
    def clip_high(self) -> float:
        """The upper clip range: ``eps_clip_high``, or ``eps_clip`` when that is not given."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probs enter the loss."""
        return self.use_kl_loss
