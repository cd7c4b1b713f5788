"""Group-relative rewards, on plain numbers: the launcher computes them where no torch is needed.

:mod:`slime_core.ops.group_rewards` computes the same on tensors, for batches where a Python loop is too slow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

from slime_core.errors import ConfigError, DataError

ESTIMATORS = ("grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo")
"""The estimators by name. One's own is no name but a function: see :mod:`slime_core.ops.estimators`."""

MOST_NAMED = 20
"""Samples that an error names one by one; a reward that fails for all of a large batch must stay readable."""


def normalize_group_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    sample_indices: Sequence[int] | None = None,
    trajectory_ids: Sequence[int] | None = None,
) -> list[float]:
    """Rewards relative to their group: ``(r - mean) / (std + eps)`` (GRPO; Shao et al. 2024, section 4.1.2).

    Groups are told apart by index, so they may differ in size and lie in any order. The standard deviation is the
    unbiased one (n - 1). It has no meaning for a group of one or for a group whose rewards are all equal: those are
    not divided. A group of equal rewards gives exact zeros when the mean is subtracted.

    With ``divide_by_std`` off this is Dr.GRPO (Liu et al. 2025, section 3.2) and the first step of REINFORCE++ with
    baseline (Hu et al. 2025, version 9, equation 6).

    Args:
        rewards: One number per sample.
        group_indices: The group of each sample.
        subtract_mean: Subtract the group's mean.
        divide_by_std: Divide by the group's standard deviation.
        eps: Added to the standard deviation, 0 or more.
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.
        trajectory_ids: The trajectory of each sample. A trajectory that became several samples counts once in its
            group's mean and standard deviation, and so does not outweigh the others. ``None`` means one sample each.

    Returns:
        One number per sample, in the order given.

    Raises:
        ConfigError: ``eps`` is negative or not finite.
        DataError: The lengths differ, a reward is NaN or infinite (names the samples), or samples of one trajectory
            differ in reward.
    """
    check_eps(eps)
    normalized = [0.0] * len(rewards)
    for positions, counted in _groups(rewards, group_indices, trajectory_ids, sample_indices):
        shift, scale = _shift_and_scale(counted, subtract_mean, divide_by_std, eps)
        for position in positions:
            normalized[position] = (float(rewards[position]) - shift) / scale
    return normalized


def leave_one_out_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    *,
    sample_indices: Sequence[int] | None = None,
    trajectory_ids: Sequence[int] | None = None,
) -> list[float]:
    """Each reward less the mean of the others in its group (RLOO; Ahmadian et al. 2024, section 2.3).

    Computed as ``n / (n - 1) · (r - mean)``, which is the same. A group of one has no others: it gives 0, as a group of
    equal rewards does.

    Args:
        rewards: One number per sample.
        group_indices: The group of each sample.
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.
        trajectory_ids: The trajectory of each sample; n counts trajectories, and the others are the other
            trajectories. ``None`` means one sample each.

    Returns:
        One number per sample, in the order given.

    Raises:
        DataError: As for :func:`normalize_group_rewards`.
    """
    result = [0.0] * len(rewards)
    for positions, counted in _groups(rewards, group_indices, trajectory_ids, sample_indices):
        mean, _ = _shift_and_scale(counted, subtract_mean=True, divide_by_std=False, eps=0.0)
        factor = len(counted) / max(len(counted) - 1, 1)
        for position in positions:
            result[position] = factor * (float(rewards[position]) - mean)
    return result


def estimator_rewards(
    estimator: str,
    rewards: Sequence[float],
    group_indices: Sequence[int],
    *,
    normalize: bool = True,
    divide_by_std: bool = True,
    sample_indices: Sequence[int] | None = None,
    trajectory_ids: Sequence[int] | None = None,
) -> list[float]:
    """The rewards that an advantage estimator starts from.

    - ``grpo``, ``gspo``, ``cispo``: :func:`normalize_group_rewards`; Dr.GRPO with ``divide_by_std`` off.
    - ``reinforce_plus_plus_baseline``: the same, never divided.
    - ``rloo``: :func:`leave_one_out_rewards`.
    - ``ppo``, ``reinforce_plus_plus``: as they are.

    Args:
        estimator: Name of the estimator.
        rewards: One number per sample.
        group_indices: The group of each sample.
        normalize: Whether to relate rewards to their group at all.
        divide_by_std: Whether those that divide by the group's standard deviation do.
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.
        trajectory_ids: The trajectory of each sample. ``None`` means one sample each.

    Returns:
        One number per sample, in the order given.

    Raises:
        ConfigError: There is no estimator of that name.
        DataError: As for :func:`normalize_group_rewards`.
    """
    match estimator:
        case "grpo" | "gspo" | "cispo":
            subtract_mean, divide = normalize, normalize and divide_by_std
        case "reinforce_plus_plus_baseline":
            subtract_mean, divide = normalize, False
        case "ppo" | "reinforce_plus_plus":
            subtract_mean, divide = False, False
        case "rloo":
            if normalize:
                return leave_one_out_rewards(
                    rewards, group_indices, sample_indices=sample_indices, trajectory_ids=trajectory_ids
                )
            subtract_mean, divide = False, False
        case _:
            raise ConfigError(f"--advantage-estimator {estimator} is unknown; allowed: {', '.join(ESTIMATORS)}")
    return normalize_group_rewards(
        rewards,
        group_indices,
        subtract_mean=subtract_mean,
        divide_by_std=divide,
        sample_indices=sample_indices,
        trajectory_ids=trajectory_ids,
    )


def check_eps(eps: float) -> None:
    """Check what is added to a standard deviation.

    Raises:
        ConfigError: It is negative, which may divide by 0, or not finite.
    """
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps {eps} must be a finite number, 0 or more; 1e-6 is usual")


def nonfinite_message(broken: Sequence[tuple[int, float]]) -> str:
    """What to say of samples, each given as number and reward, whose rewards are no finite numbers."""
    named = ", ".join(f"{name} ({value})" for name, value in islice(broken, MOST_NAMED))
    more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    return f"rewards must be finite numbers; not so for samples {named}{more}: mend the reward"


def trajectory_message(trajectory: int, group: int, first: tuple[int, float], second: tuple[int, float]) -> str:
    """What to say of two samples, each given as number and reward, that share a trajectory but not its reward."""
    return (
        f"samples {first[0]} and {second[0]} are of trajectory {trajectory} in group {group}, but have the rewards "
        f"{first[1]} and {second[1]}; give all samples of a trajectory its reward, or another trajectory id"
    )


def _groups(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    trajectory_ids: Sequence[int] | None,
    sample_indices: Sequence[int] | None,
) -> list[tuple[list[int], list[float]]]:
    """Per group, the positions of its samples and its trajectories' rewards."""
    if len(rewards) != len(group_indices):
        raise DataError(f"{len(rewards)} rewards but {len(group_indices)} group indices; give one of each per sample")
    if trajectory_ids is not None and len(rewards) != len(trajectory_ids):
        raise DataError(f"{len(rewards)} rewards but {len(trajectory_ids)} trajectory ids; give one of each per sample")
    names = range(len(rewards)) if sample_indices is None else sample_indices
    if len(rewards) != len(names):
        raise DataError(f"{len(rewards)} rewards but {len(names)} sample indices; give one of each per sample")
    if broken := [pair for pair in zip(names, rewards, strict=True) if not math.isfinite(pair[1])]:
        raise DataError(nonfinite_message(broken))
    members: dict[int, list[int]] = defaultdict(list)
    for position, group in enumerate(group_indices):
        members[group].append(position)
    if trajectory_ids is None:
        return [(positions, [float(rewards[position]) for position in positions]) for positions in members.values()]
    result = []
    for group, positions in members.items():
        first_of: dict[int, int] = {}
        for position in positions:
            first = first_of.setdefault(trajectory_ids[position], position)
            if rewards[first] != rewards[position]:
                pair = [(names[place], float(rewards[place])) for place in (first, position)]
                raise DataError(trajectory_message(trajectory_ids[position], group, *pair))
        result.append((positions, [float(rewards[position]) for position in first_of.values()]))
    return result


def _shift_and_scale(values: list[float], subtract_mean: bool, divide_by_std: bool, eps: float) -> tuple[float, float]:
    if min(values) == max(values):
        return (values[0] if subtract_mean else 0.0), 1.0
    # Dividing before summing, and `dist`, keep the largest floats from overflowing.
    mean = math.fsum(value / len(values) for value in values)
    std = math.dist(values, [mean] * len(values)) / math.sqrt(len(values) - 1)
    return (mean if subtract_mean else 0.0), (std + eps if divide_by_std else 1.0)
