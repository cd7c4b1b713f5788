"""Group-relative rewards on tensors: what :mod:`slime_core.rewards` computes, without a Python loop.

N samples in G groups; U trajectories, equal to N unless a trajectory became several samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slime_core.errors import DataError
from slime_core.rewards import check_eps, nonfinite_message, trajectory_message


@torch.no_grad()
def normalize_rewards_by_group(
    rewards_N: Tensor,
    group_indices_N: Tensor,
    *,
    subtract_mean: bool = True,
    divide_by_std: bool = True,
    eps: float = 1e-6,
    sample_indices: Sequence[int] | Tensor | None = None,
    trajectory_ids_N: Tensor | None = None,
) -> Tensor:
    """:func:`slime_core.rewards.normalize_group_rewards` on tensors: the same numbers, errors and paper.

    Groups of any size in any order; those that lie together in ascending order need no sort. The work is in float64.

    Args:
        rewards_N: One number per sample [N].
        group_indices_N: The group of each sample, integers [N].
        subtract_mean: Subtract the group's mean.
        divide_by_std: Divide by the group's unbiased standard deviation, unless its rewards are all equal. Off in
            Dr.GRPO and REINFORCE++-baseline.
        eps: Added to the standard deviation, 0 or more.
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.
        trajectory_ids_N: The trajectory of each sample, integers [N]; each counts once. ``None`` means one sample each.

    Returns:
        One number per sample [N], in the order given, in the rewards' type or, below that, float32.

    Raises:
        ConfigError: ``eps`` is negative or not finite.
        DataError: The lengths differ, a reward is NaN or infinite (names the samples), or samples of one trajectory
            differ in reward.
    """
    check_eps(eps)
    groups = _group(rewards_N, group_indices_N, trajectory_ids_N, sample_indices)
    shifted_N = groups.centred_N if subtract_mean else groups.rewards_N
    if divide_by_std:
        scale_G = torch.where(groups.spread_G > 0, groups.std_G + eps, 1.0)
        shifted_N = shifted_N / groups.samples.expand(scale_G)
    return groups.restore(shifted_N, rewards_N.dtype)


@torch.no_grad()
def leave_one_out_by_group(
    rewards_N: Tensor,
    group_indices_N: Tensor,
    *,
    sample_indices: Sequence[int] | Tensor | None = None,
    trajectory_ids_N: Tensor | None = None,
) -> Tensor:
    """:func:`slime_core.rewards.leave_one_out_rewards` on tensors: the same numbers, errors and paper.

    Args:
        rewards_N: One number per sample [N].
        group_indices_N: The group of each sample, integers [N].
        sample_indices: The samples' numbers, for error messages only. ``None`` means their positions.
        trajectory_ids_N: The trajectory of each sample, integers [N]; each counts once. ``None`` means one sample each.

    Returns:
        One number per sample [N], in the order given, in the rewards' type or, below that, float32.

    Raises:
        DataError: As for :func:`normalize_rewards_by_group`.
    """
    groups = _group(rewards_N, group_indices_N, trajectory_ids_N, sample_indices)
    factor_G = groups.count_G.double() / (groups.count_G - 1).clamp(min=1)
    return groups.restore(groups.centred_N * groups.samples.expand(factor_G), rewards_N.dtype)


class _Runs(NamedTuple):
    """Values of one group after the other.

    Attributes:
        count_G: Values per group.
        size: Values in every group, if they are equally many; else 0. It spares the slower ragged operations.
    """

    count_G: Tensor
    size: int

    @classmethod
    def of(cls, count_G: Tensor) -> _Runs:
        size = int(count_G[0]) if len(count_G) else 0
        return cls(count_G, size if bool((count_G == size).all()) else 0)

    def reduce(self, values_N: Tensor, kind: Literal["min", "max", "sum"]) -> Tensor:
        """One number per group [G]."""
        if not self.size:
            return torch.segment_reduce(values_N, kind, lengths=self.count_G, axis=0, unsafe=True)
        rows_GS = values_N.view(-1, self.size)
        match kind:
            case "min":
                return rows_GS.amin(1)
            case "max":
                return rows_GS.amax(1)
            case "sum":
                return rows_GS.sum(1)

    def expand(self, values_G: Tensor) -> Tensor:
        """Each group's number at each of its values [N]."""
        if self.size:
            return values_G.unsqueeze(1).expand(-1, self.size).reshape(-1)
        return values_G.repeat_interleave(self.count_G)


class _Groups(NamedTuple):
    """Samples in the order of their groups, and each group's statistics over its trajectories, all in float64.

    Attributes:
        order_N: Where each sample stood; ``None`` if the order is the one given.
        samples: How the samples lie.
        rewards_N: Each sample's reward.
        centred_N: Each sample's reward less its group's mean.
        count_G: Trajectories per group.
        spread_G: Largest less smallest reward.
        std_G: Unbiased standard deviation; 0 for a single trajectory.
    """

    order_N: Tensor | None
    samples: _Runs
    rewards_N: Tensor
    centred_N: Tensor
    count_G: Tensor
    spread_G: Tensor
    std_G: Tensor

    def restore(self, values_N: Tensor, dtype: torch.dtype) -> Tensor:
        """Values in the order of the caller's samples, and in the caller's type."""
        if self.order_N is not None:
            values_N = torch.empty_like(values_N).scatter_(0, self.order_N, values_N)
        return values_N.to(torch.promote_types(dtype, torch.float32))


def _group(
    rewards_N: Tensor,
    group_indices_N: Tensor,
    trajectory_ids_N: Tensor | None,
    sample_indices: Sequence[int] | Tensor | None,
) -> _Groups:
    _check(rewards_N, group_indices_N, trajectory_ids_N, sample_indices)
    order_N = _order(group_indices_N, trajectory_ids_N)
    rewards_N, indices_N = rewards_N.to(torch.float64), group_indices_N
    if order_N is not None:
        rewards_N, indices_N = rewards_N.index_select(0, order_N), indices_N.index_select(0, order_N)
    _, group_N, count_G = torch.unique_consecutive(indices_N, return_inverse=True, return_counts=True)
    samples = trajectories = _Runs.of(count_G)
    rewards_U = rewards_N
    if trajectory_ids_N is not None and order_N is not None:
        ids_N = trajectory_ids_N.index_select(0, order_N)
        first_N = _firsts(rewards_N, indices_N, ids_N, order_N, sample_indices)
        rewards_U = rewards_N[first_N]
        trajectories = _Runs.of(torch.bincount(group_N[first_N], minlength=len(count_G)))
    low_G, high_G = trajectories.reduce(rewards_U, "min"), trajectories.reduce(rewards_U, "max")
    spread_G = high_G - low_G
    # Measured from the smallest, equal rewards differ from their mean by exactly 0. In units of the spread nothing
    # overflows.
    unit_G = torch.where(spread_G > 0, spread_G, 1.0)
    part_U = (rewards_U - trajectories.expand(low_G)) / trajectories.expand(unit_G)
    mean_G = trajectories.reduce(part_U, "sum") / trajectories.count_G
    square_G = trajectories.reduce((part_U - trajectories.expand(mean_G)).square_(), "sum")
    return _Groups(
        order_N=order_N,
        samples=samples,
        rewards_N=rewards_N,
        centred_N=rewards_N - samples.expand(low_G + mean_G * unit_G),
        count_G=trajectories.count_G,
        spread_G=spread_G,
        std_G=(square_G / (trajectories.count_G - 1).clamp(min=1)).sqrt_() * unit_G,
    )


def _order(group_indices_N: Tensor, trajectory_ids_N: Tensor | None) -> Tensor | None:
    """Positions sorted by group, then trajectory; ``None`` where the groups already ascend and nothing else counts."""
    if trajectory_ids_N is None:
        if bool((group_indices_N[1:] >= group_indices_N[:-1]).all()):
            return None
        return group_indices_N.argsort(stable=True)
    by_trajectory_N = trajectory_ids_N.argsort(stable=True)
    return by_trajectory_N[group_indices_N.index_select(0, by_trajectory_N).argsort(stable=True)]


def _firsts(
    rewards_N: Tensor,
    indices_N: Tensor,
    ids_N: Tensor,
    order_N: Tensor,
    sample_indices: Sequence[int] | Tensor | None,
) -> Tensor:
    """Whether each sorted sample is the first of its trajectory, bool [N]; the others must have its reward."""
    same_N = (indices_N[1:] == indices_N[:-1]) & (ids_N[1:] == ids_N[:-1])
    differs_N = same_N & (rewards_N[1:] != rewards_N[:-1])
    if bool(differs_N.any()):
        place = int(differs_N.nonzero()[0])
        first, second = ((_name(int(order_N[at]), sample_indices), float(rewards_N[at])) for at in (place, place + 1))
        raise DataError(trajectory_message(int(ids_N[place]), int(indices_N[place]), first, second))
    return torch.cat([same_N.new_ones(min(len(ids_N), 1)), ~same_N])


def _check(
    rewards_N: Tensor,
    group_indices_N: Tensor,
    trajectory_ids_N: Tensor | None,
    sample_indices: Sequence[int] | Tensor | None,
) -> None:
    if rewards_N.dim() != 1 or rewards_N.shape != group_indices_N.shape:
        raise DataError(
            f"rewards {list(rewards_N.shape)} but group indices {list(group_indices_N.shape)}; "
            "give one of each per sample"
        )
    if trajectory_ids_N is not None and rewards_N.shape != trajectory_ids_N.shape:
        raise DataError(
            f"rewards {list(rewards_N.shape)} but trajectory ids {list(trajectory_ids_N.shape)}; "
            "give one of each per sample"
        )
    if sample_indices is not None and len(rewards_N) != len(sample_indices):
        raise DataError(
            f"{len(rewards_N)} rewards but {len(sample_indices)} sample indices; give one of each per sample"
        )
    # One sum is quicker than a look at each; where it overflows, `broken` is empty.
    if not math.isfinite(float(rewards_N.sum(dtype=torch.float64))):
        positions = (~rewards_N.isfinite()).nonzero().flatten().tolist()
        broken = [(_name(position, sample_indices), float(rewards_N[position])) for position in positions]
        if broken:
            raise DataError(nonfinite_message(broken))


def _name(position: int, sample_indices: Sequence[int] | Tensor | None) -> int:
    return position if sample_indices is None else int(sample_indices[position])
