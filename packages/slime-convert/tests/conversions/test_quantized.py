"""Whole conversions of tiny models that transformers made."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from slime_convert import fp8_to_bf16, hf_to_fp8, hf_to_int4, int4_to_bf16
from slime_convert.errors import OutputError, QuantizationError, WeightError
from slime_convert.formats.hf import open_model
from slime_convert.quantize.numbers import dequantize_fp8, dequantize_int4, pack_int4, quantize_fp8, quantize_int4
from support.family_models import read, same_bits, weights_of, write_model

SIZES = {
    "vocab_size": 101,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "dense": lambda: Qwen3Config(**SIZES),
    # A dense layer, then one with experts.
    "moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0]),
}
FILES = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def origin(request, tmp_path_factory):
    """A bfloat16 model in several files. Not to be changed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param](), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    path = tmp_path_factory.mktemp(request.param) / "origin"
    model.save_pretrained(path, max_shard_size="200KB")
    for name, text in FILES.items():
        (path / name).write_text(text)
    return path


def same(one, other):
    return one.keys() == other.keys() and all(same_bits(one[name], tensor) for name, tensor in other.items())


def config_of(directory):
    return json.loads((directory / "config.json").read_text())


def is_projection(name):
    return name.endswith("_proj.weight")


def test_fp8(origin, tmp_path):
    hf_to_fp8(origin, tmp_path / "fp8")
    before, after = weights_of(origin), weights_of(tmp_path / "fp8")
    expected = dict(before)
    for name in filter(is_projection, before):
        expected[name], expected[f"{name}_scale_inv"] = quantize_fp8(before[name])
    assert same(after, expected) and any(map(is_projection, before))
    config = config_of(tmp_path / "fp8")
    gates = ["model.layers.1.mlp.gate"] if config["model_type"] == "qwen3_moe" else []
    assert config.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", *gates],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config == config_of(origin) and config["dtype"] == "bfloat16"
    assert all((tmp_path / "fp8" / name).read_text() == text for name, text in FILES.items())


def test_fp8_there_and_back_and_there_again(origin, tmp_path):
    hf_to_fp8(origin, tmp_path / "fp8")
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16")
    fp8, back = weights_of(tmp_path / "fp8"), weights_of(tmp_path / "bf16")
    for name, tensor in weights_of(origin).items():
        wanted = dequantize_fp8(fp8[name], fp8[f"{name}_scale_inv"]) if is_projection(name) else tensor
        assert same_bits(back.pop(name), wanted)
    assert not back and config_of(tmp_path / "bf16") == config_of(origin)
    hf_to_fp8(tmp_path / "bf16", tmp_path / "again")
    assert same(weights_of(tmp_path / "again"), fp8)
    assert config_of(tmp_path / "again") == config_of(tmp_path / "fp8")
    model = open_model(tmp_path / "fp8")
    assert same({name: read(model, name) for name in model.tensors}, weights_of(tmp_path / "bf16"))


def test_transformers_reads_fp8_as_it_is_expanded_here(origin, tmp_path):
    """Without a GPU it expands the weights itself, by its own code (which wants blocks of equal size)."""
    hf_to_fp8(origin, tmp_path / "fp8")
    fp8_to_bf16(tmp_path / "fp8", tmp_path / "bf16")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("bf16", "fp8"))
    if not torch.cuda.is_available():
        assert same(ours.state_dict(), theirs.state_dict())
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)(ids).logits
        # The weights' relative error is at most 2**-4, and averages out.
        assert (ours.float()(ids).logits - exact).norm() < 2**-4 * exact.norm()


def test_int4(origin, tmp_path):
    hf_to_int4(origin, tmp_path / "int4")
    before, after = weights_of(origin), weights_of(tmp_path / "int4")
    config = config_of(tmp_path / "int4")
    has_experts = config["model_type"] == "qwen3_moe"
    expected, quantized = dict(before), [name for name in before if is_projection(name)]
    if has_experts:  # then Kimi-K2 quantizes only them
        quantized = [name for name in quantized if ".experts." in name]
    for name in quantized:
        packed, scale = quantize_int4(expected.pop(name), 32)
        shape = torch.tensor(before[name].shape)
        expected |= {f"{name}_packed": packed, f"{name}_scale": scale, f"{name}_shape": shape}
    assert same(after, expected) and quantized
    settings = config.pop("quantization_config")
    rules = ["lm_head"]
    if has_experts:
        rules += ["re:.*self_attn.*", "re:.*shared_experts?.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    gates = ["model.layers.1.mlp.gate"] if has_experts else []
    assert settings["ignore"] == [*rules, "model.embed_tokens", *gates]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config == config_of(origin)
    assert all((tmp_path / "int4" / name).read_text() == text for name, text in FILES.items())


@pytest.mark.parametrize("group_size", [32, 128])
def test_int4_and_back(origin, tmp_path, group_size):
    ignore = ["lm_head", "re:.*down_proj"]  # those have 64 columns in an expert
    hf_to_int4(origin, tmp_path / "int4", group_size=group_size, ignore=ignore)
    int4_to_bf16(tmp_path / "int4", tmp_path / "bf16")
    packed, back = weights_of(tmp_path / "int4"), weights_of(tmp_path / "bf16")
    for name, tensor in weights_of(origin).items():
        wanted = tensor
        if is_projection(name) and "down_proj" not in name:
            parts = packed[f"{name}_packed"], packed[f"{name}_scale"]
            wanted = dequantize_int4(*parts, tensor.shape[1], group_size)
        assert same_bits(back.pop(name), wanted)
    assert not back and config_of(tmp_path / "bf16") == config_of(origin)


def test_other_group_sizes_are_refused(origin, tmp_path):
    with pytest.raises(QuantizationError, match="group size 64 is not supported; allowed: 32, 128"):
        hf_to_int4(origin, tmp_path / "int4", group_size=64)


def test_columns_that_groups_do_not_divide_are_told_before_the_work(tmp_path):
    (tmp_path / "hf").mkdir()
    save_file({"model.layers.0.mlp.down_proj.weight": torch.ones(8, 64)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text("{}")
    with pytest.raises(WeightError, match=r"down_proj.weight has 64 columns, which groups of 128 do not divide"):
        hf_to_int4(tmp_path / "hf", tmp_path / "out" / "int4", group_size=128)
    assert not (tmp_path / "out").exists()


def test_kimi_k2s_int4(tmp_path):
    """A published expert, written by hand: all of -8 to 7, 32 columns to a scale, and a router that stays float32."""
    torch.manual_seed(0)
    name, numbers = "model.layers.1.mlp.experts.0.up_proj.weight", torch.randint(-8, 8, (5, 64), dtype=torch.int8)
    scale = torch.rand(5, 2).bfloat16()
    others = {
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.rand(4),
        "lm_head.weight": torch.rand(3, 64).bfloat16(),
    }
    (tmp_path / "k2").mkdir()
    shape = torch.tensor([5, 64], dtype=torch.int32)
    parts = {f"{name}_packed": pack_int4(numbers), f"{name}_scale": scale, f"{name}_shape": shape}
    save_file(parts | others, tmp_path / "k2" / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "actorder": None}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    config = {"model_type": "kimi_k2", "torch_dtype": "bfloat16"}
    (tmp_path / "k2" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    int4_to_bf16(tmp_path / "k2", tmp_path / "bf16")
    weight = torch.tensor(
        [
            [q * float(scale[row, column // 32]) for column, q in enumerate(line)]
            for row, line in enumerate(numbers.tolist())
        ]
    )
    assert same(weights_of(tmp_path / "bf16"), others | {name: weight.bfloat16()})
    assert config_of(tmp_path / "bf16") == config


def test_float32_and_float16_models(tmp_path):
    """What is not quantized keeps its type, and the config names the type that most of the model had."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        path = tmp_path / str(dtype)
        path.mkdir()
        tensors = {
            "model.layers.0.mlp.up_proj.weight": torch.randn(3, 32, dtype=dtype),
            "n": torch.ones(2, dtype=dtype),
        }
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text("{}")
        outputs = [tmp_path / f"{dtype}-{kind}" for kind in ("fp8", "int4")]
        hf_to_fp8(path, outputs[0])
        hf_to_int4(path, outputs[1])
        fp8, int4 = map(weights_of, outputs)
        assert fp8["n"].dtype == int4["n"].dtype == int4["model.layers.0.mlp.up_proj.weight_scale"].dtype == dtype
        assert config_of(outputs[0])["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


def test_files_index_and_progress(origin, tmp_path):
    seen = []
    hf_to_fp8(
        origin, tmp_path / "fp8", max_shard_bytes=60_000, on_progress=lambda done, total: seen.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in weights_of(tmp_path / "fp8").values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and {t for _, t in seen} == {total}
    assert seen[-1] == (total, total)
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "fp8").glob("*.safetensors"))
    assert len(files) > 3 and files[0].endswith(f"-of-{len(files):05d}.safetensors")
    for file in files:
        with safe_open(tmp_path / "fp8" / file, framework="pt") as opened:
            assert {name for name, where in index["weight_map"].items() if where == file} == set(opened.keys())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights_of(tmp_path / "fp8").values())


@pytest.fixture
def broken(origin, tmp_path):
    """The model with a NaN in the last of its projections."""
    tensors = weights_of(origin)
    name = max(name for name in tensors if is_projection(name) and ".down_proj" in name)
    tensors[name][0, 0] = torch.nan
    (tmp_path / "broken").mkdir()
    save_file(tensors, tmp_path / "broken" / "model.safetensors")
    (tmp_path / "broken" / "config.json").write_text((origin / "config.json").read_text())
    return tmp_path / "broken", name


@pytest.mark.parametrize("convert", [hf_to_fp8, hf_to_int4])
def test_a_nan_is_told_and_leaves_nothing(broken, tmp_path, convert):
    path, name = broken
    with pytest.raises(WeightError, match=f"{name} holds a NaN or an infinity"):
        convert(path, tmp_path / "out" / "model")
    assert not (tmp_path / "out").exists()


def test_force_replaces_an_earlier_output_and_a_failure_keeps_it(origin, broken, tmp_path):
    target = tmp_path / "target"
    hf_to_fp8(origin, target)
    before = weights_of(target)
    with pytest.raises(OutputError, match="exists already"):
        hf_to_fp8(origin, target)
    with pytest.raises(WeightError, match="NaN"):
        hf_to_fp8(broken[0], target, force=True)
    assert same(weights_of(target), before)
    hf_to_int4(origin, target, force=True)
    assert config_of(target)["quantization_config"]["quant_method"] == "compressed-tensors"
    with pytest.raises(OutputError, match="is or holds the input"):
        int4_to_bf16(target, target, force=True)


def test_a_full_disk_is_told_and_what_is_written_stays(origin, tmp_path, full_disk):
    with (
        full_disk(20_000),
        pytest.raises(OutputError, match=r"cannot write .*/fp8 .*File too large.*again to continue"),
    ):
        hf_to_fp8(origin, tmp_path / "fp8")
    assert [path.name for path in tmp_path.iterdir()] == [".fp8.partial"]


def test_each_way_back_takes_its_own_format(origin, tmp_path):
    hf_to_fp8(origin, tmp_path / "fp8")
    hf_to_int4(origin, tmp_path / "int4")
    for convert, source, told in [
        (
            fp8_to_bf16,
            tmp_path / "int4",
            r"is quantized otherwise \(compressed-tensors, .*; use slime-convert int4-to-bf16",
        ),
        (int4_to_bf16, tmp_path / "fp8", r"is quantized otherwise \(fp8, .*; use slime-convert fp8-to-bf16"),
        (fp8_to_bf16, origin, "has no quantization_config; give a quantized model"),
        (int4_to_bf16, origin, "has no quantization_config; give a quantized model"),
        (hf_to_fp8, tmp_path / "fp8", "is quantized already .* fp8-to-bf16 first"),
        (hf_to_int4, tmp_path / "fp8", "is quantized already .* fp8-to-bf16 first"),
        (hf_to_fp8, tmp_path / "int4", "is quantized already .* int4-to-bf16 first"),
    ]:
        with pytest.raises(QuantizationError, match=told):
            convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_type_that_cannot_be_quantized_is_told(tmp_path):
    origin = write_model(tmp_path / "hf", {"model.layers.0.mlp.up_proj.weight": torch.ones(3, 32).double()}, {})
    for convert in (hf_to_fp8, hf_to_int4):
        with pytest.raises(WeightError, match=r"up_proj\.weight has type float64; allowed: bfloat16, f"):
            convert(origin, tmp_path / "out")


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape", "weight_g"])
def test_what_would_be_taken_for_a_part_of_a_packed_weight_is_refused(origin, tmp_path, part):
    name = f"model.layers.0.mlp.up_proj.{part}"
    model = write_model(tmp_path / "model", weights_of(origin) | {name: torch.ones(2)}, origin / "config.json")
    with pytest.raises(QuantizationError, match=rf"has {name}, which would be taken for a part of a packed weight"):
        hf_to_int4(model, tmp_path / "out" / "int4")
    assert not (tmp_path / "out").exists()


def test_rules_and_sizes_from_python(origin, tmp_path):
    rule = "re:.*self_attn.*"
    hf_to_int4(origin, tmp_path / "one", ignore=rule)
    hf_to_int4(origin, tmp_path / "list", ignore=[rule])
    assert config_of(tmp_path / "one") == config_of(tmp_path / "list")
    for wrong, told in (({"group_size": 32.0}, r"group size 32\.0 is not"), ({"ignore": [5]}, r"ignore \[5\] is not")):
        with pytest.raises(QuantizationError, match=f"{told} supported; allowed: "):
            hf_to_int4(origin, tmp_path / "out" / "int4", **wrong)
    assert not (tmp_path / "out").exists()
