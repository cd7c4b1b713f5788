"""The launcher's loop on an external engine and router."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Assets, rows, run, train_command

from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.http import call
from slime_rollout.store import RolloutStore
from slime_rollout.weights import engine_weight_version

OURS_ALONE = ("--sglang-python", "--rollout-num-gpus", "--colocate", "--sglang-context-length")
# Two samples of a prompt have equal rewards now and then.
DROPS_EQUAL = [
    "--dynamic-sampling-filter-path", "slime_rollout.filters.check_reward_nonzero_std", "--n-samples-per-prompt", "2",
    "--rollout-batch-size", "32", "--over-sampling-batch-size", "48", "--keep-rollouts",
]  # fmt: skip
SGLANG_ARGS = ("--sglang-max-running-requests", "--sglang-max-total-tokens")


def without(command: list[str], *flags: str) -> list[str]:
    """The command without some flags and their values."""
    kept, keep = [], True
    for word in command:
        if word.startswith("--"):
            keep = word not in flags
        if keep:
            kept.append(word)
    return kept


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_a_run_trains_engines_that_others_run_and_leaves_them_running(
    qwen3: Assets, external_fleet: EngineFleet, tmp_path: Path
) -> None:
    command = without(
        train_command(qwen3, tmp_path, "--advantage-estimator", "rloo", *DROPS_EQUAL, rollouts=3),
        *OURS_ALONE,
        *SGLANG_ARGS,
    )
    address = external_fleet.engine_urls[0].removeprefix("http://")
    command += ["--rollout-external-engine-addrs", address, "--sglang-router-url", external_fleet.router_url]
    text = run(command, tmp_path / "run.txt")
    assert "external engines" in text
    made = rows(tmp_path, "rollout")
    assert len(made) == 3
    dropped = sum(value for row in made for name, value in row.items() if "dynamic_filter/drop_" in name)
    print(f"{dropped} groups with equal rewards were dropped, of {dropped + 3 * 32}")
    assert dropped > 0
    store = RolloutStore(tmp_path / "save" / "rollouts")
    for group in (group for row in made for group in store.read(row["rollout_id"]).batch().groups):
        assert len({sample.scalar_reward(None) for sample in group}) == 2
    assert engine_weight_version(external_fleet.engine_urls[0]) == "3"
    external_fleet.check()
    (worker,) = call("GET", f"{external_fleet.router_url}/workers")["workers"]
    assert worker["is_healthy"]
    reply = call("POST", f"{external_fleet.router_url}/generate", {"input_ids": [5, 6], "sampling_params": {}})
    assert reply["meta_info"]["weight_version"] == "3"
