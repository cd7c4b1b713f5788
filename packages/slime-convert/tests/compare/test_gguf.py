"""GGUF files compared, which ``gguf``'s own writer and quantizers made of a transformers model's weights."""

import json

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime_convert import hf_to_fp8, hf_to_torch_dist, verify
from slime_convert.errors import GgufError, UnsupportedModelError
from slime_convert.formats.gguf import GgufWeights, need_extra
from support.family_models import read, weights_of

ROWS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
ROWS |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NORMS |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
TOP |= {"lm_head.weight": "output.weight"}
HEADS = {"q_proj": 4, "k_proj": 2}
UP = "model.layers.1.mlp.up_proj.weight"


def gguf_name(name):
    if name in TOP:
        return TOP[name]
    _, _, layer, *_, module, _ = name.split(".")
    return f"blk.{layer}.{(ROWS | NORMS)[module]}.weight"


def write(path, weights, kind="F32", architecture="llama", more=None, settings=None):
    """Matrices of one type, all else in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, value in (settings or {}).items():
        writer.add_string(name, value)
    for name, tensor in weights.items():
        heads = HEADS.get(name.split(".")[-2]) if architecture == "llama" else None
        if heads:  # llama.cpp rotates neighbouring channels
            tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        data, type_ = tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind]
        if tensor.dim() == 2 and kind != "F32":
            writer.add_tensor(gguf_name(name), gguf.quantize(data, type_), raw_dtype=type_)
        else:
            writer.add_tensor(gguf_name(name), data)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def origin(request, tmp_path_factory):
    """A model in float32. Not to be changed."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[request.param](**sizes, tie_word_embeddings=False)
    path = tmp_path_factory.mktemp(request.param) / "origin"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def family(origin):
    return json.loads((origin / "config.json").read_text())["model_type"]


def test_the_same_weights_are_equal(origin, family, tmp_path):
    path = write(tmp_path / "a.gguf", weights_of(origin), architecture=family)
    hf_to_torch_dist(origin, tmp_path / "td")
    for other in (origin, tmp_path / "td", path):
        for sides in ((path, other), (other, tmp_path)):
            found = verify(*sides)
            assert found.equal and found.num_equal == len(weights_of(origin)) and not found.notes
    assert found.to_text().startswith(f"gguf {path} (F32; expanded to float32)\n")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_quantized_weights_are_expanded(origin, family, tmp_path, kind):
    """To what gguf's own reader gives."""
    weights = weights_of(origin)
    path = write(tmp_path / "a.gguf", weights, kind, family)
    found = verify(origin, path)
    assert {d.kind for d in found.differences} == {"values"} and found.num_equal == sum(
        tensor.dim() == 1 for tensor in weights.values()
    )
    # The same type by gguf's quantizer and back, on the weight in Hugging Face's order of rows: rows are independent.
    type_, worst = gguf.GGMLQuantizationType[kind], 0.0
    for tensor in weights.values():
        if tensor.dim() == 2:
            back = gguf.dequantize(gguf.quantize(tensor.numpy(), type_), type_)
            worst = max(worst, float(np.abs(back.astype(np.float64) - tensor.double().numpy()).max()))
    assert found.differences[0].max_abs_diff == worst
    assert verify(origin, path, tolerance=worst).equal


def test_a_quantized_directory_is_expanded_too(origin, family, tmp_path):
    hf = tmp_path / "hf"
    hf.mkdir()
    halves = {name: tensor.bfloat16() for name, tensor in weights_of(origin).items()}
    save_file(halves, hf / "model.safetensors")
    (hf / "config.json").write_bytes((origin / "config.json").read_bytes())
    hf_to_fp8(hf, tmp_path / "fp8")
    found = verify(write(tmp_path / "a.gguf", halves, "Q8_0", family), tmp_path / "fp8", tolerance=0.1)
    assert found.equal and "expanded to bfloat16" in found.right.storage and "to float32" in found.left.storage


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_one_element_is_found_and_named(origin, family, tmp_path_factory, data):
    """In whichever row of a head it is."""
    weights = weights_of(origin)
    name = data.draw(st.sampled_from(sorted(weights)))
    flat = weights[name].view(-1)
    flat[data.draw(st.integers(0, len(flat) - 1))] += 1
    path = write(tmp_path_factory.mktemp("changed") / "a.gguf", weights, architecture=family)
    (difference,) = verify(path, origin).differences
    assert (difference.name, difference.kind, difference.num_differing) == (name, "values", 1)


def test_missing_and_extra_weights_are_named(origin, family, tmp_path):
    weights = weights_of(origin)
    del weights[UP]
    more = {"blk.0.attn_q.bias": np.ones(64, np.float32), "rope_freqs.weight": np.ones(8, np.float32)}
    found = verify(origin, write(tmp_path / "a.gguf", weights, architecture=family, more=more))
    assert [(d.name, d.kind) for d in found.differences] == [(UP, "missing"), ("blk.0.attn_q.bias", "extra")]


def test_with_a_scaled_rotary_embedding_the_other_side_gives_the_shape(origin, family, tmp_path):
    more = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write(tmp_path / "a.gguf", weights_of(origin), architecture=family, more=more)
    assert GgufWeights(path).shape is None
    hf_to_torch_dist(origin, tmp_path / "td")
    found = verify(path, tmp_path / "td")
    assert found.equal and not found.notes


def test_a_tied_output_layer_may_be_stored_or_not(origin, family, tmp_path):
    weights = weights_of(origin)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    full = write(tmp_path / "full.gguf", weights, architecture=family)
    del weights["lm_head.weight"]
    bare = write(tmp_path / "bare.gguf", weights, architecture=family)
    # One that stores its output layer is taken for untied, so that nothing is passed over.
    assert [(d.name, d.kind) for d in verify(full, bare).differences] == [("lm_head.weight", "missing")]
    hf = tmp_path / "hf"
    hf.mkdir()
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, hf / "model.safetensors")
    assert verify(bare, hf).equal


def test_large_weights_are_expanded_in_parts(origin, family, tmp_path, monkeypatch):
    monkeypatch.setattr("slime_convert.formats.gguf._ROWS_ELEMENTS", 200)  # three rows of 64, two of 96
    path = write(tmp_path / "a.gguf", weights_of(origin), "Q8_0", family)
    weights = GgufWeights(path)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in (UP, "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        theirs = reader[gguf_name(name)]
        expected = gguf.dequantize(theirs.data, theirs.tensor_type)
        assert read(weights, name).numpy().tobytes() == expected.tobytes()


def test_what_cannot_be_compared_is_told(origin, family, tmp_path):
    weights = weights_of(origin)
    other = write(tmp_path / "a.gguf", weights, architecture="qwen2")
    with pytest.raises(UnsupportedModelError, match="holds a qwen2 model; GGUF files are read of llama, qwen3;"):
        verify(other, origin)
    with pytest.raises(GgufError, match=r"c\.gguf lacks a number that gives the model's shape"):
        verify(write(tmp_path / "c.gguf", {}, architecture=family), origin)
    wrong = {"blk.0.ffn_up.weight": np.ones((96, 64), np.int8)}
    del weights["model.layers.0.mlp.up_proj.weight"]
    path = write(tmp_path / "b.gguf", weights, architecture=family, more=wrong)
    with pytest.raises(GgufError, match=r"cannot read blk\.0\.ffn_up\.weight of .*b\.gguf .*I8"):
        verify(path, origin)


def test_a_projection_without_columns_is_another_shape(origin, family, tmp_path):
    weights = weights_of(origin)
    del weights["model.layers.1.self_attn.k_proj.weight"]
    empty = {"blk.1.attn_k.weight": np.empty((32, 0), np.float32)}
    file = write(tmp_path / "a.gguf", weights, architecture=family, more=empty)
    assert verify(file, file).equal
    assert [difference.kind for difference in verify(file, origin).differences] == ["shape"]


def test_the_extra_is_asked_for(origin, family, tmp_path, monkeypatch):
    path = write(tmp_path / "a.gguf", weights_of(origin), architecture=family)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GgufError, match=r"reading GGUF needs gguf, which is not installed; run: .*install .*'gguf>="):
        verify(path, origin)
    with pytest.raises(GgufError, match=r"needs gguf and transformers, which are not installed; run: .*'gguf>="):
        need_extra("gguf", "transformers")
