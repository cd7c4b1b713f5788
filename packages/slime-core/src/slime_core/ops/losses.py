"""Policy losses per token, before aggregation. T tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.errors import ConfigError
from slime_core.ops.masking import masked
from slime_core.ops.numerics import bounded_exp
from slime_core.ops.sequence_ratio import gspo_log_ratio


def policy_loss(
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

    Schulman et al. 2017, equation 7, with the sign turned; separate bounds as in DAPO (Yu et al. 2025, equation 8). ρ
    follows its tangent above exp(20), so neither a value nor a gradient overflows. With ``eps_clip_c`` c, a token of
    negative advantage loses no more than −cA: ``min(max(…), −cA)`` (dual clip; Ye et al. 2020, "Mastering Complex
    Control in MOBA Games with Deep Reinforcement Learning").

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that ρ compares with [T]; taken as constants.
        advantages_T: Advantages [T]; taken as constants.
        eps_clip: ε, how far below 1 the ratio may count.
        eps_clip_high: ε_high, how far above 1.
        eps_clip_c: c, above 1; ``None`` for no dual clip.
        mask_T: 0 where a token does not count [T]: it has loss 0 and no gradient, and its inputs may be anything, NaN
            too. ``None`` means that all count.

    Returns:
        The loss [T], and a bool [T]: whether a clip decides it (the clipped side is the larger one, or the dual clip's
        bound the smaller one), so that the token has no gradient.

    Raises:
        ConfigError: ``eps_clip_c`` is not above 1.
        DataError: The shapes differ.
    """
    new_T, old_T, advantages_T = masked(
        mask_T, log_probs_T=log_probs_T, old_log_probs_T=old_log_probs_T, advantages_T=advantages_T
    )
    return _clipped_surrogate(new_T - old_T.detach(), advantages_T.detach(), eps_clip, eps_clip_high, eps_clip_c)


def gspo_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    *,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    token_form: bool = False,
    eps_clip_c: float | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """GSPO: the clipped surrogate of :func:`policy_loss` with one ratio per sequence (Zheng et al. 2025, equation 5).

    The ratio is s = exp(mean over the unmasked tokens of log π − log π_old), equation 7; with ``token_form`` it has the
    gradient of GSPO-token, equations 13 and 14 (:func:`slime_core.ops.gspo_log_ratio` tells them apart). Summed under
    per-sample token weights it is the paper's objective. s stays near 1, so the bounds are narrow: the paper takes
    ε = 3e-4 and ε_high = 4e-4.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that s compares with [T]; taken as constants.
        advantages_T: Advantages [T]; taken as constants.
        eps_clip: ε, how far below 1 the ratio may count.
        eps_clip_high: ε_high, how far above 1.
        mask_T: 0 where a token does not count [T]: it has loss 0 and no gradient, and its inputs may be anything, NaN
            too.
        lengths: Tokens of each sequence, N numbers that add up to T; 0 is allowed. A sequence must be here whole, or
            its other tokens on the ranks of ``context_group``.
        token_form: Whether a token's gradient comes from its own loss only.
        eps_clip_c: The dual clip's c, above 1; ``None`` for none.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Returns:
        The loss [T], and a bool [T]: whether a clip decides it, so that it brings no gradient.

    Raises:
        ConfigError: ``eps_clip_c`` is not above 1.
        DataError: The shapes or the lengths do not match.
    """
    _, advantages_T = masked(mask_T, log_probs_T=log_probs_T, advantages_T=advantages_T)
    log_ratio_T = gspo_log_ratio(
        log_probs_T, old_log_probs_T, mask_T=mask_T, lengths=lengths, token_form=token_form, context_group=context_group
    )
    return _clipped_surrogate(log_ratio_T, advantages_T.detach(), eps_clip, eps_clip_high, eps_clip_c)


def cispo_loss(
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
    more, and tunes ε_high only.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that ρ = π/π_old compares with [T].
        advantages_T: Advantages [T]; taken as constants.
        eps_clip: ε, how far below 1 the weight may be.
        eps_clip_high: ε_high, how far above 1.
        mask_T: 0 where a token does not count [T]: it has loss 0 and no gradient, and its inputs may be anything, NaN
            too. ``None`` means that all count.

    Returns:
        The loss [T], and a bool [T]: whether the weight was clipped.

    Raises:
        DataError: The shapes differ.
    """
    new_T, old_T, advantages_T = masked(
        mask_T, log_probs_T=log_probs_T, old_log_probs_T=old_log_probs_T, advantages_T=advantages_T
    )
    ratio_T = bounded_exp((new_T - old_T).detach())
    weight_T = ratio_T.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight_T * advantages_T.detach() * new_T, weight_T != ratio_T


def _clipped_surrogate(
    log_ratio_T: Tensor, advantages_T: Tensor, eps_clip: float, eps_clip_high: float, eps_clip_c: float | None
) -> tuple[Tensor, Tensor]:
    if eps_clip_c is not None and not 1 < eps_clip_c < math.inf:
        raise ConfigError(f"--eps-clip-c {eps_clip_c} must be a finite number above 1; leave it out for no dual clip")
    ratio_T = bounded_exp(log_ratio_T)
    unclipped_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages_T
    loss_T, decided_T = torch.maximum(unclipped_T, clipped_T), clipped_T > unclipped_T
    if eps_clip_c is not None:
        bound_T = -eps_clip_c * advantages_T
        bounded_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T, decided_T = torch.where(bounded_T, bound_T, loss_T), decided_T | bounded_T
    return loss_T, decided_T.detach()
