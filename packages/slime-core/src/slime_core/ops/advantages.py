"""From rewards to one advantage per response token: the built-in estimators, custom ones, distillation and whitening.

T tokens of N responses, whole and one after the other; W ranks. Estimators need no registry: an estimator is a
value that is passed to :func:`policy_advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.algorithms import estimator_row
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops.returns import (
    check_factor,
    check_finite,
    check_rewards,
    check_tokens,
    discounted_returns,
    gae_advantages,
    kl_penalties,
    token_rewards,
)
from slime_core.ops.token_losses import kl_penalty
from slime_core.ops.tokens import expand, lengths_tensor, needed


@dataclass(frozen=True, kw_only=True, eq=False)
class AdvantageInputs:
    """Inputs of an estimator: whole responses, one after the other. Checked when it is built.

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
    """The result of an estimator.

    Attributes:
        advantages_T: What the policy's loss multiplies each token by [T].
        returns_T: What a critic's value is fitted to [T]; without a critic, the advantages again.
    """

    advantages_T: Tensor
    returns_T: Tensor


class AdvantageEstimator(Protocol):
    """A function, or an object with a ``__call__``, from inputs to advantages. The contract:

    - Both results are floating-point [T], on the inputs' device, and finite where the mask is 1. Elsewhere they may be
      anything: :func:`policy_advantages` puts 0 there.
    - A response's result depends on that response alone, and on its reward, which its group has already entered. So it
      makes no difference which responses a rank holds; a rank may hold none (N = 0), or masked ones only.
    - ``kl_coef`` is honoured, or refused where it is not 0. :func:`slime_core.ops.token_rewards` does it.
    - The inputs are not changed, no gradient is attached, and nothing is communicated.
    """

    def __call__(self, inputs: AdvantageInputs, /) -> Advantages:
        """Advantages and returns of these responses."""


def estimator_named(name: str, *, gamma: float = 1.0, lambd: float = 1.0) -> AdvantageEstimator:
    """The built-in estimator of that name: one of :data:`slime_core.config.ESTIMATORS`.

    Args:
        name: ``ppo`` is :func:`gae_advantages` of :func:`token_rewards`, ``reinforce_plus_plus``
            :func:`discounted_returns` of them; the others are :func:`outcome_advantages`.
        gamma: γ of ppo and reinforce_plus_plus; the others have none.
        lambd: λ of ppo.

    Raises:
        ConfigError: There is none of that name, or γ or λ is not between 0 and 1.
    """
    check_factor("gamma", gamma)
    check_factor("lambd", lambd)
    row, given = estimator_row(name), {"gamma": gamma, "lambd": lambd}
    estimate, settings = ESTIMATES[row.estimate], {setting: given[setting] for setting in row.settings}
    return partial(estimate, **settings) if settings else estimate


def outcome(inputs: AdvantageInputs, /) -> Advantages:
    """The reward at every token: :func:`outcome_advantages`."""
    advantages_T = outcome_advantages(
        rewards_N=inputs.rewards_N,
        mask_T=inputs.mask_T,
        lengths=inputs.lengths_N,
        kl_T=inputs.kl_T,
        kl_coef=inputs.kl_coef,
    )
    return Advantages(advantages_T, advantages_T)


def returns(inputs: AdvantageInputs, /, *, gamma: float) -> Advantages:
    """:func:`discounted_returns` of :func:`token_rewards`."""
    returns_T = discounted_returns(gamma=gamma, **_by_token(inputs))
    return Advantages(returns_T, returns_T)


def gae(inputs: AdvantageInputs, /, *, gamma: float, lambd: float) -> Advantages:
    """:func:`gae_advantages` of :func:`token_rewards` and a critic's values."""
    by_token = _by_token(inputs)
    if inputs.values_T is None:
        raise DataError("ppo needs the critic's values, values_T, and none were given")
    return Advantages(*gae_advantages(values_T=inputs.values_T, gamma=gamma, lambd=lambd, **by_token))


ESTIMATES: Mapping[str, Callable[..., Advantages]] = {"outcome": outcome, "returns": returns, "gae": gae}
"""The functions that :class:`slime_core.algorithms.EstimatorType` names; each takes the settings of its row."""


def _by_token(inputs: AdvantageInputs) -> _Rewards:
    """The rewards of each token, and which tokens are whose."""
    mask_T, lengths_N = inputs.mask_T, inputs.lengths_N
    rewards_T = token_rewards(
        rewards_N=inputs.rewards_N, mask_T=mask_T, lengths=lengths_N, kl_T=inputs.kl_T, kl_coef=inputs.kl_coef
    )
    return {"rewards_T": rewards_T, "mask_T": mask_T, "lengths": lengths_N}


@torch.no_grad()
def policy_advantages(
    config: AlgorithmConfig,
    *,
    rewards_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    old_log_probs_T: Tensor | None = None,
    ref_log_probs_T: Tensor | None = None,
    teacher_log_probs_T: Tensor | None = None,
    values_T: Tensor | None = None,
    estimator: AdvantageEstimator | None = None,
    group: dist.ProcessGroup | None = None,
) -> Advantages:
    """Advantages and returns of a rank's responses: the estimator's, then distillation is added, then whitened.

    Args:
        config: The estimator and its factors, the KL penalty, distillation, whitening.
        rewards_N: From :func:`slime_core.rewards.estimator_rewards` [N].
        mask_T: 1 where a token is trained on, else 0 [T]; elsewhere the other tensors may hold anything, NaN too.
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed.
        old_log_probs_T: Log-probs (nats) from before the update [T]; needed with ``kl_coef`` and ``use_opd``.
        ref_log_probs_T: Log-probs under the reference [T]; needed with ``kl_coef``.
        teacher_log_probs_T: Log-probs under the teacher [T]; needed with ``use_opd``.
        values_T: The critic's values [T]; needed by ppo.
        estimator: In place of the one that the configuration names: a custom one, or of :func:`estimator_named`.
        group: Ranks to whiten over; every one must call this, also one without responses; see :func:`whiten`.

    Returns:
        Advantages and returns, each [T], 0 where masked.

    Raises:
        ConfigError: The configuration needs an input that is missing.
        DataError: The shapes do not fit, a number that counts is not finite, the estimator needs what is missing, or it
            broke its contract.
    """
    kl_T = None
    if config.kl_coef:
        old_T = needed(old_log_probs_T, "--kl-coef", "the log-probs from before the update")
        ref_T = needed(ref_log_probs_T, "--kl-coef", "the reference's log-probs")
        kl_T = kl_penalty(old_T.detach(), ref_T.detach(), config.kl_loss_type or "k1")
    inputs = AdvantageInputs(
        rewards_N=rewards_N,
        mask_T=mask_T,
        lengths_N=lengths_tensor(lengths, len(mask_T), mask_T.device),
        kl_T=kl_T,
        kl_coef=config.kl_coef,
        values_T=values_T,
    )
    estimator = estimator or estimator_named(config.advantage_estimator, gamma=config.gamma, lambd=config.lambd)
    advantages_T, returns_T = estimator(inputs)
    advantages_T = _checked("advantages_T", advantages_T, mask_T)
    returns_T = _checked("returns_T", returns_T, mask_T)
    if config.use_opd:
        advantages_T = distilled_advantages(
            advantages_T=advantages_T,
            student_log_probs_T=needed(old_log_probs_T, "--use-opd", "the log-probs from before the update"),
            teacher_log_probs_T=needed(teacher_log_probs_T, "--use-opd", "the teacher's log-probs"),
            mask_T=mask_T,
            coef=config.opd_kl_coef,
        )
    if config.normalize_advantages:
        advantages_T = whiten(advantages_T, mask_T, group=group)
    return Advantages(advantages_T, returns_T)


@torch.no_grad()
def outcome_advantages(
    *,
    rewards_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """``A_t = r − kl_coef · KL_t``: the response's reward at each of its tokens, less the token's own KL penalty.

    Advantages of grpo (Shao et al. 2024, section 4.1.2), gspo (Zheng et al. 2025, equation 6), cispo (MiniMax 2025,
    equation 2), rloo (Ahmadian et al. 2024, section 2.3) and reinforce_plus_plus_baseline (Hu et al. 2025, version 9,
    equation 6). They differ in how r comes from the rewards of a group: see
    :func:`slime_core.rewards.estimator_rewards`. The penalty stays at its token and counts in units of the normalised
    reward; none of these papers has it there. They put the KL divergence into the loss or leave it out, except RLOO,
    which takes it off the reward of the whole response.

    Args, types and errors are those of :func:`token_rewards`.
    """
    check_tokens(len(mask_T), mask_T=mask_T)
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    check_rewards(rewards_N, lengths_N)
    outcome_T = expand(rewards_N.detach().double(), lengths_N).masked_fill_(mask_T == 0, 0)
    outcome_T += kl_penalties(mask_T, kl_T, kl_coef)
    return outcome_T.to(torch.promote_types(rewards_N.dtype, torch.float32))


@torch.no_grad()
def distilled_advantages(
    *, advantages_T: Tensor, student_log_probs_T: Tensor, teacher_log_probs_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """``A_t − coef · (log π_student − log π_teacher)``: on-policy distillation, added to any advantages.

    The added term is the negative reverse KL per token as a reward (on-policy distillation of Agarwal et al. 2024;
    Lu and Thinking Machines Lab 2025). With advantages of 0 it is distillation alone. Add it before whitening.

    Args:
        advantages_T: From any estimator [T].
        student_log_probs_T: Log-probs (nats) of the sampled tokens under the policy from before the update [T].
        teacher_log_probs_T: Those under the teacher [T].
        mask_T: 1 where a token is trained on, else 0, where the others may be anything, NaN too [T].
        coef: Weight of the term.

    Returns:
        Advantages [T], 0 where masked, without gradient; in their type or, below that, float32.

    Raises:
        ConfigError: ``coef`` is not finite.
        DataError: The shapes differ, or a number is not finite where the mask is 1.
    """
    if not math.isfinite(coef):
        raise ConfigError(f"the coefficient of on-policy distillation, {coef}, must be a finite number")
    given_T = {"student_log_probs_T": student_log_probs_T, "teacher_log_probs_T": teacher_log_probs_T}
    check_tokens(len(mask_T), mask_T=mask_T, advantages_T=advantages_T, **given_T)
    masked_T = mask_T == 0
    divergence_T = (student_log_probs_T.double() - teacher_log_probs_T.double()).masked_fill(masked_T, 0)
    check_finite("student_log_probs_T - teacher_log_probs_T", divergence_T)
    result_T = advantages_T.detach().double().masked_fill(masked_T, 0)
    check_finite("advantages_T", result_T)
    return result_T.sub_(divergence_T, alpha=coef).to(torch.promote_types(advantages_T.dtype, torch.float32))


@torch.no_grad()
def whiten(values_T: Tensor, mask_T: Tensor, *, group: dist.ProcessGroup | None = None, eps: float = 1e-8) -> Tensor:
    """``(x − μ) / sqrt(σ² + eps)`` over the tokens with mask 1 of every rank in the group.

    μ is the mean over those tokens and σ² their variance with Bessel's correction (n − 1), 0 for a single token. Each
    rank's count, mean and sum of squared deviations are put together as in Chan et al. 1983 (pairwise update), so that
    neither a large mean nor the way tokens fall to ranks costs accuracy.

    One collective, in which **every rank of the group must take part**, with no tokens too. The group is the
    data-parallel ranks, times the context-parallel ones where those split the tokens; ranks that hold the same tokens
    (tensor and pipeline parallelism) belong to different groups. All tokens of a rollout go in at once.

    Args:
        values_T: Numbers to whiten, such as advantages [T]; T may be 0 and differ between ranks. What is masked may be
            anything, NaN too.
        mask_T: 1 where a token counts, else 0 [T].
        group: Ranks that share the statistics. ``None`` means this process alone.
        eps: Added to the variance, above 0: equal numbers have none.

    Returns:
        Whitened numbers [T], 0 where masked, without gradient; in the values' type or, below that, float32.

    Raises:
        ConfigError: ``eps`` is not a finite number above 0.
        DataError: The shapes differ; or a number that counts is not finite on some rank, and then on every rank, so
            that none waits for another.
    """
    if not 0 < eps < math.inf:
        raise ConfigError(f"eps {eps} must be a finite number above 0; 1e-8 is usual")
    check_tokens(len(mask_T), mask_T=mask_T, values_T=values_T)
    kept_T = mask_T != 0
    numbers_T = values_T.detach().double().masked_fill(~kept_T, 0)
    count = kept_T.sum().double()
    mean = numbers_T.sum() / count.clamp(min=1)
    squares = (numbers_T - mean).masked_fill_(~kept_T, 0).square_().sum()
    count_W, mean_W, squares_W = _gather(torch.stack([count, mean, squares]), group).unbind(1)
    total = count_W.sum()
    mean = (count_W * mean_W).sum() / total.clamp(min=1)
    variance = (squares_W + count_W * (mean_W - mean).square()).sum() / (total - 1).clamp(min=1)
    if not bool(variance.isfinite()):
        raise DataError(
            "numbers to whiten must be finite where the mask is 1, and their squares too; the sums of squared "
            f"deviations on the ranks of the group are {squares_W.tolist()}: mask such numbers or mend them"
        )
    whitened_T = (numbers_T - mean).mul_((variance + eps).rsqrt()).masked_fill_(~kept_T, 0)
    return whitened_T.to(torch.promote_types(values_T.dtype, torch.float32))


def _gather(numbers: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Each rank's numbers, one row per rank."""
    if group is None:
        return numbers.unsqueeze(0)
    rows = [torch.empty_like(numbers) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, numbers, group=group)
    return torch.stack(rows)


class _Rewards(TypedDict):
    rewards_T: Tensor
    mask_T: Tensor
    lengths: Tensor


def _checked(name: str, values_T: Tensor, mask_T: Tensor) -> Tensor:
    check_tokens(len(mask_T), **{name: values_T})
    if not values_T.is_floating_point():
        raise DataError(f"{name} has type {values_T.dtype}; an estimator gives floating-point numbers")
    values_T = values_T.masked_fill(mask_T == 0, 0)
    check_finite(name, values_T)
    return values_T
