"""Estimators of the KL divergence from sampled tokens. T tokens."""

from __future__ import annotations

from torch import Tensor

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError
from slime_core.ops.masking import masked
from slime_core.ops.numerics import LIMIT, bounded_expm1_minus

LOW_VAR_BOUND = 10.0


def kl_penalty(
    log_probs_T: Tensor,
    ref_log_probs_T: Tensor,
    kind: str,
    *,
    old_log_probs_T: Tensor | None = None,
    mask_T: Tensor | None = None,
) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), for tokens that the policy sampled (Schulman 2020).

    With d = log π − log π_ref: ``k1`` = d (unbiased, may be negative), ``k2`` = d²/2, ``k3`` = exp(−d) − 1 + d
    (unbiased, never negative), ``low_var_kl`` = k3 cut to [−10, 10], with no gradient where it is cut. k3 follows its
    tangent below d = −20, so neither a value nor a gradient overflows.

    As a loss, plain k1 and k3 do not have the divergence's gradient as their mean, even on-policy: they leave out that
    the tokens' own probability changes (k1's mean gradient is 0; k2's is the divergence's). With ``old_log_probs_T``
    the estimate is multiplied by ρ = π/π_old, with ρ's gradient, and before ``low_var_kl`` cuts: over tokens that π_old
    sampled, ρ·k1 and ρ·k3 have the divergence as their mean and its gradient as the mean of theirs (DeepSeek-V3.2,
    2025, equation 7, for k3). Above exp(20) ρ is held constant, because a product of two tangents would overflow; what
    is left of the gradient there points the same way.

    Args:
        log_probs_T: Log-probs (nats) under the policy [T].
        ref_log_probs_T: Log-probs under the reference [T], taken as constants.
        kind: ``k1``, ``k2``, ``k3`` or ``low_var_kl``.
        old_log_probs_T: Log-probs under the policy that sampled the tokens [T], taken as constants, for the unbiased
            form; ``None`` for the plain one.
        mask_T: 0 where a token does not count [T]: its estimate is 0 without gradient, and its inputs may be anything,
            NaN too. ``None`` means that all count.

    Returns:
        The estimate [T], with gradient to ``log_probs_T``.

    Raises:
        ConfigError: ``kind`` is none of the four.
        DataError: The shapes differ.
    """
    given = {"log_probs_T": log_probs_T, "ref_log_probs_T": ref_log_probs_T.detach()}
    if old_log_probs_T is not None:
        given["old_log_probs_T"] = old_log_probs_T.detach()
    values_T = masked(mask_T, **given)
    difference_T = values_T[0] - values_T[1]
    estimate_T = _estimate(difference_T, kind)
    if old_log_probs_T is not None:
        estimate_T = estimate_T * (values_T[0] - values_T[2]).clamp(max=LIMIT).exp()
    return estimate_T.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else estimate_T


def _estimate(difference_T: Tensor, kind: str) -> Tensor:
    match kind:
        case "k1":
            return difference_T
        case "k2":
            return difference_T.square() / 2
        case "k3" | "low_var_kl":
            return bounded_expm1_minus(-difference_T)
        case _:
            raise ConfigError(f"--kl-loss-type {kind} is unknown; allowed: {', '.join(KL_LOSS_TYPES)}")
