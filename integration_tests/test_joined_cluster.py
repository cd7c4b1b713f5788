"""A run on a Ray cluster that was there before: it leaves nothing of its own there, and the cluster as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import ray_cluster, run_on_cluster
from ended import FOREVER
from launching import Assets, train_command

from slime_core.errors import ConfigError
from slime_launch.devices import find_device, run_device
from slime_launch.flags import parse_train


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_a_run_joins_a_cluster_and_leaves_it_as_it_was(end: str, qwen3: Assets, tmp_path: Path) -> None:
    """A run on a cluster of several nodes: `test_nodes.py`."""
    kill = end == "is killed"
    command = train_command(qwen3, tmp_path, rollouts=FOREVER if kill else 3, save=False)
    joined = run_on_cluster(command, tmp_path, kill=kill)
    assert kill or joined.code == 0, joined.text
    print(f"{joined.processes} processes of the run on the cluster; they share {joined.memory}")
    assert joined.processes >= 3  # trainer, rollout worker, engine
    assert not joined.left, joined.left
    assert joined.nodes_live
    assert joined.answer == "answer: 42"
    # torch's is there during an update of the weights alone
    assert {"sglang"} <= {name.partition("_")[0] for name in joined.memory} <= {"torch", "sglang"}
    assert not joined.memory_left


@pytest.mark.full
@pytest.mark.real
@pytest.mark.timeout(600)
def test_a_command_on_a_head_without_a_gpu_is_for_the_clusters_gpus(qwen3: Assets, tmp_path: Path) -> None:
    words = train_command(qwen3, tmp_path, rollouts=1, save=False)[2:]
    assert run_device() == "cpu" and not parse_train(words).megatron.bf16
    with ray_cluster(tmp_path / "cluster.txt", gpus=2):
        settings = parse_train(words)
        assert run_device() == "cuda" and settings.megatron.bf16 and settings.megatron.use_distributed_optimizer
        with pytest.raises(ConfigError, match="are on other machines than this one; give --device NAME"):
            find_device(None, None)
