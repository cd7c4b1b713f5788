import dataclasses

import pytest

from slime_core.metrics import rollout_metrics
from slime_core.types import EvalReport, RolloutBatch, Sample, SyncReport, TrainReport
from slime_launch.step_metrics import (
    eval_line,
    eval_row,
    eval_title,
    example_line,
    rollout_row,
    step_cells,
    step_line,
    train_rows,
)
from slime_rollout.ready import ReadyRollout, reward_failures

SAMPLES = [
    Sample(index=i, group_index=0, prompt="p", tokens=[1, 2, 3], response_length=2, reward=float(i)) for i in range(2)
]
BATCH = ReadyRollout(
    rollout_id=3,
    weight_version=3,
    metrics=rollout_metrics(SAMPLES) | {"response_tokens": 4.0, "tokens_per_second": 2.0, "weight_version/min": 3.0},
    seconds={"generate": 2.0, "reward": 0.5},
    num_samples=2,
    failures=[],
    examples=[],
    shards=[],
)
REPORT = TrainReport(
    rollout_id=3,
    steps=[{"loss": 1.0, "kl": 0.25}, {"kl": 0.5, "loss": 0.5, "grad_norm": 2.0, "kl_loss": 0.25}],
    seconds={"forward_backward": 3.0},
    tokens={"forward_backward": 10, "optimizer": 0},
)
EVAL = EvalReport(
    rollout_id=4,
    scores={"sums": 0.75, "aime": -0.25},
    metrics={
        "eval/sums": 0.75,
        "eval/sums-pass@1": 0.75,
        "eval/aime": -0.25,
        "eval/aime-pass@2": 0.5,
        "eval/aime-pass@16": 0.6,
        "eval/aime-pass@8": 0.55,
        "eval/aime-truncated_ratio": 0.125,
    },
    samples={},
    seconds=1.5,
)
SYNC = SyncReport(version=4, tensors=1, bytes=100, seconds=0.1)
SECONDS = {"rollout": 2.5, "train": 4.0, "update_weights": 0.5}


def test_rows_have_the_documented_names():
    assert train_rows(REPORT)[1] == {"train/loss": 0.5, "train/grad_norm": 2.0, "train/kl_loss": 0.25}
    row = rollout_row(BATCH, REPORT, SYNC, SECONDS)
    assert row["rollout/raw_reward"] == 0.5
    assert row["rollout/response_len/mean"] == 2.0
    assert row["rollout/kl"] == 0.375
    assert row["rollout/weight_version/min"] == 3.0
    assert row["perf/generate_time"] == 2.0
    assert row["perf/forward_backward_time"] == 3.0
    assert row["perf/forward_backward_tokens"] == 10.0
    assert row["perf/step_time"] == 7.0
    assert row["perf/wait_time_ratio"] == pytest.approx(3 / 7)
    assert row["perf/tokens_per_second"] == 2.0
    assert "perf/optimizer_tokens" not in row
    assert all("/" in name for name in row)


def test_evaluation_row():
    assert eval_row(EVAL) == EVAL.metrics | {"perf/eval_time": 1.5}


def test_the_line_of_an_evaluation():
    assert eval_line(EVAL) == "eval after step 4: sums 0.750  aime -0.250 (pass@16 60.0%)  1.5 s"


def test_an_evaluation_shows_a_sample():
    sample = Sample(
        index=0, group_index=0, prompt="Add.\n12 + 30 =", tokens=[1, 2], response_length=1, response=" 42\n", reward=1.0
    )
    others = [dataclasses.replace(sample, group_index=group) for group in range(1, 5)]
    report = dataclasses.replace(EVAL, samples={"sums": [sample, sample, *others]})
    line, *examples = eval_line(report).splitlines()
    assert line == eval_line(EVAL) and examples == ["  for example: Add. 12 + 30 = → 42 (reward 1)"] * 3


def test_an_evaluation_shows_a_sample_of_each_set():
    sample = Sample(
        index=0, group_index=0, prompt="12 + 30 =", tokens=[1, 2], response_length=1, response="42", reward=1.0
    )
    more = dataclasses.replace(sample, index=1, group_index=1)
    report = dataclasses.replace(EVAL, samples={"sums": [sample, more], "aime": [sample, more]})
    assert eval_line(report).splitlines()[1:] == [
        "  for example: sums: 12 + 30 = → 42 (reward 1)", "  for example: aime: 12 + 30 = → 42 (reward 1)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "response", "shown"),
    [
        ("p" * 80, "r" * 120, f"{'p' * 80} → {'r' * 120}"),
        (f"first{'p' * 80}", f"{'r' * 120}last", f"…{'p' * 80} → {'r' * 120}…"),
    ],
)
def test_an_example_is_the_end_of_the_prompt_and_the_beginning_of_the_response(prompt, response, shown):
    assert example_line({"prompt": prompt, "response": response}) == shown


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (0.5, " (reward 0.5)"),
        (None, ""),
        ({"score": 2 / 3, "words": 15.0, "note": "x"}, " (reward score 0.666667, words 15, note x)"),
        (
            {"right": True, "note": "a\nlong " * 20, "steps": [1, 2], "none": None},
            " (reward right 1, note a long a long a long a long a long a lon…, steps [1, 2], none null)",
        ),
    ],
)
def test_a_reward_is_shown_with_all_its_parts(reward, words):
    assert example_line({"prompt": "p", "response": "r", "reward": reward}) == f"p → r{words}"


def test_further_numbers_of_a_reward_are_in_the_lines_of_steps_and_evaluations():
    row = {"rollout/raw_reward": 0.5, "rollout/reward/words": 12.25, "rollout/reward/style": 1234.5}
    assert "  reward 0.500 (words 12.25, style 1234)  " in step_line(BATCH, 40, row, {}, compares_samples=False)
    report = dataclasses.replace(EVAL, metrics=EVAL.metrics | {"eval/aime/reward/words": 3.0})
    assert eval_line(report) == "eval after step 4: sums 0.750  aime -0.250 (words 3) (pass@16 60.0%)  1.5 s"


def test_an_evaluation_says_after_which_step_it_is():
    of = {
        (0, False): "eval before step 1",
        (0, True): "eval",
        (1, False): "eval after step 1",
        (1, True): "eval after step 1",
    }
    assert {key: eval_title(key[0], alone=key[1]) for key in of} == of


@pytest.mark.parametrize("words", ["step  4/40", "reward 0.500", "loss 0.5", "kl 0.25", "grad norm 2", "sync 0.5 s"])
def test_the_line_of_a_step(words):
    row = rollout_row(BATCH, REPORT, SYNC, SECONDS)
    line = step_line(BATCH, 40, row, train_rows(REPORT)[-1], compares_samples=True)
    assert words in line and "(" not in line


def test_the_time_that_memory_took_to_change_hands_is_said_of_the_phases_that_hold_it():
    row = rollout_row(BATCH, REPORT, SYNC, SECONDS)
    line = step_line(BATCH, 40, row | {"perf/sleep_time": 0.25, "perf/wake_up_time": 1.0}, {}, compares_samples=True)
    assert line.endswith("sync 0.5 s (1.2 s of these handing memory over)")
    none = row | {"perf/sleep_time": 0.0, "perf/wake_up_time": 0.0}
    assert step_line(BATCH, 40, none, {}, compares_samples=True).endswith("sync 0.5 s")


def line_of(rewards, failures=(), *, compares_samples=True):
    samples = [
        Sample(index=i, group_index=0, prompt="p", tokens=[1, 2, 3], response_length=2, reward=reward)
        for i, reward in enumerate(rewards)
    ]
    for sample, reason in zip(samples, failures, strict=False):
        sample.metadata["reward_failure"] = reason
    columns = RolloutBatch(rollout_id=0, groups=[samples]).columns()
    batch = dataclasses.replace(
        BATCH,
        rollout_id=0,
        metrics=rollout_metrics(samples),
        seconds={},
        num_samples=len(samples),
        failures=reward_failures(columns),
    )
    row = rollout_row(batch, REPORT, SYNC, SECONDS)
    return step_line(batch, 9, row, {"train/loss": -3.7e-9}, compares_samples=compares_samples)


def test_samples_that_could_not_be_scored_are_told():
    line = line_of([0.0, 0.0, 0.0, 1.0], ["rare", "TypeError: no " + "x" * 200, "TypeError: no " + "x" * 200])
    assert line.startswith("step 1/9  reward 0.250  (3 of 4 not scored: TypeError: no [...]; logs/rollout.log)")


def test_rewards_that_teach_nothing_are_told():
    assert "reward 1.000  (equal within every group: no gradient)  loss 0  " in line_of([1.0, 1.0])
    assert "reward 1.000  loss 0  " in line_of([1.0, 1.0], compares_samples=False)
    assert "reward 1.000  loss 0  " in line_of([1.0], compares_samples=False)  # one sample of a prompt


def test_the_table_has_what_the_rollout_has():
    rollout = rollout_row(BATCH, REPORT, SYNC, SECONDS) | {"rollout/staleness/mean": 1.5}
    rows = [
        {"kind": "eval", "rollout_id": 0, "perf/eval_time": 99.0},
        {"kind": "rollout", "rollout_id": 2, "perf/step_time": 5.0},
        {"kind": "eval", "rollout_id": 3, "perf/eval_time": 2.0},
        *({"kind": "train", "rollout_id": 3, **metrics} for metrics in train_rows(REPORT)),
        {"kind": "rollout", "rollout_id": 3, **rollout},
    ]
    assert step_cells(4, 604, rows) == {
        "step": "4/604",
        "reward": "0.500",
        "loss": "0.5000",
        "KL": "0.2500",
        "length": "2",
        "tokens/s": "2",
        "idle": "43%",
        "stale": "1.5",
        "step s": "7.0",
        "time left": "1:10:00",
    }
    assert step_cells(1, 1, [{"kind": "rollout", "rollout_id": 0, "perf/step_time": 5.0}]) == {
        "step": "1/1",
        "step s": "5.0",
        "time left": "0:00:00",
    }
