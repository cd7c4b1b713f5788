"""Megatron's legacy ``torch`` checkpoints load at any parallel size, with the weights of the checkpoint bit for bit."""

import dataclasses
import shutil

import pytest
import torch

from slime_megatron.checkpoints.find import checkpoint_root, find_checkpoint
from slime_megatron.errors import TrainerCheckpointError

PLAIN = (1, {})
TENSOR = (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
STAGES = (2, {"pipeline_model_parallel_size": 2})
VIRTUAL = (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2})
EXPERTS = (2, {"expert_model_parallel_size": 2})
CASES = [
    ("qwen3", TENSOR, STAGES),
    ("llama-tied", STAGES, TENSOR),
    ("qwen3-moe", EXPERTS, TENSOR),
    pytest.param("qwen2-tied", PLAIN, TENSOR, marks=pytest.mark.full),
    pytest.param("qwen2-tied", TENSOR, PLAIN, marks=pytest.mark.full),
    pytest.param("qwen3/4", VIRTUAL, TENSOR, marks=pytest.mark.full),
    pytest.param("glm4-moe", TENSOR, EXPERTS, marks=pytest.mark.full),
    pytest.param("deepseek", TENSOR, STAGES, marks=pytest.mark.full),
    pytest.param("deepseek-mtp", STAGES, EXPERTS, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "written", "read"), CASES)
def test_any_layout_loads_into_any_other(ranks, tiny_model, tiny_config, tmp_path, name, written, read):
    model = tiny_model(name)
    ranks.start(written[0], tiny_config(load=model.checkpoint, **written[1]), model.shape)
    ranks.call("save_legacy", tmp_path)
    ranks.start(read[0], tiny_config(load=model.checkpoint, **read[1]), model.shape)
    expected = ranks.call("hashes")
    ranks.start(read[0], tiny_config(load=tmp_path, **read[1]), model.shape)
    assert ranks.call("hashes") == expected


@pytest.fixture
def written(ranks, tiny_model, tiny_config, tmp_path):
    """A checkpoint of two tensor-parallel ranks."""

    def write(**more):
        ranks.start(TENSOR[0], tiny_config(load=tiny_model("qwen3").checkpoint, **TENSOR[1]), tiny_model("qwen3").shape)
        ranks.call("save_legacy", tmp_path / "legacy", more)
        return tmp_path / "legacy"

    return write


def test_it_is_found_and_what_is_torn_is_named(written, tmp_path):
    root = written()
    found = find_checkpoint(root)
    assert (found.directory, found.iteration, found.format) == (root / "iter_0000012", None, "torch")
    assert find_checkpoint(found.directory) == found
    assert checkpoint_root(root) == root.resolve()
    path = found.directory / "mp_rank_01" / "model_optim_rng.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainerCheckpointError, match=r"mp_rank_01/model_optim_rng\.pt") as caught:
        find_checkpoint(root)
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(
        TrainerCheckpointError, match=r"mp_rank_01 has no model_optim_rng\.pt; the checkpoint is incomplete"
    ):
        find_checkpoint(root)
    shutil.rmtree(path.parent)
    with pytest.raises(TrainerCheckpointError, match=r"has no mp_rank_\* directory of tensor rank 1 of stage 0"):
        find_checkpoint(root)


def test_a_foreign_one_is_refused_and_nothing_in_it_is_run(ranks, written, tiny_model, tiny_config, rank_error):
    root, model = written(), tiny_model("qwen3")
    other = dataclasses.replace(model.shape, norm_epsilon=1e-3)
    with pytest.raises(rank_error, match=r"another model than .*: norm_epsilon 1e-06 \(config: 0\.001\)"):
        ranks.start(1, tiny_config(load=root), other)
    with pytest.raises(rank_error, match="holds no optimizer state that can be loaded, so no run can continue"):
        ranks.start(1, tiny_config(), model.shape, resume_from=root)
    path = root / "iter_0000012" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    del content["model"]["output_layer.weight"]
    torch.save(content | {"rng_state": Runs(root / "ran")}, path)
    with pytest.raises(TrainerCheckpointError, match=r"lacks shard 1 of 2 of output_layer\.weight"):
        find_checkpoint(root)
    assert not (root / "ran").exists()
    del content["model"]
    torch.save(content, path)
    with pytest.raises(TrainerCheckpointError, match="holds no model"):
        find_checkpoint(root)


def test_weights_of_another_meaning_are_refused(ranks, written, tiny_model, tiny_config, rank_error):
    root = written(apply_layernorm_1p=True)
    with pytest.raises(rank_error, match="with apply_layernorm_1p True, which gives weights another meaning"):
        ranks.start(1, tiny_config(load=root), tiny_model("qwen3").shape)


class Runs:
    """Makes a directory when it is unpickled by Python's own pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).mkdir, (self.path,)
