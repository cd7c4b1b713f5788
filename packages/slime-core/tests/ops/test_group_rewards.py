import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core import rewards as plain
from slime_core.errors import ConfigError, DataError
from slime_core.ops import leave_one_out_by_group, normalize_rewards_by_group

ROWS = st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0.0, 0.1, 1 / 3, 1.0, -2.5, 7.25]), st.integers(1, 3)))
UNIFORM = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))


def columns(rows, repeat):
    """Rewards, groups and trajectory ids; each trajectory as often as it says, spread over the batch."""
    copies = [
        number for turn in range(3) for number, (_, _, count) in enumerate(rows) if turn < (count if repeat else 1)
    ]
    return [rows[c][1] for c in copies], [rows[c][0] for c in copies], copies


def assert_as_plain(rewards, groups, trajectories):
    values, indices = torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)
    ids = None if trajectories is None else torch.tensor(trajectories, dtype=torch.int64)
    for subtract_mean in (True, False):
        for divide_by_std in (True, False):
            settings = {"subtract_mean": subtract_mean, "divide_by_std": divide_by_std}
            ours = normalize_rewards_by_group(values, indices, trajectory_ids_N=ids, **settings)
            expected = plain.normalize_group_rewards(rewards, groups, trajectory_ids=trajectories, **settings)
            assert ours.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    ours = leave_one_out_by_group(values, indices, trajectory_ids_N=ids)
    expected = plain.leave_one_out_rewards(rewards, groups, trajectory_ids=trajectories)
    assert ours.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(ROWS, st.booleans())
def test_equals_the_plain_numbers_for_uneven_interleaved_groups(rows, with_trajectories):
    rewards, groups, trajectories = columns(rows, with_trajectories)
    assert_as_plain(rewards, groups, trajectories if with_trajectories else None)


SHARES = st.integers(-4096, 4096).map(lambda number: number / 64)  # a spread that is 0 or not tiny beside the rewards


@given(st.lists(st.tuples(st.integers(0, 5), SHARES), max_size=40), st.randoms())
def test_equals_the_plain_numbers_whatever_the_rewards_and_their_order(rows, rng):
    assert_as_plain([reward for _, reward in rows], [group for group, _ in rows], None)
    order = rng.sample(range(len(rows)), len(rows))
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    groups, order = torch.tensor([group for group, _ in rows]), torch.tensor(order, dtype=torch.int64)
    for function in (normalize_rewards_by_group, leave_one_out_by_group):
        shuffled = function(rewards[order], groups[order])
        torch.testing.assert_close(shuffled, function(rewards, groups)[order], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_eps_is_added_to_the_standard_deviation(eps):
    ours = normalize_rewards_by_group(torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([0, 0]), eps=eps)
    assert ours.tolist() == pytest.approx([1 / (math.sqrt(2) + eps), -1 / (math.sqrt(2) + eps)])
    assert plain.normalize_group_rewards([3.0, 1.0], [0, 0], eps=eps) == pytest.approx(ours.tolist())


@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_eps_that_cannot_be(eps):
    with pytest.raises(ConfigError, match=r"eps \S+ must be a finite number, 0 or more"):
        normalize_rewards_by_group(torch.ones(2), torch.zeros(2, dtype=torch.int64), eps=eps)
    with pytest.raises(ConfigError, match=r"eps \S+ must be a finite number, 0 or more"):
        plain.normalize_group_rewards([1.0], [0], eps=eps)


@given(UNIFORM)
def test_equals_the_plain_numbers_for_even_groups_in_order(shape):
    groups, size, seed = shape
    rewards = torch.randn(groups * size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()
    assert_as_plain(rewards, [group for group in range(groups) for _ in range(size)], None)


@pytest.mark.parametrize("groups", [[0] * 5, [0, 0, 0, 1, 1], [1, 0, 1, 0, 1]])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e300])
def test_equal_rewards_give_exact_zeros(groups, value):
    rewards, indices = torch.full((5,), value, dtype=torch.float64), torch.tensor(groups)
    assert normalize_rewards_by_group(rewards, indices).tolist() == [0.0] * 5
    assert leave_one_out_by_group(rewards, indices).tolist() == [0.0] * 5


def test_huge_rewards_do_not_overflow():
    rewards = [4e307, -4e307, 2e307]
    assert_as_plain(rewards, [0, 0, 0], None)
    assert_as_plain(rewards, [0, 0, 1], None)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.int64, torch.float32)],
)
def test_types(dtype, result):
    ours = normalize_rewards_by_group(torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([0, 0, 0], dtype=torch.int32))
    assert ours.dtype == result
    assert ours.tolist() == pytest.approx(plain.normalize_group_rewards([1, 0, 1], [0, 0, 0]))


def test_no_samples():
    nothing, indices = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert normalize_rewards_by_group(nothing, indices).tolist() == []
    assert leave_one_out_by_group(nothing, indices, trajectory_ids_N=indices).tolist() == []


@pytest.mark.parametrize("names", [None, [40, 41, 42], torch.tensor([40, 41, 42])])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_names_its_sample(bad, names):
    where = 1 if names is None else 41
    for function in (normalize_rewards_by_group, leave_one_out_by_group):
        with pytest.raises(DataError, match=rf"samples {where} \({bad}\): mend"):
            function(torch.tensor([1.0, bad, 0.0]), torch.zeros(3, dtype=torch.int64), sample_indices=names)


def test_trajectories_of_two_groups_may_share_an_id():
    assert_as_plain([1.0, 0.0, 5.0, 7.0], [0, 0, 1, 1], [3, 4, 4, 5])


def test_a_trajectory_has_one_reward():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([2, 2, 2])
    with pytest.raises(DataError, match=r"samples 11 and 13 are of trajectory 5 in group 2, but have .* 1.0 and 0.0"):
        normalize_rewards_by_group(
            rewards, groups, trajectory_ids_N=torch.tensor([5, 6, 5]), sample_indices=[11, 12, 13]
        )


def test_an_error_names_the_first_twenty_samples():
    with pytest.raises(DataError, match=r"samples 0 \(nan\), .*, 19 \(nan\) and 80 more: mend"):
        normalize_rewards_by_group(torch.full((100,), math.nan), torch.zeros(100, dtype=torch.int64))


def test_lengths_must_agree():
    with pytest.raises(DataError, match="2 rewards but 1 sample indices"):
        normalize_rewards_by_group(torch.zeros(2), torch.zeros(2, dtype=torch.int64), sample_indices=[4])
    with pytest.raises(DataError, match=r"rewards \[2\] but group indices \[1\]"):
        normalize_rewards_by_group(torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(DataError, match=r"rewards \[1\] but trajectory ids \[2\]"):
        leave_one_out_by_group(
            torch.zeros(1), torch.zeros(1, dtype=torch.int64), trajectory_ids_N=torch.zeros(2, dtype=torch.int64)
        )
