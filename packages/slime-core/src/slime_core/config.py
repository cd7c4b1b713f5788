"""The algorithm's settings, checked when they are built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime_core.flags import flag
from slime_core.off_policy_config import OffPolicyConfig

ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")
"""The estimators by name. A user-defined one has no name but a function: see :mod:`slime_core.ops.estimators`."""

GROUP_RELATIVE = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo")
"""Those that give a group of one sample an advantage of 0."""

KL_LOSS_TYPES = ("k1", "k2", "k3", "low_var_kl")

_WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(OffPolicyConfig):
    """How rewards become a loss.

    Raises:
        ConfigError: A value is outside its range, or values contradict each other; with the values and what to do.
    """

    advantage_estimator: str = flag("grpo", choices=ESTIMATORS, help="how rewards become advantages")
    custom_advantage_function_path: str | None = flag(
        None, metavar="PATH", help="pkg.mod.fn or file.py:fn, from inputs to advantages, in place of the estimator's"
    )
    disable_rewards_normalization: bool = flag(False, help="leave out subtracting the group's mean reward")
    disable_grpo_std_normalization: bool = flag(
        False, help="leave out dividing by the group's standard deviation of rewards (Dr.GRPO)"
    )
    gamma: float = flag(1.0, help="discount of later rewards (ppo, reinforce_plus_plus)", least=0, most=1)
    lambd: float = flag(1.0, help="lambda of generalised advantage estimation (ppo)", least=0, most=1)
    normalize_advantages: bool = flag(
        False, help="whiten advantages over all trained tokens of a rollout; REINFORCE++ asks for it"
    )
    kl_coef: float = flag(0.0, help="coefficient of the KL penalty in the reward, for every estimator", least=0)
    use_opd: bool = flag(
        False, help="on-policy distillation: add the teacher's log-probs, which the samples carry, to the advantages"
    )
    opd_kl_coef: float = flag(1.0, help="weight of on-policy distillation", least=0)
    eps_clip: float = flag(
        0.2, help="lower clip range of the policy ratio; the upper one too unless --eps-clip-high is given", least=0
    )
    eps_clip_high: float | None = flag(None, help="upper clip range of the policy ratio (DAPO's clip-higher)", least=0)
    eps_clip_c: float | None = flag(
        None,
        help="most that a token of negative advantage loses, in units of it; above 1 (dual clip)",
        above=1,
        advice="3 is usual",
    )
    value_clip: float = flag(0.2, help="how far a critic's value may move from the old one (ppo)", least=0)
    entropy_coef: float = flag(0.0, help="coefficient of the entropy bonus in the loss")
    use_kl_loss: bool = flag(False, help="add the KL divergence to the reference model to the loss")
    kl_loss_coef: float = flag(0.0, help="coefficient of the KL loss", least=0)
    kl_loss_type: str | None = flag(
        None, choices=KL_LOSS_TYPES, help="estimator of the KL divergence; unset: k3 in the loss, k1 in the reward"
    )
    use_unbiased_kl: bool = flag(False, help="multiply the KL loss by the policy ratio, so that its gradient is right")
    calculate_per_token_loss: bool = flag(
        False, help="average the loss over all tokens of the step instead of over samples"
    )
    loss_divisor: float | None = flag(
        None,
        unit="tokens",
        help="divide each sample's summed loss by this instead of its length (Dr.GRPO)",
        above=0,
        advice="the largest response length is usual",
    )

    def contradictions(self) -> Iterator[str]:
        """Settings that need, repeat or undo each other."""
        yield from super().contradictions()
        if self.advantage_estimator in _WHITENED and not self.normalize_advantages:
            yield (
                f"--advantage-estimator {self.advantage_estimator} is defined with whitened advantages; "
                "set --normalize-advantages"
            )
        if self.kl_coef and self.use_kl_loss and self.kl_loss_coef:
            yield (
                f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} would count the KL divergence twice, "
                "in the reward and in the loss; leave one at 0"
            )
        if self.kl_loss_type == "k1" and self.use_kl_loss and self.kl_loss_coef and not self.use_unbiased_kl:
            yield (
                "--kl-loss-type k1 as a loss has a mean gradient of 0, and so holds the policy nowhere; give k3 or k2, "
                "or add --use-unbiased-kl"
            )
        if self.use_unbiased_kl and not self.use_kl_loss:
            yield "--use-unbiased-kl is a form of the KL loss; set --use-kl-loss"
        if self.calculate_per_token_loss and self.loss_divisor is not None:
            yield (
                f"--calculate-per-token-loss and --loss-divisor {self.loss_divisor} are two denominators of the loss; "
                "give one of them"
            )
        if self.eps_clip_c is not None and self.advantage_estimator == "cispo":
            yield (f"--eps-clip-c {self.eps_clip_c} bounds a clipped surrogate, which cispo has not; leave it out")

    @property
    def clip_high(self) -> float:
        """The upper clip range: ``eps_clip_high``, or ``eps_clip`` when that is not given."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    @property
    def notices(self) -> tuple[str, ...]:
        """What these settings do that a user may not expect, a line each."""
        if not self.use_kl_loss:
            return ()
        if not self.kl_loss_coef:
            return ("--use-kl-loss without --kl-loss-coef: the KL divergence is measured, and changes no weight",)
        if self.kl_loss_type is None:
            return ("--kl-loss-type is unset: k3; the upstream system's default, k1, has a mean gradient of 0",)
        return ()

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference model enter the loss or the advantages."""
        return self.use_kl_loss or self.kl_coef != 0

    @property
    def advantages_need_log_probs(self) -> bool:
        """Whether advantages depend on log-probs from before the update, and so come after a forward pass."""
        return self.kl_coef != 0 or self.use_opd
