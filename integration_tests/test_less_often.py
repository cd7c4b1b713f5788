"""Weights that are sent every second rollout, and checkpoints that are exported, in a real run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import Assets, rows, run, train_command
from transformers import AutoModelForCausalLM

from slime_rollout.store import RolloutStore

FLAGS = [
    "--update-weights-interval", "2", "--save-interval", "3", "--max-checkpoints-kept", "1", "--keep-rollouts",
    "--log-passrate",
]  # fmt: skip


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(600)
def test_tokens_lag_by_one_and_each_checkpoint_is_a_model(qwen3: Assets, tmp_path: Path) -> None:
    export = ["--save-hf", str(tmp_path / "hf-{rollout_id}")]
    run(train_command(qwen3, tmp_path, *FLAGS, *export, rollouts=4), tmp_path / "run.txt")

    store = RolloutStore(tmp_path / "save" / "rollouts")
    versions = [
        {version for sample in store.read(number).batch().samples for version in sample.weight_versions}
        for number in range(4)
    ]
    assert versions == [{0}, {0}, {2}, {3}]  # sent after 2 rollouts, and before the checkpoint of 3
    measured = rows(tmp_path, "rollout")
    assert [row["rollout/staleness/max"] for row in measured] == [0, 1, 0, 0]
    assert [row["perf/update_weights_bytes"] > 0 for row in measured] == [False, True, True, True]
    assert all(0 <= row["passrate/pass@1"] <= row["passrate/pass@8"] <= 1 for row in measured)

    assert [path.name for path in (tmp_path / "save").glob("iter_*")] == ["iter_0000004"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (qwen3.hf, tmp_path / "hf-3")
    )
    assert before.keys() == after.keys() and (tmp_path / "hf-2" / "config.json").is_file()
    moved = {name: float((after[name].float() - value.float()).abs().max()) for name, value in before.items()}
    assert 0 < max(moved.values()) < 0.1
