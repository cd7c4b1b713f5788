"""Estimators of the KL divergence from sampled tokens. T tokens."""

from __future__ import annotations

from torch import Tensor

from slime_core.config import KL_LOSS_TYPES
from slime_core.errors import ConfigError
from slime_core.ops.numerics import bounded_expm1_minus

LOW_VAR_BOUND = 10.0


def kl_penalty(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference), for tokens that the policy sampled (Schulman 2020).

    With d = log π − log π_ref: ``k1`` = d (unbiased, may be negative), ``k2`` = d²/2, ``k3`` = exp(−d) − 1 + d
    (unbiased, never negative), ``low_var_kl`` = k3 cut to [−10, 10], with no gradient where it is cut. k3 follows its
    tangent below d = −20, so neither a value nor a gradient overflows.

    Args:
        log_probs_T: Log-probs (nats) under the policy [T].
        ref_log_probs_T: Log-probs under the reference [T].
        kind: ``k1``, ``k2``, ``k3`` or ``low_var_kl``.

    Returns:
        The estimate [T], with gradient to ``log_probs_T``.

    Raises:
        ConfigError: ``kind`` is none of the four.
    """
    difference_T = log_probs_T - ref_log_probs_T
    match kind:
        case "k1":
            return difference_T
        case "k2":
            return difference_T.square() / 2
        case "k3":
            return bounded_expm1_minus(-difference_T)
        case "low_var_kl":
            return bounded_expm1_minus(-difference_T).clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND)
        case _:
            raise ConfigError(f"--kl-loss-type {kind} is unknown; allowed: {', '.join(KL_LOSS_TYPES)}")
