"""A generate function of the user's in the whole loop."""

from __future__ import annotations

import math

import pytest
from ended import Ended
from launching import rows


@pytest.mark.real
@pytest.mark.timeout(400)
def test_turns_parts_and_texts_are_trained_on(turns_run: Ended) -> None:
    trained, generated = (rows(turns_run.work, kind)[:2] for kind in ("train", "rollout"))
    assert [row["rollout_id"] for row in trained] == [row["rollout_id"] for row in generated] == [0, 1]
    for made, row in zip(generated, trained, strict=True):
        # Of 64 trajectories 16 are texts, which are finished; of the others, 16 have two samples.
        assert made["rollout/truncated_ratio"] == pytest.approx(64 / 80, abs=0.05)
        assert made["rollout/weight_version/min"] == made["rollout/weight_version/max"] == made["rollout_id"]
        assert math.isfinite(row["train/loss"]) and row["train/grad_norm"] > 0
        drift = row["train/train_rollout_logprob_abs_diff"]
        print(f"the engine's log-probs of three turns and the trainer's: {drift:.1e} apart")
        assert drift < 1e-4
