import json

import pytest

from slime_convert.errors import HfConfigError, QuantizationError
from slime_convert.quantize.formats import Fp8Format, Int4Format, read_format, without_quantization

# As DeepSeek-V3 and Kimi-K2-Thinking publish them.
DEEPSEEK = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
KIMI_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
KIMI = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": KIMI_WEIGHTS,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def write(directory, settings, key="quantization_config"):
    (directory / "config.json").write_text(json.dumps({"model_type": "any", key: settings}))
    return directory


def kimi_group(**changes):
    return KIMI | {"config_groups": {"group_0": KIMI["config_groups"]["group_0"] | changes}}


def kimi_with(**weights):
    return kimi_group(weights=KIMI_WEIGHTS | weights)


def test_published_configs_are_read_and_written(tmp_path):
    assert read_format(write(tmp_path, DEEPSEEK)) == Fp8Format((128, 128))
    assert read_format(write(tmp_path, KIMI)) == Int4Format(32)
    assert read_format(write(tmp_path, KIMI, "compression_config")) == Int4Format(32)
    assert Fp8Format((128, 128)).to_config(["lm_head"]) == DEEPSEEK | {"modules_to_not_convert": ["lm_head"]}
    assert Int4Format(32).to_config(KIMI["ignore"]) == KIMI
    assert read_format(write(tmp_path, Int4Format(128).to_config([]))) == Int4Format(128)


def test_what_newer_and_older_compressed_tensors_add(tmp_path):
    """Its releases write these keys where nothing was rotated and nothing is sparse."""
    added = {"version": "0.13.0", "transform_config": {}, "sparsity_config": {"format": "dense", "ignore": []}}
    assert read_format(write(tmp_path, KIMI | added)) == Int4Format(32)
    assert read_format(write(tmp_path, kimi_group(format="pack-quantized") | {"sparsity_config": {}})) == Int4Format(32)


def test_deepseek_v31s_powers_of_two_are_ordinary_scales(tmp_path):
    assert read_format(write(tmp_path, DEEPSEEK | {"scale_fmt": "ue8m0"})) == Fp8Format((128, 128))


def test_no_quantization(tmp_path):
    assert read_format(write(tmp_path, None)) is None
    assert without_quantization({"a": 1, "quantization_config": {}, "compression_config": {}}) == {"a": 1}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("fp8", "is a JSON str, not an object"),
        ({}, "quant_method None in .* is not supported; allowed: 'fp8' .*, 'compressed-tensors'"),
        ({"quant_method": "awq"}, "quant_method 'awq' in"),
        (DEEPSEEK | {"fmt": "e5m2"}, "fmt 'e5m2' in .* allowed: 'e4m3'"),
        (DEEPSEEK | {"weight_block_size": None}, "weight_block_size None in .* such as"),
        (DEEPSEEK | {"weight_block_size": [128]}, r"weight_block_size \[128\] in"),
        (DEEPSEEK | {"weight_block_size": [128, 0]}, r"weight_block_size \[128, 0\] in"),
        (DEEPSEEK | {"weight_block_size": [True, 128]}, r"weight_block_size \[True, 128\] in"),
        (KIMI | {"format": "float-quantized"}, "format 'float-quantized' in .* allowed: 'pack-quantized'"),
        (KIMI | {"config_groups": None}, "config_groups in .* exactly one group"),
        (KIMI | {"config_groups": {"a": {}, "b": {}}}, "config_groups in .* exactly one group"),
        (KIMI | {"config_groups": {"a": {"weights": None}}}, "the only group in .* says nothing of weights"),
        (KIMI | {"config_groups": {"a": []}}, "the only group in .* says nothing of weights"),
        (
            KIMI | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "transform_config .* allowed: None",
        ),
        (
            KIMI | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config .*sparse-24-bitmask.* allowed: N",
        ),
        (KIMI | {"sparsity_config": "dense"}, "sparsity_config 'dense' in"),
        (kimi_group(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' in .* allowed: 'pack-quantized'"),
        (kimi_with(num_bits=8), "num_bits 8 in .* allowed: 4"),
        (kimi_with(type="float"), "type 'float' in"),
        (kimi_with(strategy="channel"), "strategy 'channel' in"),
        (kimi_with(symmetric=False), "symmetric False in"),
        (kimi_with(actorder="group"), "actorder 'group' in"),
        (kimi_with(group_size=0), "group_size 0 in"),
        (kimi_with(group_size="32"), "group_size '32' in"),
    ],
)
def test_other_formats_are_refused(tmp_path, settings, told):
    with pytest.raises(QuantizationError, match=told):
        read_format(write(tmp_path, settings))


def test_a_config_that_is_none_is_told(tmp_path):
    with pytest.raises(HfConfigError, match=r"cannot read .*config\.json .*; give a Hugging Face model directory"):
        read_format(tmp_path)
    for text, told in [("{", "is not valid JSON"), ("[]", "holds a JSON list, not an object")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(HfConfigError, match=told):
            read_format(tmp_path)
