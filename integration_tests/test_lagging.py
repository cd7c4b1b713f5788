"""Runs that train on older tokens than the newest: killed and resumed, each sample is trained on once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from ended import end_run, send, trained
from launching import Assets, ages_of, recorded, rows, run, train_command

ROLLOUTS = 6
SAME = 1e-5  # nats, between trainer and engine in fp32
BESIDE = ["--async-buffer-size", "2", "--max-weight-staleness", "2", "--use-tis"]
MEASURED = ["--keep-old-actor", "--get-mismatch-metrics"]
# One token in fifty is a stop, and a quarter of the requests run at once: those that are cut off are at all stages.
CUT_OFF = [
    "--over-sampling-batch-size", "12", "--partial-rollout", "--max-weight-staleness", "2",
    "--rollout-max-response-len", "96", "--rollout-concurrency", "24",
    "--rollout-stop-token-ids", *map(str, range(100, 300, 20)),
    "--dynamic-sampling-filter-path", "slime_rollout.filters.check_reward_nonzero_std",
]  # fmt: skip


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("flags", [BESIDE, CUT_OFF], ids=["generation beside the trainer", "partial rollouts"])
def test_each_sample_is_trained_on_once(qwen3: Assets, tmp_path: Path, flags: list[str]) -> None:
    command = train_command(
        qwen3, tmp_path, "--save-interval", "2", "--keep-rollouts", *MEASURED, *flags, rollouts=ROLLOUTS, colocate=False
    )
    killed = end_run(command, tmp_path, send(signal.SIGKILL), ready=trained(tmp_path, 3))
    assert killed.left == []
    text = run(command, tmp_path / "resumed.txt")
    assert "does not balance" not in text + (tmp_path / "out" / "logs" / "rollout.log").read_text()

    ages = ages_of(recorded(tmp_path, ROLLOUTS))
    print("ages of tokens:", ages)
    assert min(ages) >= 0 and 0 < max(ages) <= 2
    assert [row["rollout_id"] for row in rows(tmp_path, "rollout")] == list(range(ROLLOUTS))
    staleness = [row["rollout/staleness/max"] for row in rows(tmp_path, "rollout")]
    assert max(staleness) == max(ages)
    drift = [row["train/train_rollout_logprob_abs_diff"] for row in rows(tmp_path, "train")]
    print("drift:", drift)
    # Though tokens are old, trainer and engine see them with the same weights: also after the restart.
    assert max(drift) < SAME
    if flags is CUT_OFF:
        assert sum(row.get("rollout/continued_samples", 0) for row in rows(tmp_path, "rollout")) > 0
