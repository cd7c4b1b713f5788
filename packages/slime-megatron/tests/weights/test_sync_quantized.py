"""Engines with quantized weights get exactly what slime-convert makes of the trainer's. Not run on CUDA."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert import hf_to_fp8, hf_to_int4

MAKERS = {"fp8": hf_to_fp8, "int4": hf_to_int4}


@pytest.fixture
def bfloat16_model(tiny_model, tmp_path):
    """A tiny model whose weights are stored in bfloat16, as published ones are."""

    def build(name):
        model = tiny_model(name)
        directory = shutil.copytree(model.hf_directory, tmp_path / "bf16")
        [path] = directory.glob("*.safetensors")
        save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, metadata={"format": "pt"})
        return directory, model.shape

    return build


def stored(directory):
    return {name: value for path in Path(directory).glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("form", "name", "world", "settings"),
    [
        ("fp8", "qwen3", 2, {"tensor_model_parallel_size": 2, "bf16": True}),
        ("int4", "qwen3-moe", 2, {"expert_model_parallel_size": 2}),
        pytest.param("fp8", "qwen3-moe", 2, {"pipeline_model_parallel_size": 2}, marks=pytest.mark.full),
        pytest.param("fp8", "deepseek", 1, {"bf16": True}, marks=pytest.mark.full),
        pytest.param("int4", "kimi-k2", 1, {"bf16": True}, marks=pytest.mark.full),
    ],
)
def test_the_pushed_tensors_are_the_quantized_models(
    ranks, bfloat16_model, tiny_config, tmp_path, form, name, world, settings
):
    """Trained weights that equal the model's give every file's tensor again: name, type, shape and bits."""
    directory, shape = bfloat16_model(name)
    MAKERS[form](directory, tmp_path / "quantized")
    expected = stored(tmp_path / "quantized")
    assert {value.dtype for value in expected.values()} >= {torch.bfloat16}
    ranks.start(world, tiny_config(load=directory, **settings), shape, quantized_as=tmp_path / "quantized")
    report = ranks.first("push_to_file", tmp_path / "sent.safetensors")
    sent = load_file(tmp_path / "sent.safetensors")
    assert sent.keys() == expected.keys()
    for key, value in expected.items():
        assert (sent[key].dtype, sent[key].shape) == (value.dtype, value.shape), key
        assert torch.equal(sent[key].view(torch.uint8), value.view(torch.uint8)), key
    assert (report.tensors, report.bytes) == (len(expected), 2 * sum(value.nbytes for value in expected.values()))


def test_a_weight_that_cannot_be_scaled_leaves_no_rank_waiting(ranks, bfloat16_model, tiny_config, tmp_path):
    directory, shape = bfloat16_model("qwen3")
    hf_to_fp8(directory, tmp_path / "quantized")
    config = tiny_config(load=directory, tensor_model_parallel_size=2)
    ranks.start(2, config, shape, quantized_as=tmp_path / "quantized")
    ranks.call("spoil", "decoder.layers.0.mlp.linear_fc1.weight")
    first, other = ranks.call("error_of", "push", 1)
    assert first.startswith("WeightError: model.layers.0.mlp.gate_proj.weight holds a NaN")
    assert other is None
