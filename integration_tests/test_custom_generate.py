"""A user-defined generate function in the whole loop."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from custom_turns import TURNS
from ended import Ended
from launching import Assets, rows, run, train_command


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_turns_parts_and_texts_are_trained_on(crashed_run: Ended) -> None:
    trained, generated = (rows(crashed_run.work, kind)[:2] for kind in ("train", "rollout"))
    assert [row["rollout_id"] for row in trained] == [row["rollout_id"] for row in generated] == [0, 1]
    for made, row in zip(generated, trained, strict=True):
        # Of 64 trajectories 16 are texts, which are finished; of the others, 16 have two samples.
        assert made["rollout/truncated_ratio"] == pytest.approx(64 / 80, abs=0.05)
        assert made["rollout/weight_version/min"] == made["rollout/weight_version/max"] == made["rollout_id"]
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
        drift = row["train/train_rollout_logprob_abs_diff"]
        print(f"the engine's log-probs of three turns and the trainer's: {drift:.1e} apart")
        assert drift < 1e-4


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_whole_rollout_of_the_users_is_trained_on_and_continued(llama: Assets, tmp_path: Path) -> None:
    own = ["--rollout-function-path", f"{TURNS}:whole_rollout", "--eval-prompt-data", "held", str(llama.prompts)]
    run(train_command(llama, tmp_path, *own, "--save-interval", "1", rollouts=1), tmp_path / "log")
    run(train_command(llama, tmp_path, *own, "--save-interval", "1", rollouts=2), tmp_path / "log2")
    trained = rows(tmp_path, "train")
    assert [row["rollout_id"] for row in trained] == [0, 1]
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 and row["train/grad_norm"] > 0 for row in trained)
    assert [row["eval/own"] for row in rows(tmp_path, "eval")] == [row["rollout_id"] for row in rows(tmp_path, "eval")]
    counts = json.loads((tmp_path / "save" / "manifest.json").read_text())["source_state"]["ledger"]
    assert counts["trained"] == 128 and counts["filtered"] == 0
