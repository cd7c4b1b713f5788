import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import ESTIMATORS
from slime_core.errors import ConfigError, DataError
from slime_core.rewards import estimator_rewards, leave_one_out_rewards, normalize_group_rewards

GROUPED = st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100)), max_size=30)


def by_the_paper(rewards, groups, subtract_mean, divide_by_std, eps):
    """Shao et al. 2024, section 4.1.2, one sample at a time."""
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        peers = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = sum(peers) / len(peers)
        variance = sum((r - mean) ** 2 for r in peers) / (len(peers) - 1) if len(peers) > 1 else 0.0
        value = reward - mean if subtract_mean else reward
        result.append(value / (math.sqrt(variance) + eps) if divide_by_std and variance > 0 else value)
    return result


@given(GROUPED, st.booleans(), st.booleans())
def test_equals_the_paper_for_uneven_interleaved_groups(rows, subtract_mean, divide_by_std):
    groups = [group for group, _ in rows]
    rewards = [round(reward, 2) for _, reward in rows]  # no spreads so small that the loop above loses them
    ours = normalize_group_rewards(rewards, groups, subtract_mean=subtract_mean, divide_by_std=divide_by_std)
    assert ours == pytest.approx(by_the_paper(rewards, groups, subtract_mean, divide_by_std, 1e-6), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("function", [normalize_group_rewards, leave_one_out_rewards])
@pytest.mark.parametrize(
    "kind",
    [
        lambda values: torch.tensor(values),
        lambda values: torch.tensor(values, dtype=torch.bfloat16),
        lambda values: torch.tensor(values, dtype=torch.float64, requires_grad=True),
        lambda values: torch.tensor(values, dtype=torch.int32),
        np.array,
        tuple,
    ],
)
def test_arrays_and_tensors_are_taken_as_the_numbers_they_hold(function, kind):
    """Elements of a tensor hash by identity: as keys each of them would be a group, or a trajectory, of its own."""
    rewards, groups, trajectories = [1.0, 0.0, 0.0, 1.0, 3.0], [0, 0, 0, 1, 1], [7, 8, 8, 7, 9]
    expected = function(rewards, groups, trajectory_ids=trajectories)
    assert expected != [0.0] * 5
    for ids in (torch.tensor, np.array, list):
        found = function(kind(rewards), ids(groups), trajectory_ids=ids(trajectories))
        assert type(found) is (list if kind is tuple else type(kind(rewards)))
        exact = isinstance(found, list) or found.dtype in (np.float64, torch.float64)
        assert list(found) == (expected if exact else pytest.approx(expected, rel=1e-6))
    with pytest.raises(DataError, match=r"samples 43 \(nan\): mend"):
        function(torch.tensor([0.0, math.nan]), groups[:2], sample_indices=torch.tensor([42, 43]))


def test_a_known_group():
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert normalize_group_rewards([1, 0, 0, 1], [7] * 4) == pytest.approx([expected, -expected, -expected, expected])


@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e300])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(value, size):
    assert normalize_group_rewards([value] * size, [0] * size) == [0.0] * size


def test_without_the_mean_a_lone_or_constant_reward_stays():
    assert normalize_group_rewards([3.0, 2.0, 2.0], [0, 1, 1], subtract_mean=False) == [3.0, 2.0, 2.0]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_any_finite_reward_gives_a_finite_result_without_overflow(rewards):
    normalized = normalize_group_rewards([r / 4 for r in rewards], [0] * len(rewards))
    assert all(math.isfinite(value) for value in normalized)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=20), st.randoms())
def test_the_order_of_samples_does_not_matter(rows, rng: random.Random):
    order = list(range(len(rows)))
    rng.shuffle(order)
    straight = normalize_group_rewards([r for _, r in rows], [g for g, _ in rows])
    shuffled = normalize_group_rewards([rows[i][1] for i in order], [rows[i][0] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-12, abs=1e-12)
    straight = leave_one_out_rewards([r for _, r in rows], [g for g, _ in rows])
    shuffled = leave_one_out_rewards([rows[i][1] for i in order], [rows[i][0] for i in order])
    assert shuffled == pytest.approx([straight[i] for i in order], rel=1e-12, abs=1e-12)


def test_huge_rewards_do_not_overflow():
    rewards = [1.7e308, -1.7e308, 0.85e308]
    half = [reward / 2**1000 for reward in rewards]
    assert normalize_group_rewards(rewards, [0] * 3) == pytest.approx(by_the_paper(half, [0] * 3, True, True, 0.0))


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_eps_is_added_to_the_standard_deviation(eps):
    expected = 1 / (math.sqrt(2) + eps)
    assert normalize_group_rewards([3.0, 1.0], [0, 0], eps=eps) == pytest.approx([expected, -expected])


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps_that_cannot_be(eps):
    with pytest.raises(ConfigError, match=r"eps \S+ must be a finite number, 0 or more"):
        normalize_group_rewards([1.0], [0], eps=eps)


def test_no_samples():
    assert normalize_group_rewards([], []) == leave_one_out_rewards([], [], trajectory_ids=[]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_names_its_sample(bad):
    with pytest.raises(DataError, match=rf"samples 41 \({bad}\)"):
        normalize_group_rewards([1.0, bad], [0, 0], sample_indices=[40, 41])
    with pytest.raises(DataError, match=rf"samples 1 \({bad}\)"):
        normalize_group_rewards([1.0, bad], [0, 0])


def test_an_error_names_the_first_twenty_samples():
    with pytest.raises(DataError, match=r"samples 0 \(nan\), .*, 19 \(nan\) and 80 more: mend"):
        normalize_group_rewards([math.nan] * 100, [0] * 100)
    with pytest.raises(DataError, match=r", 19 \(nan\): mend"):
        normalize_group_rewards([math.nan] * 20, [0] * 20)


def test_lengths_must_agree():
    with pytest.raises(DataError, match=r"rewards have the shape \[2, 1\]; give one number per sample"):
        normalize_group_rewards(torch.zeros(2, 1), [0, 0])
    with pytest.raises(DataError, match="2 rewards but 1 sample indices"):
        normalize_group_rewards([1.0, 2.0], [0, 0], sample_indices=[4])
    with pytest.raises(DataError, match="2 rewards but 1 group"):
        normalize_group_rewards([1.0, 2.0], [0])
    with pytest.raises(DataError, match="2 rewards but 1 trajectory ids"):
        normalize_group_rewards([1.0, 2.0], [0, 0], trajectory_ids=[0])


def leave_one_out_by_the_paper(rewards, groups):
    """Ahmadian et al. 2024, section 3.2, one sample at a time; 0 where nobody is left."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        result.append(reward - sum(others) / len(others) if others else 0.0)
    return result


@given(GROUPED)
def test_leave_one_out_equals_the_paper(rows):
    groups, rewards = [group for group, _ in rows], [reward for _, reward in rows]
    expected = leave_one_out_by_the_paper(rewards, groups)
    assert leave_one_out_rewards(rewards, groups) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_leave_one_out_of_one_and_of_equal_rewards_is_zero():
    assert leave_one_out_rewards([0.7, 0.1, 0.1, 0.1], [0, 1, 1, 1]) == [0.0] * 4


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-9, 9), st.integers(1, 3)), min_size=1, max_size=12))
def test_a_trajectory_counts_once_however_many_samples_it_became(rows):
    """As if each trajectory were one sample, whose result all its samples get."""
    groups, rewards = [group for group, _, _ in rows], [float(reward) for _, reward, _ in rows]
    copies = [number for number, (_, _, count) in enumerate(rows) for _ in range(count)]
    for function in (normalize_group_rewards, leave_one_out_rewards):
        whole = function(rewards, groups)
        split = function([rewards[c] for c in copies], [groups[c] for c in copies], trajectory_ids=copies)
        assert split == [whole[c] for c in copies]


def test_trajectories_of_two_groups_may_share_an_id():
    rewards, groups = [1.0, 0.0, 5.0, 7.0], [0, 0, 1, 1]
    shared = normalize_group_rewards(rewards, groups, trajectory_ids=[3, 4, 3, 4])
    assert shared == normalize_group_rewards(rewards, groups)


def test_a_trajectory_has_one_reward():
    with pytest.raises(DataError, match=r"samples 11 and 13 are of trajectory 5 in group 2, but have .* 1.0 and 0.0"):
        normalize_group_rewards([1.0, 0.0, 0.0], [2, 2, 2], trajectory_ids=[5, 6, 5], sample_indices=[11, 12, 13])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_what_each_estimator_starts_from(name):
    rewards, groups = [1.0, 0.0, 4.0, 2.0], [0, 0, 0, 1]
    expected = {
        "reinforce_plus_plus_baseline": by_the_paper(rewards, groups, True, False, 0.0),
        "rloo": leave_one_out_by_the_paper(rewards, groups),
        "ppo": rewards,
        "reinforce_plus_plus": rewards,
    }.get(name, by_the_paper(rewards, groups, True, True, 1e-6))
    # by_the_paper leaves a lone reward as it is less its mean: 0
    assert estimator_rewards(name, rewards, groups) == pytest.approx(expected)
    assert estimator_rewards(name, rewards, groups, normalize=False) == rewards


def test_dr_grpo_does_not_divide():
    assert estimator_rewards("grpo", [1.0, 0.0], [0, 0], divide_by_std=False) == [0.5, -0.5]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_refuses_nan_and_counts_trajectories(name):
    with pytest.raises(DataError, match=r"samples 8 \(nan\)"):
        estimator_rewards(name, [math.nan], [0], sample_indices=[8])
    once = estimator_rewards(name, [1.0, 0.0], [0, 0])
    assert estimator_rewards(name, [1.0, 1.0, 0.0], [0, 0, 0], trajectory_ids=[1, 1, 2]) == [once[0], *once]


def test_an_unknown_estimator_lists_the_known():
    with pytest.raises(ConfigError, match="a2c is unknown; allowed: grpo, gspo"):
        estimator_rewards("a2c", [], [])
