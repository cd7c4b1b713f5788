"""Model directories: their config, quantization, and files that are copied along."""

import json

import pytest

from slime_convert.errors import HfConfigError, WeightError
from slime_convert.files.tensors import LazyTensor
from slime_convert.formats.hf import HfWeights, describe_quantization, packed_bits, read_config, refuse_other_copies

INT4 = {"num_bits": 3, "group_size": 32}
PACKED = {"quant_method": "compressed-tensors", "format": "x", "config_groups": {"a": {"weights": INT4}}}


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_directory_without_a_config_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HfConfigError, match="give a Hugging Face model directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("settings", "told", "bits"),
    [
        ({}, None, 4),
        ({"quant_method": "gptq", "bits": 2}, "gptq, bits 2", 4),
        (PACKED, "compressed-tensors, format x, num_bits 3, group_size 32", 3),
        ({"quant_method": "fp8", "weight_block_size": [8, 16]}, "fp8, fmt e4m3, weight_block_size [8, 16]", 4),
    ],
)
def test_quantization_in_one_line(settings, told, bits):
    config = {"quantization_config": settings}
    assert describe_quantization(config) == told and packed_bits(config) == bits


def test_weights_are_there_with_or_without_a_config(one_origin, tmp_path):
    for path in one_origin.glob("*.safetensors*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    bare, whole = HfWeights(tmp_path), HfWeights(one_origin)
    assert bare.tensors == whole.tensors and bare.files == whole.files
    assert (bare.shape, bare.tied, bare.config) == (None, None, {}) and whole.shape is not None
    assert whole.config == json.loads((one_origin / "config.json").read_text())
    assert whole.expanded() is whole


def test_an_output_layer_that_is_no_copy_is_refused_where_it_is_tied():
    one, other = LazyTensor.zeros("float32", (2,)), LazyTensor.made("float32", (2,), lambda: memoryview(b"12345678"))
    copies = {"lm_head.weight": one, "model.embed_tokens.weight": other}
    refuse_other_copies(copies, None, "there", tied=False)
    with pytest.raises(WeightError, match="tie_word_embeddings of its config is true; set it to false"):
        refuse_other_copies(copies, None, "there", tied=True)
