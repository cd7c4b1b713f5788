"""How token losses become the loss of an optimizer step. T tokens of all responses, one response after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_core.errors import DataError


def token_weights(
    loss_masks: Sequence[Sequence[int] | Tensor],
    *,
    global_samples: int,
    global_tokens: int,
    per_token: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Weights under which a step's loss is a plain sum over its tokens, micro-batches and data-parallel ranks.

    The denominators are those of the whole step, so splitting the step differently changes nothing.

    - Per sample: ``m / max(Σ m, 1) / global_samples``, the sum running over the token's own sample: the mean over
      samples of each sample's mean over its trained tokens (GRPO; Shao et al. 2024, equation 3).
    - Per token: ``m / max(global_tokens, 1)``: the mean over all trained tokens of the step (DAPO; Yu et al. 2025,
      equation 8).

    Args:
        loss_masks: Per sample, R numbers that are 1 where the token is trained on.
        global_samples: Samples in the step over all ranks.
        global_tokens: Trained tokens in the step over all ranks. Used only with ``per_token``.
        per_token: Which of the two means.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Weights [T], T being the length of all masks together.

    Raises:
        DataError: ``global_samples`` is below 1.
    """
    if global_samples < 1:
        raise DataError(f"global_samples {global_samples} must be 1 or more: the samples of the step over all ranks")
    masks = [torch.as_tensor(mask, dtype=dtype, device=device) for mask in loss_masks]
    if not masks:
        return torch.zeros(0, dtype=dtype, device=device)
    if per_token:
        return torch.cat(masks) / max(global_tokens, 1)
    return torch.cat([mask / (mask.sum().clamp(min=1) * global_samples) for mask in masks])
