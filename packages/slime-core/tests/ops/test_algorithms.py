"""Each algorithm as a whole: equal to its papers, and the same however the step is split."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.algorithm_cases import (
    CASES,
    Part,
    by_the_papers,
    config_of,
    make_responses,
    processed_rewards,
    step_sizes,
    whole,
)

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=9)
EVERY = pytest.mark.parametrize("name", CASES)


def assert_same_gradients(ours, expected):
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-9, atol=1e-9)


@EVERY
@pytest.mark.parametrize(("lengths", "group_size"), [([1], 1), ([4, 0, 7, 3, 5, 6, 8, 1, 9], 3), ([3, 3, 2, 6], 2)])
def test_loss_and_gradient_equal_the_papers(name, lengths, group_size):
    config, responses = config_of(name), make_responses(lengths, seed=0, group_size=group_size)
    loss, metrics, gradients = whole(config, responses)
    expected, expected_gradients = by_the_papers(config, responses)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    assert metrics["loss"] == loss
    assert_same_gradients(gradients, expected_gradients)


def test_the_cases_are_told_apart():
    """Every case has a loss of its own on these responses: none is another one by accident."""
    responses = make_responses([4, 2, 7, 3, 5, 6, 8, 1, 9], seed=0, group_size=3)
    losses = [whole(config_of(name), responses)[0].item() for name in CASES]
    assert len({round(loss, 9) for loss in losses}) == len(losses)


@EVERY
@given(LENGTHS, st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 4))
def test_any_split_into_micro_batches_changes_nothing(name, lengths, seed, parts, group_size):
    config, responses = config_of(name), make_responses(lengths, seed, group_size)
    loss, metrics, gradients = whole(config, responses)
    sizes, rewards = step_sizes(responses), processed_rewards(config, responses)
    advantages = dict(
        zip(
            map(id, responses),
            Part(config, responses, rewards, sizes).advantages().split([len(row.mask) for row in responses]),
            strict=True,
        )
    )
    random.Random(seed).shuffle(responses)
    pieces = [Part(config, responses[part::parts], rewards, sizes) for part in range(parts)]
    mis_sums = torch.stack([piece.mis_sums() for piece in pieces]).sum(0)
    total, summed = 0.0, dict.fromkeys(metrics, 0.0)
    for piece in pieces:
        own = [advantages[id(response)] for response in piece.responses]
        part_loss, part_metrics = piece.objective(torch.cat([torch.zeros(0, dtype=torch.float64), *own]), mis_sums)
        total += part_loss.item()
        summed = {key: value + part_metrics[key].item() for key, value in summed.items()}
        assert_same_gradients(piece.gradients(part_loss), {id(r): gradients[id(r)] for r in piece.responses})
    assert total == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    assert summed == {key: pytest.approx(value.item(), rel=1e-9, abs=1e-9) for key, value in metrics.items()}


@EVERY
def test_the_order_of_samples_changes_nothing(name):
    config, responses = config_of(name), make_responses([4, 2, 7, 3, 5, 6], seed=8, group_size=3)
    loss, _, gradients = whole(config, responses)
    for seed in range(3):
        random.Random(seed).shuffle(responses)
        shuffled, _, shuffled_gradients = whole(config, responses)
        torch.testing.assert_close(shuffled, loss, rtol=1e-9, atol=1e-12)
        assert_same_gradients(shuffled_gradients, gradients)


@EVERY
def test_a_wholly_masked_step_has_no_loss_and_no_gradient(name):
    responses = make_responses([4, 1, 3, 2], seed=1)
    for response in responses:
        response.mask = [0] * len(response.mask)
        response.new = [float("nan")] * len(response.mask)
    loss, metrics, gradients = whole(config_of(name), responses)
    assert loss == 0
    assert all(value == 0 for value in metrics.values())
    assert all(value.eq(0).all() for value in gradients.values())


@EVERY
@pytest.mark.parametrize("shift", [-1e3, -50.0, 50.0, 1e3])
def test_no_overflow_however_far_the_policies_are_apart(name, shift):
    responses = make_responses([4, 1, 3, 2], seed=2)
    for response in responses:
        response.new = [value + shift for value in response.new]
        response.rollout = [value - shift for value in response.rollout]
    loss, metrics, gradients = whole(config_of(name), responses)
    assert loss.isfinite()
    assert all(value.isfinite() for value in metrics.values())
    assert all(value.isfinite().all() for value in gradients.values())


@pytest.mark.timeout(120)
def test_two_ranks_equal_one(two_ranks):
    """Responses, and the samples of a trajectory, fall to different ranks; one step leaves a rank without any."""
    for reports in two_ranks("algorithm_cases.py", "rank_differences"):
        assert set(reports) == set(CASES)
        assert max(reports.values()) < 1e-9, reports


@pytest.mark.timeout(120)
def test_responses_cut_over_ranks_equal_whole_ones(two_ranks):
    """Context parallelism: ratios of whole sequences, their gradients, drifts and vetoes span the ranks."""
    for reports in two_ranks("algorithm_cases.py", "context_differences"):
        assert set(reports) == {*CASES, "a function"}
        assert max(reports.values()) < 1e-9, reports
