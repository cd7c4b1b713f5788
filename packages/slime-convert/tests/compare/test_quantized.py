"""Quantized directories compared with others: expanded where only one side is quantized, or each in its own way."""

import json
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime_convert import fp8_to_bf16, hf_to_fp8, hf_to_int4, hf_to_torch_dist, int4_to_bf16, verify
from slime_convert.errors import QuantizationError
from slime_convert.inspection import inspect_checkpoint
from support.family_models import weights_of

EXPANDED = {
    "fp8": "fp8, fmt e4m3, weight_block_size [128, 128]; expanded to bfloat16",
    "int4": "compressed-tensors, format pack-quantized, num_bits 4, group_size 32; expanded to bfloat16",
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A model whose rows hold whole groups, and what becomes of it. Not to be changed."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    root = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root / "origin")
    hf_to_fp8(root / "origin", root / "fp8")
    hf_to_int4(root / "origin", root / "int4", group_size=32)
    fp8_to_bf16(root / "fp8", root / "fp8-bf16")
    int4_to_bf16(root / "int4", root / "int4-bf16")
    hf_to_torch_dist(root / "origin", root / "td")
    return root


def worst_error(directory, origin):
    """Against the output of the conversion back, by torch alone."""
    theirs, ours = weights_of(origin), weights_of(directory)
    return max(float((theirs[name].double() - ours[name].double()).abs().max()) for name in theirs)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_one_quantized_side_is_expanded(quantized, kind):
    found = verify(quantized / kind, quantized / f"{kind}-bf16")
    assert found.equal and (found.left.storage, found.right.storage) == (EXPANDED[kind], None)
    assert found.to_text().startswith(f"hf {quantized / kind} ({EXPANDED[kind]})\nhf ")
    assert found.to_json()["left"]["storage"] == EXPANDED[kind]
    for other in ("origin", "td"):
        found = verify(quantized / other, quantized / kind)
        assert {d.kind for d in found.differences} == {"values"} and len(found.differences) == 14
        assert all("_proj." in d.name for d in found.differences)
        worst = worst_error(quantized / f"{kind}-bf16", quantized / "origin")
        assert found.differences[0].max_abs_diff == worst > 0
        assert verify(quantized / other, quantized / kind, tolerance=worst).equal
        assert not verify(quantized / other, quantized / kind, tolerance=worst * 0.99).equal


def test_both_in_the_same_way_are_compared_as_they_are_stored(quantized, tmp_path):
    found = verify(quantized / "fp8", quantized / "fp8")
    assert found.equal and found.left.storage == EXPANDED["fp8"].replace("expanded to bfloat16", "compared as stored")
    assert found.num_equal == len(weights_of(quantized / "fp8"))  # scales among them
    shutil.copytree(quantized / "fp8", tmp_path / "changed")
    path = tmp_path / "changed" / "model.safetensors"
    weights, name = load_file(path), "model.layers.0.mlp.up_proj.weight_scale_inv"
    weights[name] *= 2
    save_file(weights, path)
    assert [d.name for d in verify(quantized / "fp8", tmp_path / "changed").differences] == [name]


def test_both_in_different_ways_are_expanded(quantized):
    found = verify(quantized / "fp8", quantized / "int4", tolerance=1)
    assert found.equal and (found.left.storage, found.right.storage) == (EXPANDED["fp8"], EXPANDED["int4"])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_one_nibble_is_found_and_named(quantized, tmp_path_factory, data):
    """An INT4 word is eight weights: a bit of it changes one of them, by a power of two of its scale."""
    weights = weights_of(quantized / "int4")
    name = data.draw(st.sampled_from(sorted(name for name in weights if name.endswith("_packed"))))
    words = weights[name]
    row, word = data.draw(st.integers(0, words.shape[0] - 1)), data.draw(st.integers(0, words.shape[1] - 1))
    bit = data.draw(st.integers(0, 30))  # the sign bit of a word cannot be shifted into place
    words[row, word] ^= 1 << bit
    path = tmp_path_factory.mktemp("changed")
    save_file(weights, path / "model.safetensors")
    shutil.copy(quantized / "int4" / "config.json", path)
    (difference,) = verify(path, quantized / "int4-bf16").differences
    scale = float(weights[name.removesuffix("_packed") + "_scale"][row, word * 8 // 32])
    assert (difference.name, difference.num_differing) == (name.removesuffix("_packed"), 1)
    assert difference.max_abs_diff == pytest.approx(
        scale * 2 ** (bit % 4), abs=scale / 16
    )  # up to 8 × scale is rounded to bfloat16


def test_a_way_that_is_not_read(quantized, tmp_path):
    """Two such directories are compared as they are stored; with another it cannot be compared."""
    shutil.copytree(quantized / "origin", tmp_path / "gptq")
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    found = verify(tmp_path / "gptq", tmp_path / "gptq")
    assert found.equal and found.right.storage == "gptq, bits 4; compared as stored"
    shutil.copytree(tmp_path / "gptq", tmp_path / "awq")
    config["quantization_config"] = {"quant_method": "awq"}
    (tmp_path / "awq" / "config.json").write_text(json.dumps(config))
    assert verify(tmp_path / "gptq", tmp_path / "awq").equal
    for other in ("origin", "fp8", "td"):
        with pytest.raises(QuantizationError, match=r"quant_method 'gptq' in .* is not supported"):
            verify(quantized / other, tmp_path / "gptq")


def test_inspect_knows_the_shape_and_the_older_key(quantized, tmp_path):
    theirs = inspect_checkpoint(quantized / "origin")
    for kind in EXPANDED:
        contents = inspect_checkpoint(quantized / kind)
        assert (contents.shape, contents.num_parameters) == (theirs.shape, theirs.num_parameters)
        assert f"{contents.quantization}; expanded to bfloat16" == EXPANDED[kind]
    shutil.copytree(quantized / "int4", tmp_path / "older")
    config = json.loads((tmp_path / "older" / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "older" / "config.json").write_text(json.dumps(config))
    assert inspect_checkpoint(tmp_path / "older").quantization == contents.quantization
    assert verify(tmp_path / "older", quantized / "origin").left.storage == EXPANDED["int4"]


def test_what_a_config_says_commands_no_terminal(tmp_path):
    """Nor does it look like a line of the outcome."""
    quantization = {"quant_method": "gptq\x1b[2J\nequal: 9 equal", "bits": "\x1b[1m"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    text = verify(tmp_path, tmp_path).to_text()
    assert "\x1b" not in text and r"gptq\x1b[2J\nequal" in text
    assert len([line for line in text.splitlines() if line.startswith("equal")]) == 1
