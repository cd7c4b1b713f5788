"""Group-relative rewards, on plain numbers: the launcher computes them where no torch is needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from slime_core.errors import DataError


def normalize_group_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    sample_indices: Sequence[int] | None = None,
) -> list[float]:
    """Rewards relative to their group: ``(r - mean) / (std + eps)`` (GRPO; Shao et al. 2024, section 4.1.2).

    Groups are told apart by index, so they may differ in size and lie in any order. The standard deviation is the
    unbiased one (n - 1). It has no meaning for a group of one or for a group whose rewards are all equal: those are
    not divided. A group of equal rewards gives exact zeros when the mean is subtracted.

    Args:
        rewards: One number per sample.
        group_indices: The group of each sample.
        subtract_mean: Subtract the group's mean.
        divide_by_std: Divide by the group's standard deviation. Off in Dr.GRPO (Liu et al. 2025).
        eps: Added to the standard deviation.
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.

    Returns:
        One number per sample, in the order given.

    Raises:
        DataError: The lengths differ, or a reward is NaN or infinite.
    """
    if len(rewards) != len(group_indices):
        raise DataError(f"{len(rewards)} rewards but {len(group_indices)} group indices; give one of each per sample")
    names = range(len(rewards)) if sample_indices is None else sample_indices
    if broken := [f"{name} ({value})" for name, value in zip(names, rewards, strict=True) if not math.isfinite(value)]:
        raise DataError(f"rewards must be finite numbers; not so for samples {', '.join(broken)}: mend the reward")
    members: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(group_indices):
        members[group].append(position)
    normalized = [0.0] * len(rewards)
    for positions in members.values():
        values = [float(rewards[position]) for position in positions]
        shift, scale = _shift_and_scale(values, subtract_mean, divide_by_std, eps)
        for position, value in zip(positions, values, strict=True):
            normalized[position] = (value - shift) / scale
    return normalized


def _shift_and_scale(values: list[float], subtract_mean: bool, divide_by_std: bool, eps: float) -> tuple[float, float]:
    if min(values) == max(values):
        return (values[0] if subtract_mean else 0.0), 1.0
    # Dividing before summing, and `dist`, keep the largest floats from overflowing.
    mean = math.fsum(value / len(values) for value in values)
    std = math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1)
    return (mean if subtract_mean else 0.0), (std + eps if divide_by_std else 1.0)
