"""A run on a Ray cluster that was there before: it leaves nothing of its own there, and the cluster as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import run_on_cluster
from ended import FOREVER
from launching import Assets, train_command


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize("end", ["finishes", pytest.param("is killed", marks=pytest.mark.full)])
def test_a_run_joins_a_cluster_and_leaves_it_as_it_was(
    end: str, qwen3: Assets, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if end == "finishes":
        joined = request.getfixturevalue("joined_run")
        assert joined.code == 0, joined.text
    else:
        joined = run_on_cluster(train_command(qwen3, tmp_path, rollouts=FOREVER, save=False), tmp_path, kill=True)
    print(f"{joined.processes} processes of the run on the cluster; they share {joined.memory}")
    assert joined.processes >= 3  # trainer, rollout worker, engine
    assert not joined.left, joined.left
    assert joined.nodes_live
    assert joined.answer == "answer: 42"
    # torch's is there during an update of the weights alone
    assert {"sglang"} <= {name.partition("_")[0] for name in joined.memory} <= {"torch", "sglang"}
    assert not joined.memory_left
