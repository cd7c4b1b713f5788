"""Policy losses per token, before aggregation. T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_core.ops.numerics import bounded_exp


def policy_loss(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate, as a loss: ``max(−ρA, −clip(ρ, 1 − ε, 1 + ε_high) A)`` with ρ = π/π_old.

    Schulman et al. 2017, equation 7, with the sign turned; separate bounds as in DAPO (Yu et al. 2025, equation 8). ρ
    follows its tangent above exp(20), so neither a value nor a gradient overflows.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that ρ compares with [T]; taken as constants.
        advantages_T: Advantages [T]; taken as constants.
        eps_clip: ε, how far below 1 the ratio may count.
        eps_clip_high: ε_high, how far above 1.

    Returns:
        The loss [T], and a bool [T]: whether the clipped side is the larger one, so that the token has no gradient.
    """
    advantages_T = advantages_T.detach()
    ratio_T = bounded_exp(log_probs_T - old_log_probs_T.detach())
    unclipped_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages_T
    return torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).detach()
