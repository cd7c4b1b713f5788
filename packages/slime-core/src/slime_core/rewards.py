"""Group-relative rewards, of lists, arrays or tensors alike; no torch is needed. N samples in G groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from slime_core.config import ESTIMATORS
from slime_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Floats: TypeAlias = Sequence[float] | NDArray[Any] | Tensor
    Integers: TypeAlias = Sequence[int] | NDArray[Any] | Tensor

MOST_NAMED = 20
"""Samples that an error names one by one; a reward that fails for all of a large batch must stay readable."""


def normalize_group_rewards(
    rewards: Floats,
    group_indices: Integers,
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    sample_indices: Integers | None = None,
    trajectory_ids: Integers | None = None,
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
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps {eps} must be a finite number, 0 or more; 1e-6 is usual")
    groups = _group(rewards, group_indices, trajectory_ids, sample_indices)
    shifted_N = groups.halves_N - groups.mean_N if subtract_mean else groups.halves_N
    scale_N = np.where(groups.std_N > 0, groups.std_N + eps / 2, 0.5) if divide_by_std else 0.5
    return list((shifted_N / scale_N).tolist())


def leave_one_out_rewards(
    rewards: Floats,
    group_indices: Integers,
    *,
    sample_indices: Integers | None = None,
    trajectory_ids: Integers | None = None,
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
    groups = _group(rewards, group_indices, trajectory_ids, sample_indices)
    factor_N = groups.count_N / np.maximum(groups.count_N - 1, 1)
    return list((2 * factor_N * (groups.halves_N - groups.mean_N)).tolist())


def estimator_rewards(
    estimator: str,
    rewards: Floats,
    group_indices: Integers,
    *,
    normalize: bool = True,
    divide_by_std: bool = True,
    sample_indices: Integers | None = None,
    trajectory_ids: Integers | None = None,
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


class _Groups(NamedTuple):
    """Each sample's reward and its group's statistics over trajectories, all [N].

    Rewards are halved, which is exact, so that no difference of two overflows.
    """

    halves_N: NDArray[np.float64]
    count_N: NDArray[np.int64]
    mean_N: NDArray[np.float64]
    std_N: NDArray[np.float64]


def _group(
    rewards: Floats, group_indices: Integers, trajectory_ids: Integers | None, sample_indices: Integers | None
) -> _Groups:
    rewards_N, indices_N = _array(rewards).astype(np.float64), _array(group_indices)
    names_N = np.arange(len(rewards_N)) if sample_indices is None else _array(sample_indices)
    ids_N = np.arange(len(rewards_N)) if trajectory_ids is None else _array(trajectory_ids)
    if rewards_N.ndim != 1:
        raise DataError(f"rewards have the shape {list(rewards_N.shape)}; give one number per sample in one dimension")
    for what, given_N in (("group indices", indices_N), ("trajectory ids", ids_N), ("sample indices", names_N)):
        if rewards_N.shape != given_N.shape:
            raise DataError(f"{len(rewards_N)} rewards but {given_N.size} {what}; give one of each per sample")
    _check_finite(rewards_N, names_N)
    _, group_N = np.unique(indices_N, return_inverse=True)
    counted: Any = slice(None)
    if trajectory_ids is not None:
        _, trajectory_N = np.unique(ids_N, return_inverse=True)
        keys_N = group_N * len(ids_N) + trajectory_N
        _, counted, place_N = np.unique(keys_N, return_index=True, return_inverse=True)
        _check_one_reward(rewards_N, counted[place_N], ids_N, indices_N, names_N)
    halves_N = rewards_N / 2
    halves_U, group_U = halves_N[counted], group_N[counted]  # one of each trajectory
    count_G = np.bincount(group_U)
    low_G, high_G = np.full(len(count_G), np.inf), np.full(len(count_G), -np.inf)
    np.minimum.at(low_G, group_U, halves_U)
    np.maximum.at(high_G, group_U, halves_U)
    spread_G = high_G - low_G
    # Measured from the smallest, equal rewards differ from their mean by exactly 0. In units of the spread no square
    # overflows or is lost.
    unit_G = np.where(spread_G > 0, spread_G, 1.0)
    parts_U = (halves_U - low_G[group_U]) / unit_G[group_U]
    mean_G = np.bincount(group_U, parts_U) / count_G
    squares_G = np.bincount(group_U, (parts_U - mean_G[group_U]) ** 2)
    std_G = np.sqrt(squares_G / np.maximum(count_G - 1, 1)) * unit_G
    return _Groups(halves_N, count_G[group_N], (low_G + mean_G * unit_G)[group_N], std_G[group_N])


def _array(values: Any) -> NDArray[Any]:
    """Numbers as an array; of a tensor of any type, on any device, with or without gradient."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def _check_finite(rewards_N: NDArray[np.float64], names_N: NDArray[Any]) -> None:
    broken = np.flatnonzero(~np.isfinite(rewards_N)).tolist()
    if broken:
        named = ", ".join(f"{names_N[place]} ({rewards_N[place]})" for place in islice(broken, MOST_NAMED))
        more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
        raise DataError(f"rewards must be finite numbers; not so for samples {named}{more}: mend the reward")


def _check_one_reward(
    rewards_N: NDArray[np.float64],
    first_N: NDArray[np.int64],
    ids_N: NDArray[Any],
    indices_N: NDArray[Any],
    names_N: NDArray[Any],
) -> None:
    """Samples of one trajectory, which begins at ``first_N``, have one reward."""
    if len(differ := np.flatnonzero(rewards_N != rewards_N[first_N])):
        second = differ[0]
        first = first_N[second]
        raise DataError(
            f"samples {names_N[first]} and {names_N[second]} are of trajectory {ids_N[second]} in group "
            f"{indices_N[second]}, but have the rewards {rewards_N[first]} and {rewards_N[second]}; give all samples "
            "of a trajectory its reward, or another trajectory id"
        )
