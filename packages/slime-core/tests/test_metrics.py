import dataclasses
import hashlib
import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.metrics import (
    eval_metrics,
    eval_scores,
    is_repetitive,
    length_metrics,
    pass_at_k,
    pass_rates,
    rollout_metrics,
    set_name_problem,
    zero_variance_groups,
)
from slime_core.types import Sample, Status

NUMBERS = itertools.count()


def make_sample(group, reward, length=2, status=Status.COMPLETED, trajectory=None):
    return Sample(
        index=next(NUMBERS), group_index=group, trajectory_id=trajectory, prompt="p", tokens=[1] * (length + 1),
        response_length=length, reward=reward, status=status,
    )  # fmt: skip


def test_a_rollout_in_numbers():
    samples = [
        make_sample(0, 1.0, 2),
        make_sample(0, 0.0, 6, Status.TRUNCATED),
        make_sample(1, 0.5, 4),
        make_sample(1, 0.5, 4),
        make_sample(1, None, 0, Status.ABORTED),
    ]
    assert rollout_metrics(samples) == {
        "raw_reward": 0.5,
        "response_len/mean": 3.2,
        "response_len/median": 4.0,
        "response_len/max": 6.0,
        "response_len/min": 0.0,
        "truncated_ratio": 0.2,
        "aborted_ratio": 0.2,
        "failed_ratio": 0.0,
        "repetition_frac": 0.0,
        "zero_std/count": 1.0,
        "zero_std/ratio": 0.5,
        "zero_std/count_0.5": 1.0,
    }


def test_responses_that_end_in_circles():
    plain = "".join(hashlib.sha256(bytes([number])).hexdigest() for number in range(200))
    assert [is_repetitive(text) for text in ("", "ha" * 20, "again and " * 500, plain)] == [False, False, True, False]
    assert is_repetitive(plain + "и снова " * 2000) and not is_repetitive("и снова " * 2000 + plain)
    samples = [dataclasses.replace(make_sample(0, 1.0), response=text) for text in ("once", "again and " * 500)]
    assert rollout_metrics(samples)["repetition_frac"] == 0.5


def test_kept_tokens_are_counted_where_a_token_was_sampled():
    samples = [make_sample(0, 1.0, 2), make_sample(0, 0.0, 3)]
    assert "kept_tokens/mean" not in rollout_metrics(samples)
    samples[0].kept_tokens, samples[1].kept_tokens = "1 2 3;4;", ";5 6;;"
    assert rollout_metrics(samples)["kept_tokens/mean"] == (3 + 1 + 2) / 3


def test_no_samples_and_no_rewards():
    assert rollout_metrics([]) == {}
    assert "raw_reward" not in rollout_metrics([make_sample(0, None)])
    assert pass_rates([]) == {}


def test_rewards_by_name():
    samples = [make_sample(0, {"a": 1.0, "b": 3.0})]
    assert rollout_metrics(samples, "b")["raw_reward"] == 3.0
    with pytest.raises(DataError, match="--reward-key"):
        rollout_metrics(samples, "c")


def test_the_further_numbers_of_rewards_by_name():
    """Each over those that have it; a trajectory of several samples counts once."""
    samples = [
        make_sample(0, {"score": 1.0, "format": 1.0, "length": 3, "answer": "4", "tried": [1]}),
        make_sample(0, {"score": 0.0, "format": False, "answer": None}),
        make_sample(1, {"score": 0.0, "format": math.nan, "length": 4}, trajectory=7),
        make_sample(1, {"score": 0.0, "format": 0.5, "length": 8}, trajectory=7),
        make_sample(1, None, status=Status.ABORTED),
    ]
    found = {name: value for name, value in rollout_metrics(samples, "score").items() if name.startswith("reward/")}
    assert found == {"reward/format": 0.5, "reward/length": 4.5}
    held_out = eval_metrics("a", samples[:2], "format")
    assert (held_out["eval/a/reward/score"], held_out["eval/a/reward/length"]) == (0.5, 3.0)
    assert "eval/a/reward/format" not in held_out
    assert eval_scores(held_out) == {"a": held_out["eval/a"]}


@pytest.mark.parametrize("n", [1, 2, 5])
def test_pass_at_k_counts_the_subsets(n):
    """The share of the k-subsets of n samples that hold a correct one, listed."""
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_impossible_counts(n, correct, k):
    message = f"pass@{k} of {n} samples, {correct} correct: correct must be 0 to {n}, k must be 1 to {n}"
    with pytest.raises(DataError, match=message):
        pass_at_k(n, correct, k)


def test_pass_rates_go_up_to_the_smallest_group():
    samples = [make_sample(0, reward) for reward in (1, 0, 0, 0)] + [make_sample(1, reward) for reward in (1, 1, 0)]
    assert pass_rates(samples) == pytest.approx({"pass@1": (1 / 4 + 2 / 3) / 2, "pass@2": (1 / 2 + 1) / 2})
    assert pass_rates(samples, correct=2.0) == {"pass@1": 0.0, "pass@2": 0.0}


def test_a_trajectory_of_several_samples_is_one_attempt():
    """Three samples of one solved attempt and one of an attempt that was not: 1 of 2, not 3 of 4."""
    samples = [make_sample(0, 1.0, trajectory=900) for _ in range(3)] + [make_sample(0, 0.0)]
    assert pass_rates(samples) == {"pass@1": 0.5, "pass@2": 1.0}
    assert rollout_metrics(samples)["raw_reward"] == 0.5
    turns = [make_sample(1, reward, trajectory=901) for reward in (0.0, 1.0)] + [make_sample(1, 0.5)]
    assert zero_variance_groups(turns) == {"zero_std/count_0.5": 1.0}
    # The same number in another group is another trajectory.
    assert pass_rates([*samples, make_sample(2, 0.0, trajectory=900)])["pass@1"] == 0.25


@pytest.mark.parametrize(
    ("rewards", "mean"), [((math.inf, -math.inf), math.nan), ((1e308, 1e308), math.inf), ((math.nan, 1.0), math.nan)]
)
def test_rewards_that_have_no_mean_end_no_run(rewards, mean):
    metrics = rollout_metrics([make_sample(0, reward) for reward in rewards])
    assert metrics["raw_reward"] == pytest.approx(mean, nan_ok=True)


def test_lengths_in_numbers():
    assert length_metrics([5, 1, 3, 3], percentiles=(0, 50, 90, 100)) == pytest.approx(
        {
            "response_len/mean": 3.0, "response_len/median": 3.0, "response_len/max": 5.0, "response_len/min": 1.0,
            "response_len/p0": 1.0, "response_len/p50": 3.0, "response_len/p90": 4.4, "response_len/p100": 5.0,
        }
    )  # fmt: skip
    assert length_metrics([7], name="total_len", percentiles=(99.5,))["total_len/p99.5"] == 7.0
    assert length_metrics([]) == {}


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40), st.integers(1, 99))
def test_percentiles_are_those_of_the_standard_library(values, share):
    """`statistics.quantiles` calls Hyndman and Fan's definition 7 `inclusive`."""
    expected = statistics.quantiles(values, n=100, method="inclusive")[share - 1]
    found = length_metrics(values, percentiles=(share, 50))
    assert found[f"response_len/p{share}"] == pytest.approx(expected)
    assert found["response_len/p50"] == pytest.approx(statistics.median(values))


@pytest.mark.parametrize("share", [-1, 101])
def test_percentiles_that_cannot_be(share):
    with pytest.raises(DataError, match=rf"percentiles \[{share}\] must be between 0 and 100"):
        length_metrics([1], percentiles=(50, share))


def test_zero_variance_groups_by_reward():
    rewards = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1, 1, None), 3: (0.0, 1.0), 4: (-0.04,), 5: (0.26, 0.26), 6: (None,)}
    samples = [make_sample(group, reward) for group, values in rewards.items() for reward in values]
    assert zero_variance_groups(samples) == {
        "zero_std/count_0": 2.0,
        "zero_std/count_0.3": 1.0,
        "zero_std/count_1": 2.0,
    }
    assert "zero_std/count_0.26" in zero_variance_groups(samples, decimals=2)
    assert sum(zero_variance_groups(samples).values()) == rollout_metrics(samples)["zero_std/count"]
    assert zero_variance_groups([]) == {}
    assert list(zero_variance_groups([make_sample(0, -0.04)])) == ["zero_std/count_0"]
    assert zero_variance_groups([make_sample(0, {"a": 1.0, "b": 3.0})], "b") == {"zero_std/count_3": 1.0}


def scored(rewards, *, size, statuses=None):
    return [
        Sample(
            index=index,
            group_index=index // size,
            prompt="p",
            tokens=[1] + [2] * (index + 1),
            response_length=index + 1,
            reward=reward,
            status=statuses[index] if statuses else Status.COMPLETED,
        )
        for index, reward in enumerate(rewards)
    ]


def test_names_and_numbers():
    statuses = [Status.TRUNCATED, *[Status.COMPLETED] * 3]
    assert eval_metrics("aime", scored([1.0, 0.0, 0.5, 0.0], size=2, statuses=statuses)) == {
        "eval/aime": 0.375,
        "eval/aime/stderr": 0.125,
        "eval/aime-pass@1": 0.25,
        "eval/aime-pass@2": 0.5,
        "eval/aime-truncated_ratio": 0.25,
        "eval/aime/response_len/mean": 2.5,
        "eval/aime/response_len/median": 2.5,
        "eval/aime/response_len/max": 4.0,
        "eval/aime/response_len/min": 1.0,
    }


def test_standard_error_is_that_of_prompts_not_of_samples():
    alike = [1.0] * 4 + [0.0] * 4
    assert eval_metrics("a", scored(alike, size=4))["eval/a/stderr"] == pytest.approx(0.5)
    assert eval_metrics("a", scored(alike, size=1))["eval/a/stderr"] == pytest.approx(statistics.stdev(alike) / 8**0.5)
    assert "eval/a/stderr" not in eval_metrics("a", scored([1.0, 0.0], size=2))


def test_one_sample_a_prompt_gives_no_more_than_pass_at_1():
    rates = [name for name in eval_metrics("a", scored([1.0, 0.0], size=1)) if "pass@" in name]
    assert rates == ["eval/a-pass@1"]


def test_the_samples_of_a_trajectory_count_once():
    samples = scored([1.0, 1.0, 1.0, 0.0], size=4)
    for sample in samples[:3]:
        sample.trajectory_id = 100
    assert eval_metrics("a", samples)["eval/a"] == 0.5


def test_no_samples_and_no_rewards_of_a_held_out_set():
    assert eval_metrics("a", []) == {}
    assert "eval/a" not in eval_metrics("a", scored([None], size=1))


def test_an_entry_of_a_reward():
    samples = scored([{"acc": 1.0, "score": -1.0}], size=1)
    assert eval_metrics("a", samples, "score")["eval/a"] == -1.0
    with pytest.raises(DataError, match="choose one with --reward-key"):
        eval_metrics("a", samples)


@given(st.lists(st.text(max_size=12).filter(lambda name: set_name_problem(name) is None), unique=True, max_size=4))
def test_scores_are_found_again_whatever_the_sets_are_called(names):
    row = {"rollout/raw_reward": 1.0, "perf/eval_time": 2.0}
    for place, name in enumerate(names):
        own = eval_metrics(name, scored([float(place)] * 4, size=4))
        assert not own.keys() & row.keys()
        row |= own
    assert eval_scores(row) == {name: float(place) for place, name in enumerate(names)}


@pytest.mark.parametrize("name", ["aime", "aime-2024", "held out", "pass@4", "a-pass@k", "eval", "数学"])
def test_usual_names(name):
    assert set_name_problem(name) is None


@pytest.mark.parametrize("name", ["", " a", "a\n", "a/b", "a-pass@4", "a-truncated_ratio"])
def test_names_that_metrics_could_be_mistaken_for(name):
    assert set_name_problem(name)
