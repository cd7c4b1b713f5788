"""The critic's loss. T tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slime_core.errors import ConfigError
from slime_core.ops.masking import masked


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    value_clip: float | None,
    *,
    mask_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Squared error of the values, clipped: ``max((V − G)², (V_old + clip(V − V_old, −c, c) − G)²)``.

    A value that has moved more than c towards the return gains nothing by moving further. There is no factor ½.
    Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients" (value function clipping).

    Args:
        values_T: Values under the critic being trained [T], in units of reward.
        old_values_T: Values from before the update [T]; taken as constants.
        returns_T: Returns G [T]; taken as constants.
        value_clip: c, 0 or more; ``None`` for no clipping.
        mask_T: 0 where a token does not count [T]: it has loss 0 and no gradient, and its inputs may be anything, NaN
            too. ``None`` means that all count.

    Returns:
        The loss [T], and a bool [T]: whether the clipped side is the larger one, so that the token has no gradient.

    Raises:
        ConfigError: ``value_clip`` is negative or not finite.
        DataError: The shapes differ.
    """
    if value_clip is not None and not 0 <= value_clip < math.inf:
        raise ConfigError(f"--value-clip {value_clip} must be a finite number, 0 or more")
    values_T, old_T, returns_T = masked(mask_T, values_T=values_T, old_values_T=old_values_T, returns_T=returns_T)
    old_T, returns_T = old_T.detach(), returns_T.detach()
    unclipped_T = (values_T - returns_T).square()
    if value_clip is None:
        return unclipped_T, torch.zeros_like(unclipped_T, dtype=torch.bool)
    near_T = old_T + (values_T - old_T).clamp(-value_clip, value_clip)
    clipped_T = (near_T - returns_T).square()
    return torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).detach()


def value_objective(
    *, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss of a step: :func:`value_loss` summed under the tokens' weights.

    Args:
        values_T: Values under the critic being trained [T], in units of reward.
        old_values_T: Values from before the update [T].
        returns_T: Returns [T].
        weights_T: From :func:`slime_core.ops.token_weights` or one of its siblings [T]. Where the weight is 0 the
            other tensors may hold anything, NaN too.
        value_clip: How far a value may move from the old one, 0 or more; ``None`` for no clipping.

    Returns:
        The scalar loss, and the detached scalars ``value_loss`` and ``value_clipfrac`` (the weighted share of tokens
        without gradient because of the clip). Both add up over micro-batches and ranks.

    Raises:
        ConfigError: ``value_clip`` is negative or not finite.
        DataError: The shapes differ.
    """
    loss_T, clipped_T = value_loss(values_T, old_values_T, returns_T, value_clip, mask_T=weights_T)
    loss = (loss_T * weights_T).sum()
    return loss, {"value_loss": loss.detach(), "value_clipfrac": (clipped_T * weights_T).sum().detach()}
