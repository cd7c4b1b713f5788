"""Quantized models as the input of `hf-to-torch-dist`, and as the origin on the way back."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from slime_convert import (
    ModelShape,
    fp8_to_bf16,
    hf_to_fp8,
    hf_to_int4,
    hf_to_torch_dist,
    int4_to_bf16,
    megatron_to_hf,
    torch_dist_to_hf,
)
from slime_convert.cli import main
from slime_convert.errors import WeightError
from slime_convert.formats import open_checkpoint
from slime_convert.formats.torch_dist_names import places
from slime_convert.inspection import inspect_checkpoint
from slime_convert.mapping import WeightMap
from slime_convert.published import PUBLISHED
from slime_convert.quantize.numbers import quantize_fp8
from support.family_models import assert_same_weights, read, weights_of

# Blocks of 128 are cut off at the edge of every matrix. As published: 576 rows of latent and rotated channels.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 160,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,  # two in each of the groups
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "q_lora_rank": 130,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
    "vocab_size": 101,
}
MODELS = {
    "deepseek-v3-fp8": (hf_to_fp8, fp8_to_bf16),
    "kimi-k2-fp8": (hf_to_fp8, fp8_to_bf16),
    "kimi-k2-int4": (hf_to_int4, int4_to_bf16),
}
EXPERT = "model.layers.1.mlp.experts.5.gate_proj.weight"


def assert_same_files(ours, theirs):
    """Of two checkpoints: all but `.metadata`, in which torch writes its path and a random number."""
    names = {path.name for path in ours.iterdir()}
    assert names == {path.name for path in theirs.iterdir()} and {"common.pt", ".metadata"} < names
    for name in names - {".metadata"}:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def make_unquantized(name, directory):
    """A random model of a published one's names and small sizes, with a prediction module where that has one."""
    directory.mkdir()
    config = {**PUBLISHED[name].config, **SMALL, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    weight_map = WeightMap(ModelShape.from_hf_config(config))
    torch.manual_seed(0)
    weights = {}
    for megatron_name in weight_map.megatron_names():
        # As published, the router's bias is float32.
        dtype = torch.float32 if megatron_name.endswith("expert_bias") else torch.bfloat16
        whole = torch.randn(weight_map.megatron_shape(megatron_name)).to(dtype)
        weights |= {part: tensor.clone() for part, tensor in weight_map.to_hf(megatron_name, whole)}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module", params=MODELS)
def quantized(request, tmp_path_factory):
    """A quantized model, and the same one expanded by its own command. Not to be changed."""
    quantize, expand = MODELS[request.param]
    name, _, kind = request.param.rpartition("-")
    root = tmp_path_factory.mktemp(name)
    # Scales come to lie in other files than their weights.
    quantize(make_unquantized(name, root / "origin"), root / kind, max_shard_bytes=100_000)
    expand(root / kind, root / "bf16")
    return SimpleNamespace(name=name, kind=kind, directory=root / kind, expanded=root / "bf16", expand=expand)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """DeepSeek's FP8 model in one file. Not to be changed."""
    root = tmp_path_factory.mktemp("deepseek")
    hf_to_fp8(make_unquantized("deepseek-v3", root / "origin"), root / "fp8")
    return root / "fp8"


def test_the_checkpoint_is_that_of_the_expanded_model(quantized, tmp_path):
    directory, stored = quantized.directory, weights_of(quantized.directory)
    scaled = {re.sub(r"\d+", "N", name) for name in stored if "_scale" in name}
    experts = {f"model.layers.N.mlp.experts.N.{kind}_proj.weight" for kind in ("gate", "up", "down")}
    if quantized.kind == "int4":
        assert scaled == {f"{name}_scale" for name in experts}
    else:
        assert {f"{name}_scale_inv" for name in experts} < scaled
        assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 160)
        assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
        assert "model.layers.N.mlp.gate.weight_scale_inv" not in scaled
    if quantized.name == "deepseek-v3":
        assert "model.layers.2.mlp.experts.0.up_proj.weight_scale_inv" in stored  # the prediction module's
        assert stored["model.layers.2.eh_proj.weight"].dtype is torch.bfloat16
    hf_to_torch_dist(directory, tmp_path / "ours")
    hf_to_torch_dist(quantized.expanded, tmp_path / "theirs")
    assert_same_files(tmp_path / "ours" / "release", tmp_path / "theirs" / "release")
    checkpoint = open_checkpoint(tmp_path / "ours")
    assert checkpoint.arguments["params_dtype"] == "bfloat16"
    found = checkpoint.named(WeightMap(ModelShape.from_hf_config(directory)))
    other_types = {name for name, info in found.items() if info.dtype != "bfloat16"}
    assert other_types and all(name.endswith("expert_bias") for name in other_types)
    counts = [inspect_checkpoint(path).num_parameters for path in (directory, quantized.expanded, tmp_path / "ours")]
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("convert", [torch_dist_to_hf, megatron_to_hf])
def test_the_way_back_to_a_quantized_origin_is_unquantized(quantized, tmp_path, convert):
    directory, expanded = quantized.directory, quantized.expanded
    hf_to_torch_dist(directory, tmp_path / "td")
    assert convert(tmp_path / "td", tmp_path / "back", directory).copied == ()
    assert {path.name for path in (tmp_path / "back").iterdir()} == {path.name for path in expanded.iterdir()}
    assert (tmp_path / "back" / "config.json").read_bytes() == (expanded / "config.json").read_bytes()
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert_same_weights(tmp_path / "back", expanded)


def save_as_a_trainer(path, checkpoint, names):
    """An iteration of Megatron's with some weights, each layer's and expert's under keys of their own; no arguments."""
    opened = open_checkpoint(checkpoint)
    keys = {name: next(p.keys[0] for p in places(name) if not p.index and len(p.keys) == 1) for name in names}
    dcp.save({key: read(opened, name) for name, key in keys.items()}, checkpoint_id=path, no_dist=True)
    shutil.copy(opened.directory / "metadata.json", path)
    torch.save({"iteration": 3}, path / "common.pt")
    return path


def add_tower(directory, **tensors):
    """Weights that no table knows, in a file of their own."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "tower.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors, directory / "tower.safetensors")


def test_what_a_quantized_origin_adds_is_expanded(quantized, tmp_path):
    """The prediction module and an expert, which the checkpoint lacks, and a tower that no table knows."""
    directory = shutil.copytree(quantized.directory, tmp_path / "origin")
    tower = {"visual.norm.weight": torch.ones(3)}
    if quantized.kind == "fp8":
        q, scale = quantize_fp8(torch.randn(200, 130).bfloat16())
        tower |= {"visual.up_proj.weight": q, "visual.up_proj.weight_scale_inv": scale}
    add_tower(directory, **tower)
    quantized.expand(directory, tmp_path / "bf16")

    hf_to_torch_dist(quantized.directory, tmp_path / "td")
    names = WeightMap(ModelShape.from_hf_config(directory)).megatron_names()
    held = [name for name in names if not name.startswith("mtp.") and "local_experts.5." not in name]
    trained = save_as_a_trainer(tmp_path / "iter_0000003", tmp_path / "td", held)
    copied = torch_dist_to_hf(trained, tmp_path / "back", directory, add_missing_from_origin_hf=True).copied
    assert {EXPERT, *tower} - {"visual.up_proj.weight_scale_inv"} < set(copied)
    assert not any(name.endswith(("embed_tokens.weight", "head.weight")) for name in copied)  # the checkpoint has them
    assert_same_weights(tmp_path / "back", tmp_path / "bf16")
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "bf16" / "config.json").read_bytes()


def with_gate_as(directory, path, tensor_of):
    """A copy of an FP8 model in which one expert's gate is not FP8, as its neighbour is."""
    shutil.copytree(directory, path)
    weights = weights_of(path)
    weights.pop(f"{EXPERT}_scale_inv")
    weights[EXPERT] = tensor_of(weights[EXPERT].shape)
    save_file(weights, path / "model.safetensors")
    return path


def test_one_weights_parts_may_be_quantized_in_part(deepseek, tmp_path):
    torch.manual_seed(1)
    mixed = with_gate_as(deepseek, tmp_path / "mixed", lambda shape: torch.randn(shape).bfloat16())
    fp8_to_bf16(mixed, tmp_path / "bf16")
    hf_to_torch_dist(mixed, tmp_path / "ours")
    hf_to_torch_dist(tmp_path / "bf16", tmp_path / "theirs")
    assert_same_files(tmp_path / "ours" / "release", tmp_path / "theirs" / "release")


def test_parts_of_two_types_are_told(deepseek, tmp_path):
    mixed = with_gate_as(deepseek, tmp_path / "mixed", torch.randn)
    told = r"experts\.5\.gate_proj\.weight and .*up_proj\.weight have types bfloat16, float32, but Megatron"
    with pytest.raises(WeightError, match=told):
        hf_to_torch_dist(mixed, tmp_path / "td")
    assert not (tmp_path / "td").exists()


def test_a_prediction_module_with_an_output_layer_of_its_own_is_refused(deepseek, tmp_path):
    shutil.copytree(deepseek, tmp_path / "fp8")
    weights = weights_of(deepseek)
    weights["model.layers.2.shared_head.head.weight"] += 1
    save_file(weights, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(WeightError, match=r"shared_head\.head\.weight .* differs from lm_head\.weight"):
        hf_to_torch_dist(tmp_path / "fp8", tmp_path / "td")


def test_on_the_command_line(quantized, tmp_path, capfd):
    directory, expanded = str(quantized.directory), str(quantized.expanded)
    for given, save in ((directory, "ours"), (expanded, "theirs")):
        flags = ModelShape.from_hf_config(given).to_megatron_flags()
        assert main(["hf-to-torch-dist", "--hf-checkpoint", given, "--save", str(tmp_path / save), *flags]) == 0
    assert_same_files(tmp_path / "ours" / "release", tmp_path / "theirs" / "release")
    words = ["--output-dir", str(tmp_path / "back"), "--origin-hf-dir", directory]
    assert main(["torch-dist-to-hf", "--input-dir", str(tmp_path / "ours"), *words]) == 0
    out, err = capfd.readouterr()
    assert all("%, " in line for line in err.splitlines())  # progress, on a busy machine
    assert [line.split()[0] for line in out.splitlines()] == ["wrote"] * 3
    assert_same_weights(tmp_path / "back", quantized.expanded)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq' in quantization_config of .* is not supported"),
        ({"quant_method": "fp8"}, r"weight_block_size None in .* is not supported; allowed: two whole numbers"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format 'float-quantized' in .* allowed"),
    ],
)
def test_another_quantization_is_told_and_nothing_written(deepseek, tmp_path, capfd, settings, told):
    other = shutil.copytree(deepseek, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    assert main(["hf-to-torch-dist", "--hf-checkpoint", str(other), "--save", str(tmp_path / "td")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and re.search(told, err)
    assert list(tmp_path.iterdir()) == [other]


def test_a_quantized_models_shape_is_the_models(deepseek):
    config = json.loads((deepseek / "config.json").read_text())
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    assert plain != config and ModelShape.from_hf_config(config) == ModelShape.from_hf_config(plain)
