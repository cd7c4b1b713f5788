"""Checkpoints that are written in the background hold what was there when they were asked for, or none is found."""

import signal
from pathlib import Path

import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.checkpoints.find import find_checkpoint

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
LAYOUTS = {
    "one, bf16": ("qwen3", 1, {"bf16": True}),
    "pp2 + distributed optimizer": (
        "qwen3",
        2,
        {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    ),
    "tp2, routers with a bias": (
        "glm4-moe/4",
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "bf16": True,
            "megatron_args": {"moe_router_bias_update_rate": 0.01},
        },
    ),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] * ("bias" in name)) for name in LAYOUTS]
)
def test_training_goes_on_while_it_is_written(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, layout
):
    family, world, values = LAYOUTS[layout]
    model = tiny_model(family)
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
    assert ranks.call("is_released") == [True] * world
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


def test_what_is_written_before_a_step_is_not_copied(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path
):
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True), model.shape, GRPO)
    ranks.call("save", 1)
    assert ranks.call("saved", wait=True) == [True]
    ranks.call("train", make_shards(make_samples()))
    assert ranks.call("is_released") == [False]


def test_without_memory_for_copies_a_step_waits(ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True, tensor_model_parallel_size=2)
    ranks.start(2, config, model.shape, GRPO)
    before = ranks.call("hashes")
    ranks.call("hold_saves")
    ranks.call("save", 1)
    ranks.call("leave_no_memory")
    ranks.call("train", make_shards(make_samples()))
    assert ranks.call("is_released") == [False, False]
    assert ranks.call("saved", wait=True) == [True, True]
    ranks.start(2, config, model.shape, GRPO, resume_from=str(tmp_path))
    assert ranks.call("hashes") == before


def test_its_files_are_those_of_one_that_is_waited_for(ranks, tiny_model, tiny_config, tmp_path):
    model, found = tiny_model("qwen3"), []
    for name, background in (("here", False), ("there", True)):
        config = tiny_config(load=model.checkpoint, save=str(tmp_path / name), async_save=background, bf16=True)
        ranks.start(1, config, model.shape)
        directory = Path(ranks.first("save", 1))
        assert ranks.call("saved", wait=True) == [True]
        found.append({path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".metadata"})
    assert found[0] == found[1]
    assert {"common.pt", "metadata.json", "__0_0.distcp"} == set(found[0])


@pytest.mark.parametrize("step", ["save_config", "_publish"])
def test_killed_while_it_is_written_the_one_before_is_found(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, step
):
    """With SIGKILL, when its tensors lie on the disk, and when all of it does."""
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True)
    ranks.start(1, config, model.shape, GRPO)
    ranks.call("save", 1)
    assert ranks.call("saved", wait=True) == [True]
    expected = ranks.call("hashes")
    ranks.call("train", make_shards(make_samples()))
    ranks.call("hold_saves", step)
    directory = Path(ranks.first("save", 2))
    ranks.call("wait_until_held")
    assert (directory.with_name(directory.name + ".tmp") / "__0_0.distcp").stat().st_size > 0
    for member in ranks._members:
        member.process.send_signal(signal.SIGKILL)
        member.process.wait(60)
    ranks._abandon()
    assert not directory.exists()
    assert find_checkpoint(tmp_path).iteration == 1
    ranks.start(1, config, model.shape, GRPO, resume_from=str(tmp_path))
    assert ranks.call("hashes") == expected
    ranks.call("save", 2)
    assert ranks.call("saved", wait=True) == [True]
    assert find_checkpoint(tmp_path).iteration == 2


def test_where_the_disk_has_no_room_it_is_waited_for_and_named(ranks, tiny_model, tiny_config, tmp_path):
    model = tiny_model("qwen3")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), async_save=True, tensor_model_parallel_size=2)
    ranks.start(2, config, model.shape)
    for answer in ranks.call("save_on_a_full_disk", 1, 0, 4096):
        assert answer.startswith(f"TrainerCheckpointError: cannot write the checkpoint {tmp_path / 'iter_0000001'}: ")
        assert "the disk is full" in answer
    assert list(tmp_path.iterdir()) == []


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
        assert error.startswith(f"TrainerCheckpointError: cannot write the checkpoint {tmp_path / 'iter_0000002'}: ")
        assert "File too large" in error
    assert find_checkpoint(tmp_path).iteration == 1
    assert not any(tmp_path.glob("*.tmp"))
    ranks.call("train", make_shards(make_samples()))
    ranks.call("save", 2)
    assert ranks.call("saved", wait=True) == [True, True]
    assert find_checkpoint(tmp_path).iteration == 2
