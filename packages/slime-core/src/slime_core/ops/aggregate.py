"""How token losses become the loss of an optimizer step. T tokens of all responses, one response after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat

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
    masks = _wide(loss_masks, dtype, device)
    if per_token:
        return _divided(masks, repeat(max(global_tokens, 1)), dtype, device)
    return _divided(masks, (mask.sum().clamp(min=1) * global_samples for mask in masks), dtype, device)


def trajectory_tokens(
    loss_masks: Sequence[Sequence[int] | Tensor], trajectory_ids: Sequence[int] | Tensor
) -> list[int]:
    """Trained tokens of the whole trajectory that each sample belongs to.

    Args:
        loss_masks: Per sample, R numbers that are 1 where the token is trained on: all samples of all trajectories,
            before they are split over micro-batches and ranks.
        trajectory_ids: Per sample, the number of its trajectory.

    Returns:
        Per sample, Σ m over all samples with the same trajectory id.

    Raises:
        DataError: There are not as many ids as masks.
    """
    if len(loss_masks) != len(trajectory_ids):
        raise DataError(f"{len(loss_masks)} loss masks and {len(trajectory_ids)} trajectory ids; give one per sample")
    # A tensor's elements hash by identity.
    ids = [int(trajectory) for trajectory in trajectory_ids]
    totals: dict[int, int] = {}
    for mask, trajectory in zip(loss_masks, ids, strict=True):
        totals[trajectory] = totals.get(trajectory, 0) + int(torch.as_tensor(mask).sum())
    return [totals[trajectory] for trajectory in ids]


def token_weights_per_trajectory(
    loss_masks: Sequence[Sequence[int] | Tensor],
    tokens: Sequence[int],
    *,
    global_trajectories: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The per-sample mean of :func:`token_weights`, with a trajectory's samples counted as one.

    ``m / max(D, 1) / global_trajectories``, D the trained tokens of the sample's whole trajectory: the mean over
    trajectories of each trajectory's mean over its trained tokens. An interaction that was cut into several samples (by
    sub-agents or a rewritten context) weighs as much as one that was not, and its samples may lie in different
    micro-batches and on different ranks. With one sample per trajectory it is the per-sample mean (GRPO; Shao et al.
    2024, equation 3).

    Args:
        loss_masks: Per sample, R numbers that are 1 where the token is trained on.
        tokens: D per sample, from :func:`trajectory_tokens`.
        global_trajectories: Trajectories in the step over all ranks.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Weights [T], T being the length of all masks together.

    Raises:
        DataError: ``global_trajectories`` is below 1, or there are not as many ``tokens`` as masks.
    """
    if global_trajectories < 1:
        raise DataError(
            f"global_trajectories {global_trajectories} must be 1 or more: the trajectories of the step over all ranks"
        )
    if len(loss_masks) != len(tokens):
        raise DataError(f"{len(loss_masks)} loss masks and {len(tokens)} token counts; give one per sample")
    masks = _wide(loss_masks, dtype, device)
    return _divided(masks, (max(count, 1) * global_trajectories for count in tokens), dtype, device)


def token_weights_by_constant(
    loss_masks: Sequence[Sequence[int] | Tensor],
    *,
    divisor: float,
    global_samples: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Weights ``m / divisor / global_samples``: each token counts the same, however long its response or the others.

    Dr.GRPO (Liu et al. 2025, section 3.2 and listing 1): the mean over a sample's tokens favours short right answers
    and long wrong ones; a constant does neither.

    Args:
        loss_masks: Per sample, R numbers that are 1 where the token is trained on.
        divisor: The constant, in tokens, above 0; the paper takes the largest response length.
        global_samples: Samples in the step over all ranks.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Weights [T], T being the length of all masks together.

    Raises:
        DataError: ``divisor`` is not a finite number above 0, or ``global_samples`` is below 1.
    """
    if not 0 < divisor < math.inf:
        raise DataError(f"divisor {divisor} must be a finite number of tokens above 0")
    if global_samples < 1:
        raise DataError(f"global_samples {global_samples} must be 1 or more: the samples of the step over all ranks")
    return _divided(_wide(loss_masks, dtype, device), repeat(divisor * global_samples), dtype, device)


def _wide(
    loss_masks: Sequence[Sequence[int] | Tensor], dtype: torch.dtype, device: torch.device | str | None
) -> list[Tensor]:
    """The masks in fp32 or better: bf16 counts tokens to 256 and no further."""
    wide = torch.promote_types(dtype, torch.float32)
    return [torch.as_tensor(mask, dtype=wide, device=device) for mask in loss_masks]


def _divided(
    masks: list[Tensor],
    denominators: Iterable[float | Tensor],
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """Each mask by its denominator, one after the other [T]."""
    parts = [mask / denominator for mask, denominator in zip(masks, denominators, strict=False)]
    return torch.cat(parts).to(dtype) if parts else torch.zeros(0, dtype=dtype, device=device)
