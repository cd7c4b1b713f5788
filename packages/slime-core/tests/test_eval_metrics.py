import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.metrics import eval_metrics, eval_scores, set_name_problem
from slime_core.types import Sample, Status


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
        "eval/aime-pass@1": 0.25,
        "eval/aime-pass@2": 0.5,
        "eval/aime-truncated_ratio": 0.25,
        "eval/aime/response_len/mean": 2.5,
        "eval/aime/response_len/median": 2.5,
        "eval/aime/response_len/max": 4.0,
        "eval/aime/response_len/min": 1.0,
    }


def test_one_sample_a_prompt_gives_no_more_than_pass_at_1():
    rates = [name for name in eval_metrics("a", scored([1.0, 0.0], size=1)) if "pass@" in name]
    assert rates == ["eval/a-pass@1"]


def test_the_samples_of_a_trajectory_count_once():
    samples = scored([1.0, 1.0, 1.0, 0.0], size=4)
    for sample in samples[:3]:
        sample.trajectory_id = 100
    assert eval_metrics("a", samples)["eval/a"] == 0.5


def test_no_samples_and_no_rewards():
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
