"""Group-relative rewards, of lists, arrays or tensors alike; no torch is needed. N samples in G groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from slime_core.algorithms import estimator_row
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
) -> Any:
    """Rewards relative to their group: ``(r - mean) / (std + eps)`` (GRPO; Shao et al. 2024, section 4.1.2).

    Groups are distinguished by index, so they may differ in size and lie in any order. The standard deviation is the
    unbiased one (n - 1). It has no meaning for a group of one or for a group whose rewards are all equal: those are
    not divided. A group of equal rewards gives exact zeros when the mean is subtracted, and so does a group of one:
    nothing can be learned from it.

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
        One number per sample, in the order given: a tensor of a tensor (of its type or, below that, float32, on its
        device), an array of an array, else a list. Computed in float64.

    Raises:
        ConfigError: ``eps`` is negative or not finite.
        DataError: Lengths differ, a reward is not finite (names the samples), or samples of a trajectory differ in it.
    """
    if not 0 <= eps < math.inf:
        raise ConfigError(f"eps {eps} must be a finite number, 0 or more; 1e-6 is usual")
    groups = _group(rewards, group_indices, trajectory_ids, sample_indices)
    scale_G = np.full_like(groups.std_G, 0.5)
    if divide_by_std:
        scale_G = np.where(groups.std_G > 0, groups.std_G + eps / 2, scale_G)
    return _like(rewards, groups.shifted(subtract_mean) / groups.spread(scale_G))


def leave_one_out_rewards(
    rewards: Floats,
    group_indices: Integers,
    *,
    sample_indices: Integers | None = None,
    trajectory_ids: Integers | None = None,
) -> Any:
    """Each reward less the mean of the others in its group (RLOO; Ahmadian et al. 2024, section 2.3).

    Computed as ``n / (n - 1) · (r - mean)``, which is the same. A group of one has no others: it gives 0, as a group of
    equal rewards does. With trajectories n counts these, and the others are the other trajectories.

    Arguments, result and errors are those of :func:`normalize_group_rewards`.
    """
    groups = _group(rewards, group_indices, trajectory_ids, sample_indices)
    factor_G = 2 * groups.count_G / np.maximum(groups.count_G - 1, 1)
    return _like(rewards, groups.shifted(True) * groups.spread(factor_G))


def estimator_rewards(
    estimator: str,
    rewards: Floats,
    group_indices: Integers,
    *,
    normalize: bool = True,
    divide_by_std: bool = True,
    sample_indices: Integers | None = None,
    trajectory_ids: Integers | None = None,
) -> Any:
    """The rewards that an advantage estimator starts from.

    - ``grpo``, ``gspo``, ``cispo``: :func:`normalize_group_rewards`; Dr.GRPO with ``divide_by_std`` off.
    - ``reinforce_plus_plus_baseline``: the same, never divided.
    - ``rloo``: :func:`leave_one_out_rewards`.
    - ``ppo``, ``reinforce_plus_plus``, and all of them without ``normalize``: as they are.

    Arguments, result and errors are those of :func:`normalize_group_rewards`; an unknown estimator is a ConfigError.
    """
    row = estimator_row(estimator)
    names: dict[str, Any] = {"sample_indices": sample_indices, "trajectory_ids": trajectory_ids}
    if row.baseline == "others" and normalize:
        return leave_one_out_rewards(rewards, group_indices, **names)
    relative = normalize and row.is_relative
    divide = relative and divide_by_std and row.divides
    return normalize_group_rewards(rewards, group_indices, subtract_mean=relative, divide_by_std=divide, **names)


class _Groups(NamedTuple):
    """Each sample's reward and group, and the groups' statistics over trajectories.

    Rewards are halved, which is exact, so that no difference of two overflows.
    """

    halves_N: NDArray[np.float64]
    group_N: NDArray[Any]
    count_G: NDArray[np.int64]
    mean_G: NDArray[np.float64]
    std_G: NDArray[np.float64]

    def spread(self, values_G: NDArray[np.float64]) -> NDArray[np.float64]:
        """Each group's number at each of its samples."""
        spread_N: NDArray[np.float64] = values_G[self.group_N]
        return spread_N

    def shifted(self, subtract_mean: bool) -> NDArray[np.float64]:
        """Half of each reward, less half of its group's mean."""
        return self.halves_N - self.spread(self.mean_G) if subtract_mean else self.halves_N


def _group(
    rewards: Floats, group_indices: Integers, trajectory_ids: Integers | None, sample_indices: Integers | None
) -> _Groups:
    rewards_N, indices_N = _array(rewards).astype(np.float64, copy=False), _array(group_indices)
    _check_shapes(rewards_N, group_indices=indices_N, trajectory_ids=trajectory_ids, sample_indices=sample_indices)
    if not np.isfinite(rewards_N).all():
        _refuse(rewards_N, sample_indices)
    group_N = _numbered(indices_N)
    halves_N = rewards_N / 2
    halves_U, group_U = halves_N, group_N
    if trajectory_ids is not None:
        counted_U = _one_of_each(rewards_N, indices_N, group_N, _array(trajectory_ids), sample_indices)
        halves_U, group_U = halves_N[counted_U], group_N[counted_U]
    count_G = np.bincount(group_U)
    # Measured from one of them, equal rewards differ from their mean by exactly 0. In units of the largest difference
    # no square overflows or is lost.
    one_G = np.zeros(len(count_G))
    one_G[group_U] = halves_U
    parts_U = halves_U - one_G[group_U]
    unit_G = np.zeros(len(count_G))
    np.maximum.at(unit_G, group_U, np.abs(parts_U))
    unit_G[unit_G == 0] = 1.0
    parts_U /= unit_G[group_U]
    some_G = np.maximum(count_G, 1)
    mean_G = np.bincount(group_U, parts_U) / some_G
    squares_G = np.bincount(group_U, (parts_U - mean_G[group_U]) ** 2)
    std_G = np.sqrt(squares_G / np.maximum(count_G - 1, 1)) * unit_G
    return _Groups(halves_N, group_N, count_G, one_G + mean_G * unit_G, std_G)


def _numbered(indices_N: NDArray[Any]) -> NDArray[Any]:
    """The groups by numbers not much above their count, without sorting where they are such numbers."""
    count = len(indices_N)
    if count and indices_N.dtype.kind in "iu" and indices_N.min() >= 0 and indices_N.max() < 8 * count:
        return indices_N.astype(np.int64, copy=False)
    return np.unique(indices_N, return_inverse=True)[1]


def _one_of_each(
    rewards_N: NDArray[np.float64],
    indices_N: NDArray[Any],
    group_N: NDArray[np.int64],
    ids_N: NDArray[Any],
    sample_indices: Integers | None,
) -> NDArray[np.int64]:
    """One sample of each trajectory, group by group; they have one reward."""
    _, trajectory_N = np.unique(ids_N, return_inverse=True)
    _, counted_U, place_N = np.unique(group_N * len(ids_N) + trajectory_N, return_index=True, return_inverse=True)
    first_N = counted_U[place_N]
    if len(differ := np.flatnonzero(rewards_N != rewards_N[first_N])):
        second = differ[0]
        first, names_N = first_N[second], _names(sample_indices, len(ids_N))
        raise DataError(
            f"samples {names_N[first]} and {names_N[second]} are of trajectory {ids_N[second]} in group "
            f"{indices_N[second]}, but have the rewards {rewards_N[first]} and {rewards_N[second]}; give all samples "
            "of a trajectory its reward, or another trajectory id"
        )
    return np.asarray(counted_U)


def _array(values: Any) -> NDArray[Any]:
    """Numbers as an array; of a tensor of any type, on any device, with or without gradient."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    return np.asarray(values)


def _like(given: Any, values_N: NDArray[np.float64]) -> Any:
    """The numbers as what was given: tensor, array or list."""
    if hasattr(given, "detach"):
        import torch

        wide = torch.promote_types(given.dtype, torch.float32)
        return torch.from_numpy(values_N).to(given.device, wide)
    return values_N if isinstance(given, np.ndarray) else values_N.tolist()


def _names(sample_indices: Integers | None, count: int) -> NDArray[Any]:
    return np.arange(count) if sample_indices is None else _array(sample_indices)


def _check_shapes(rewards_N: NDArray[Any], **others: Any) -> None:
    if rewards_N.ndim != 1:
        raise DataError(f"rewards have the shape {list(rewards_N.shape)}; give one number per sample in one dimension")
    for name, values in others.items():
        if values is not None and (given_N := _array(values)).shape != rewards_N.shape:
            what = name.replace("_", " ")
            raise DataError(f"{len(rewards_N)} rewards but {given_N.size} {what}; give one of each per sample")


def _refuse(rewards_N: NDArray[np.float64], sample_indices: Integers | None) -> None:
    broken, names_N = np.flatnonzero(~np.isfinite(rewards_N)).tolist(), _names(sample_indices, len(rewards_N))
    named = ", ".join(f"{names_N[place]} ({rewards_N[place]})" for place in islice(broken, MOST_NAMED))
    more = f" and {len(broken) - MOST_NAMED} more" if len(broken) > MOST_NAMED else ""
    raise DataError(f"rewards must be finite numbers; not so for samples {named}{more}: mend the reward")
