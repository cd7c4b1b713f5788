"""Checkpoints that are written in the background hold what was there when they were asked for, or none is found."""

from pathlib import Path

import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.checkpoint import find_checkpoint

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
LAYOUTS = {
    "one, bf16": (1, {"bf16": True}),
    "pp2 + distributed optimizer": (2, {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_goes_on_while_it_is_written(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, layout
):
    (world, values), model = LAYOUTS[layout], tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True, **values)
    first, second = (make_shards(make_samples(seed=seed), steps=2, rollout_id=seed) for seed in range(2))
    ranks.start(world, config, model.shape, GRPO)
    ranks.call("train", first)
    ranks.call("hold_saves")
    directory = Path(ranks.first("save", 1))
    before = ranks.call("hashes")
    expected = ranks.first("train", second).steps
    assert ranks.call("saved") == [False] * world
    assert not directory.exists()
    ranks.call("let_saves_go")
    assert ranks.call("saved", wait=True) == [True] * world
    assert ranks.call("saved") == [True] * world
    assert find_checkpoint(tmp_path).directory == directory
    ranks.start(world, config, model.shape, GRPO, resume_from=str(tmp_path))
    assert ranks.call("hashes") == before
    assert ranks.first("train", second).steps == expected


def test_the_next_one_waits_for_it_and_the_end_too(ranks, tiny_model, tiny_config, tmp_path):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True, tensor_model_parallel_size=2)
    ranks.start(2, config, model.shape)
    for iteration in (1, 2, 3):
        ranks.call("save", iteration)
        assert not (tmp_path / f"iter_{iteration - 2:07d}.tmp").exists()
    ranks.close()
    names = [f"iter_{iteration:07d}" for iteration in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "latest_checkpointed_iteration.txt"]
    assert [find_checkpoint(tmp_path / name).iteration for name in names] == [1, 2, 3]
    assert find_checkpoint(tmp_path).iteration == 3


@pytest.mark.parametrize("full_rank", [0, 1])
def test_that_it_failed_is_raised_by_the_next_call_of_every_rank(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, full_rank
):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True, tensor_model_parallel_size=2)
    ranks.start(2, config, model.shape)
    ranks.call("save", 1)
    assert ranks.call("saved", wait=True) == [True, True]
    assert ranks.call("save_on_a_full_disk", 2, full_rank) == [str(tmp_path / "iter_0000002")] * 2
    for error in ranks.call("error_of_training", make_shards(make_samples())):
        assert error.startswith(f"CheckpointError: cannot write the checkpoint {tmp_path / 'iter_0000002'}: ")
        assert "File too large" in error
    assert find_checkpoint(tmp_path).iteration == 1
    assert not any(tmp_path.glob("*.tmp"))
    ranks.call("train", make_shards(make_samples()))
    ranks.call("save", 2)
    assert ranks.call("saved", wait=True) == [True, True]
    assert find_checkpoint(tmp_path).iteration == 2
