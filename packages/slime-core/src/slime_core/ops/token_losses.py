"""Losses and KL estimates per token, before aggregation: what the losses of a step are built from. T tokens.

In all of them log-probs are in nats, those of other policies and the advantages are constants, and where ``mask_T`` is
0 the result is 0 without gradient whatever the inputs hold, NaN too. Ratios follow their tangent above exp(20), so that
neither a value nor a gradient overflows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError
from slime_core.ops.tokens import (
    LIMIT,
    Lengths,
    bounded_exp,
    bounded_expm1_minus,
    check_shapes,
    expand,
    masked,
    sequence_lengths,
    sequence_mean,
    widen,
)

_LOW_VAR_BOUND = 10.0


def policy_token_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    *,
    eps_clip_c: float | None = None,
    mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, as a loss: ``max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A)`` with ρ = π/π_old.

    Schulman et al. 2017, equation 7, with the sign turned; separate bounds as in DAPO (Yu et al. 2025, equation 8).
    With ``eps_clip_c`` c, a token of negative advantage loses no more than −cA: ``min(max(…), −cA)`` (dual clip; Ye et
    al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning").

    Args:
        log_probs_T: Log-probs under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that ρ compares with [T].
        advantages_T: Advantages [T].
        eps_clip: ε, how far below 1 the ratio may count.
        eps_clip_high: ε_high, how far above 1.
        eps_clip_c: c, above 1; ``None`` for no dual clip.
        mask_T: 0 where a token does not count [T]; ``None`` if all count.

    Returns:
        The loss [T], and a bool [T]: whether a clip decides it, so that the token has no gradient.

    Raises:
        ConfigError: ``eps_clip_c`` is not above 1.
        DataError: The shapes differ.
    """
    new_T, old_T, advantages_T = masked(
        mask_T, log_probs_T=log_probs_T, old_log_probs_T=old_log_probs_T, advantages_T=advantages_T
    )
    loss_T, clipped_T = clipped_surrogate(new_T - old_T.detach(), advantages_T, eps_clip, eps_clip_high, eps_clip_c)
    return loss_T, clipped_T != 0


def gspo_token_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    *,
    mask_T: Tensor,
    lengths: Lengths,
    token_form: bool = False,
    eps_clip_c: float | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO: :func:`policy_token_loss` with one ratio per sequence, :func:`gspo_log_ratio` (Zheng et al. 2025, eq. 5).

    Summed under per-sample token weights it is the paper's objective. The ratio stays near 1, so the bounds are narrow:
    the paper takes ε = 3e-4 and ε_high = 4e-4.
    """
    _, clean_T = masked(mask_T, log_probs_T=log_probs_T, advantages_T=advantages_T)
    log_ratio_T = gspo_log_ratio(
        log_probs_T, old_log_probs_T, mask_T=mask_T, lengths=lengths, token_form=token_form, context_group=context_group
    )
    loss_T, clipped_T = clipped_surrogate(log_ratio_T, clean_T, eps_clip, eps_clip_high, eps_clip_c)
    return loss_T, clipped_T != 0


def cispo_token_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    *,
    mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """CISPO: ``−sg[clip(ρ, 1 − ε, 1 + ε_high)] A log π``: the weight is clipped, and every token keeps its gradient.

    MiniMax 2025 (MiniMax-M1), equations 4 and 5; sg: no gradient. The paper has no lower bound, which is ε of 1 or
    more, and tunes ε_high only. Returns the loss [T], and a bool [T]: whether the weight was clipped.
    """
    new_T, old_T, advantages_T = masked(
        mask_T, log_probs_T=log_probs_T, old_log_probs_T=old_log_probs_T, advantages_T=advantages_T
    )
    ratio_T = bounded_exp((new_T - old_T).detach())
    weight_T = ratio_T.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight_T * advantages_T.detach() * new_T, weight_T != ratio_T


def clipped_surrogate(
    log_ratio_X: Tensor, advantages_X: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    """The surrogate of any log-ratios, of tokens or sequences: the loss, and 1 where a clip decides it."""
    if eps_clip_c is not None and not 1 < eps_clip_c < math.inf:
        raise ConfigError(f"eps_clip_c {eps_clip_c} must be a finite number above 1; leave it out for no dual clip")
    bounds = (1 - eps_clip, 1 + eps_clip_high, eps_clip_c)
    return _Surrogate.apply(log_ratio_X, advantages_X.detach(), *bounds)  # type: ignore[no-untyped-call,no-any-return]


class _Surrogate(torch.autograd.Function):
    """The loss and its derivative at once: half the passes over memory that autograd would make."""

    @staticmethod
    def forward(
        ctx: Any, log_ratio_X: Tensor, advantages_X: Tensor, low: float, high: float, bound: float | None
    ) -> tuple[Tensor, Tensor]:
        slope_X = log_ratio_X.clamp(max=LIMIT).exp_()
        ratio_X = (log_ratio_X - LIMIT).relu_().mul_(math.exp(LIMIT)).add_(slope_X)
        costs_X = -advantages_X
        clipped_X = ratio_X.clamp(low, high).mul_(costs_X)
        unclipped_X = ratio_X.mul_(costs_X)
        decided_X = torch.gt(clipped_X, unclipped_X, out=torch.empty_like(unclipped_X))
        loss_X = torch.maximum(unclipped_X, clipped_X)
        if bound is not None:
            most_X = bound * costs_X
            dual_X = (costs_X > 0) & (loss_X > most_X)
            loss_X, decided_X = torch.where(dual_X, most_X, loss_X), torch.where(dual_X, 1, decided_X)
        ctx.save_for_backward(slope_X.mul_(costs_X).mul_(1 - decided_X))
        ctx.mark_non_differentiable(decided_X)
        return loss_X, decided_X

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (derivative_X,) = ctx.saved_tensors
        return grad_X * derivative_X, None, None, None, None


def gspo_log_ratio(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    *,
    mask_T: Tensor,
    lengths: Lengths,
    token_form: bool = False,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The log of GSPO's ratio at every token [T], masked ones too: one value per sequence, with one of two gradients.

    - Sequence form: log s, the mean over the sequence's unmasked tokens of log π − log π_old: s is the ratio of the
      likelihoods with its length-th root taken. The gradient goes to all of these tokens, 1/|y| to each (Zheng et al.
      2025, equations 5 and 7). 0 for a sequence without an unmasked token.
    - Token form: ``sg[log s] + log π − sg[log π]`` (sg: no gradient), whose gradient goes to the token itself
      (GSPO-token, equation 14).

    Under weights and advantages that are equal over a sequence's unmasked tokens the two give the same loss and the
    same gradient. Where advantages differ from token to token, the token form lets each token learn from its own.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that s compares with [T].
        mask_T: 1 where a token counts, else 0; or token weights that are equal within a sequence where not 0 [T].
        lengths: Tokens of each sequence, N numbers that add up to T, or one that all have.
        token_form: Which of the two.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Raises:
        DataError: The shapes or the lengths do not match.
    """
    new_T, old_T = log_probs_T, old_log_probs_T.detach()
    check_shapes(log_probs_T=new_T, old_log_probs_T=old_T, mask_T=mask_T)
    lengths_N = sequence_lengths(lengths, new_T)
    log_ratio_T = expand(sequence_mean(widen(new_T) - widen(old_T), mask_T, lengths_N, context_group), lengths_N)
    if not token_form:
        return log_ratio_T
    (new_T,) = masked(mask_T, log_probs_T=new_T)
    return log_ratio_T.detach() + (new_T - new_T.detach())


def kl_penalty(
    log_probs_T: Tensor,
    ref_log_probs_T: Tensor,
    kind: str,
    *,
    old_log_probs_T: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference) [T], for tokens that the policy sampled (Schulman 2020).

    With d = log π − log π_ref: ``k1`` = d (unbiased, may be negative), ``k2`` = d²/2, ``k3`` = exp(−d) − 1 + d
    (unbiased, never negative), ``low_var_kl`` = k3 cut to [−10, 10], with no gradient where it is cut.

    As a loss, plain k1 and k3 do not have the divergence's gradient as their mean, even on-policy: they leave out that
    the tokens' own probability changes (k1's mean gradient is 0; k2's is the divergence's). With ``old_log_probs_T``
    the estimate is multiplied by ρ = π/π_old, with ρ's gradient, and before ``low_var_kl`` cuts: over tokens that π_old
    sampled, ρ·k1 and ρ·k3 have the divergence as their mean and its gradient as the mean of theirs (DeepSeek-V3.2,
    2025, equation 7, for k3). Above exp(20) ρ is held constant, because a product of two tangents would overflow.

    Raises:
        ConfigError: ``kind`` is none of the four.
        DataError: The shapes differ.
    """
    given = {"log_probs_T": log_probs_T, "ref_log_probs_T": ref_log_probs_T.detach()}
    if old_log_probs_T is not None:
        given["old_log_probs_T"] = old_log_probs_T.detach()
    values_T = masked(mask_T, **given)
    difference_T = values_T[0] - values_T[1]
    match kind:
        case "k1":
            estimate_T = difference_T
        case "k2":
            estimate_T = difference_T.square() / 2
        case "k3" | "low_var_kl":
            estimate_T = bounded_expm1_minus(-difference_T)
        case _:
            raise ConfigError(f"the KL estimator {kind} is unknown; allowed: {', '.join(KL_LOSS_TYPES)}")
    if old_log_probs_T is not None:
        estimate_T = estimate_T * (values_T[0] - values_T[2]).clamp(max=LIMIT).exp()
    return estimate_T.clamp(-_LOW_VAR_BOUND, _LOW_VAR_BOUND) if kind == "low_var_kl" else estimate_T


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, value_clip: float | None, *, mask_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic's values, clipped: ``max((V − G)², (V_old + clip(V − V_old, −c, c) − G)²)``.

    A value that has moved more than c towards the return gains nothing by moving further. Without a factor ½.
    Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients" (value function clipping).

    Args:
        values_T: Values under the critic being trained [T], in units of reward.
        old_values_T: Values from before the update [T].
        returns_T: Returns G [T].
        value_clip: c, 0 or more; ``None`` for no clipping.
        mask_T: 0 where a token does not count [T].

    Returns:
        The loss [T], and a bool [T]: whether the clipped side is the larger one, so that the token has no gradient.

    Raises:
        ConfigError: ``value_clip`` is negative or not finite.
        DataError: The shapes differ.
    """
    if value_clip is not None and not 0 <= value_clip < math.inf:
        raise ConfigError(f"value_clip {value_clip} must be a finite number, 0 or more")
    values_T, old_T, returns_T = masked(mask_T, values_T=values_T, old_values_T=old_values_T, returns_T=returns_T)
    old_T, returns_T = old_T.detach(), returns_T.detach()
    unclipped_T = (values_T - returns_T).square()
    if value_clip is None:
        return unclipped_T, torch.zeros_like(unclipped_T, dtype=torch.bool)
    moved_T = values_T - old_T
    # Not `old + (V − old)` where V is near: it is not quite V, and would look clipped.
    far_T = old_T + moved_T.clamp(-value_clip, value_clip)
    near_T = torch.where(moved_T.abs() > value_clip, far_T, values_T)
    clipped_T = (near_T - returns_T).square()
    return torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).detach()
