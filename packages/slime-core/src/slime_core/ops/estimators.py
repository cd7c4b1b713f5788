"""Advantage estimators behind one call signature, so that one's own takes the place of a built-in one.

T tokens of N responses. There is no registry: an estimator is a value, and whoever computes advantages is handed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.config import ESTIMATORS
from slime_core.errors import ConfigError, DataError
from slime_core.ops.advantages import distilled_advantages, outcome_advantages
from slime_core.ops.gae import gae_advantages
from slime_core.ops.ragged import lengths_tensor
from slime_core.ops.returns import check_factor, check_rewards, discounted_returns, token_rewards
from slime_core.ops.scan import check_finite, check_tokens
from slime_core.ops.whitening import whiten


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantageInputs:
    """What an estimator sees: whole responses, one after the other. Checked when it is built.

    Attributes:
        rewards_N: One reward per response, after :func:`slime_core.rewards.estimator_rewards` [N].
        mask_T: 1 where a token is trained on, else 0 [T]. In the other tensors, what is masked may be anything, NaN
            too.
        lengths_N: Tokens of each response, integers that add up to T [N]; 0 is allowed.
        kl_T: Estimates of KL(policy ‖ reference), nats [T]. ``None`` without a reference.
        kl_coef: Coefficient of the KL penalty in the reward.
        values_T: The critic's values from before its update [T]. ``None`` without a critic.

    Raises:
        DataError: The shapes do not fit, or a reward is not finite.
    """

    rewards_N: Tensor
    mask_T: Tensor
    lengths_N: Tensor
    kl_T: Tensor | None = None
    kl_coef: float = 0.0
    values_T: Tensor | None = None

    def __post_init__(self) -> None:
        per_token = {"mask_T": self.mask_T, "kl_T": self.kl_T, "values_T": self.values_T}
        check_tokens(len(self.mask_T), **{name: tensor for name, tensor in per_token.items() if tensor is not None})
        check_rewards(self.rewards_N, lengths_tensor(self.lengths_N, len(self.mask_T)))


class Advantages(NamedTuple):
    """What an estimator gives.

    Attributes:
        advantages_T: What the policy's loss multiplies each token by [T].
        returns_T: What a critic's value is fitted to [T]; without a critic, the advantages again.
    """

    advantages_T: Tensor
    returns_T: Tensor


class AdvantageEstimator(Protocol):
    """A function, or an object with a ``__call__``, from inputs to advantages. The contract:

    - Both results are floating-point [T], on the inputs' device, and finite where the mask is 1. Elsewhere they may be
      anything: :func:`compute_advantages` puts 0 there.
    - A response's result depends on that response alone, and on its reward, which its group has already entered. So it
      makes no difference which responses a rank holds; a rank may hold none (N = 0), or masked ones only.
    - ``kl_coef`` is honoured, or refused where it is not 0. :func:`slime_core.ops.token_rewards` does it.
    - The inputs are not changed, no gradient is attached, and nothing is communicated.
    """

    def __call__(self, inputs: AdvantageInputs, /) -> Advantages:
        """Advantages and returns of these responses."""
        ...


def outcome(inputs: AdvantageInputs, /) -> Advantages:
    """The estimator of grpo, gspo, cispo, rloo and reinforce_plus_plus_baseline: :func:`outcome_advantages`."""
    advantages_T = outcome_advantages(
        rewards_N=inputs.rewards_N,
        mask_T=inputs.mask_T,
        lengths=inputs.lengths_N,
        kl_T=inputs.kl_T,
        kl_coef=inputs.kl_coef,
    )
    return Advantages(advantages_T, advantages_T)


@dataclass(frozen=True)
class Discounted:
    """The estimator of reinforce_plus_plus: :func:`token_rewards`, then :func:`discounted_returns`.

    Attributes:
        gamma: γ, 0 to 1.

    Raises:
        ConfigError: It is not.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_factor("gamma", self.gamma)

    def __call__(self, inputs: AdvantageInputs, /) -> Advantages:
        """Advantages, which are the returns.

        Raises:
            ConfigError: ``kl_coef`` is not finite, or not 0 with no ``kl_T``.
            DataError: A KL estimate is not finite where the mask is 1.
        """
        returns_T = discounted_returns(
            rewards_T=_token_rewards(inputs), mask_T=inputs.mask_T, lengths=inputs.lengths_N, gamma=self.gamma
        )
        return Advantages(returns_T, returns_T)


@dataclass(frozen=True)
class GeneralizedAdvantage:
    """The estimator of ppo: :func:`token_rewards`, then :func:`gae_advantages`.

    Attributes:
        gamma: γ, 0 to 1.
        lambd: λ, 0 to 1.

    Raises:
        ConfigError: One is not.
    """

    gamma: float = 1.0
    lambd: float = 1.0

    def __post_init__(self) -> None:
        check_factor("gamma", self.gamma)
        check_factor("lambd", self.lambd)

    def __call__(self, inputs: AdvantageInputs, /) -> Advantages:
        """Advantages and returns.

        Raises:
            ConfigError: ``kl_coef`` is not finite, or not 0 with no ``kl_T``.
            DataError: There are no values, or a number is not finite where the mask is 1.
        """
        if inputs.values_T is None:
            raise DataError("ppo needs the critic's values, values_T, and none were given")
        return Advantages(
            *gae_advantages(
                rewards_T=_token_rewards(inputs),
                values_T=inputs.values_T,
                mask_T=inputs.mask_T,
                lengths=inputs.lengths_N,
                gamma=self.gamma,
                lambd=self.lambd,
            )
        )


def estimator_named(name: str, *, gamma: float = 1.0, lambd: float = 1.0) -> AdvantageEstimator:
    """The built-in estimator of that name.

    Args:
        name: ``grpo``, ``gspo``, ``cispo``, ``ppo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline`` or
            ``rloo``.
        gamma: γ of ppo and reinforce_plus_plus; the others have none.
        lambd: λ of ppo.

    Raises:
        ConfigError: There is none of that name, or γ or λ is not between 0 and 1.
    """
    match name:
        case "ppo":
            return GeneralizedAdvantage(gamma, lambd)
        case "reinforce_plus_plus":
            return Discounted(gamma)
        case _ if name in ESTIMATORS:
            return outcome
        case _:
            raise ConfigError(f"--advantage-estimator {name} is unknown; allowed: {', '.join(ESTIMATORS)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Distillation:
    """What on-policy distillation adds to the advantages: see :func:`distilled_advantages`.

    Attributes:
        student_log_probs_T: Log-probs (nats) under the policy from before the update [T].
        teacher_log_probs_T: Those under the teacher [T].
        coef: Weight of the term.
    """

    student_log_probs_T: Tensor
    teacher_log_probs_T: Tensor
    coef: float


@torch.no_grad()
def compute_advantages(
    inputs: AdvantageInputs,
    estimator: AdvantageEstimator,
    *,
    distillation: Distillation | None = None,
    whitened: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Advantages:
    """Estimate, then add distillation, then whiten.

    Args:
        inputs: This rank's responses of the rollout.
        estimator: A built-in one (:func:`estimator_named`) or one's own.
        distillation: Added to the advantages; not to the returns.
        whitened: Whiten the advantages over all trained tokens. REINFORCE++ and its baseline variant are defined with
            it. Then every rank of ``group`` must call this, with no responses too.
        group: The ranks to whiten over: see :func:`slime_core.ops.whiten`.

    Returns:
        Advantages and returns, each [T], 0 where masked.

    Raises:
        ConfigError: A coefficient is not finite, or ``inputs.kl_coef`` is not 0 and there is no ``kl_T``.
        DataError: The estimator needs what the inputs lack, or broke its contract, in shape or by a number that is not
            finite; or a number of the distillation is not finite.
    """
    advantages_T, returns_T = estimator(inputs)
    advantages_T = _checked("advantages_T", advantages_T, inputs.mask_T)
    returns_T = _checked("returns_T", returns_T, inputs.mask_T)
    if distillation is not None:
        advantages_T = distilled_advantages(
            advantages_T=advantages_T,
            student_log_probs_T=distillation.student_log_probs_T,
            teacher_log_probs_T=distillation.teacher_log_probs_T,
            mask_T=inputs.mask_T,
            coef=distillation.coef,
        )
    if whitened:
        advantages_T = whiten(advantages_T, inputs.mask_T, group=group)
    return Advantages(advantages_T, returns_T)


def _token_rewards(inputs: AdvantageInputs) -> Tensor:
    return token_rewards(
        rewards_N=inputs.rewards_N,
        mask_T=inputs.mask_T,
        lengths=inputs.lengths_N,
        kl_T=inputs.kl_T,
        kl_coef=inputs.kl_coef,
    )


def _checked(name: str, values_T: Tensor, mask_T: Tensor) -> Tensor:
    check_tokens(len(mask_T), **{name: values_T})
    if not values_T.is_floating_point():
        raise DataError(f"{name} has type {values_T.dtype}; an estimator gives floating-point numbers")
    values_T = values_T.masked_fill(mask_T == 0, 0)
    check_finite(name, values_T)
    return values_T
