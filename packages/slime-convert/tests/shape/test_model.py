"""Shapes of configs: what each setting means, and what is refused."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from transformers import (
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from slime_convert import ConvertError, ModelShape
from slime_convert.errors import HfConfigError, UnsupportedModelError
from support.shapes import DEEPSEEK, LLAMA, LLAMA3_SCALING


def test_importing_the_shape_does_not_import_torch():
    code = "import sys, slime_convert.shape; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


@pytest.mark.parametrize("activation", ["swiglu", "quick_geglu", "gelu_tanh", ""])
def test_megatron_is_told_of_a_gate_whatever_its_function(activation):
    other = {"swiglu": False} | ({activation: True} if activation else {})
    values = replace(ModelShape.from_hf_config(LLAMA), **other).megatron_values({"gated_linear_unit", "num_layers"})
    assert values == {"gated_linear_unit": bool(activation), "num_layers": 2}


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("tied", [True, False])
def test_config_written_by_transformers_is_read_back(tmp_path, config_class, tied):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    sizes = {**LLAMA, "tie_word_embeddings": tied, "head_dim": 32, "rope_parameters": rope}
    sizes.pop("model_type")
    config_class(**sizes).save_pretrained(tmp_path)
    assert ModelShape.from_hf_config(tmp_path) == ModelShape(
        family=config_class.model_type,
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=32,
        vocab_size=101,
        max_position_embeddings=256,
        rotary_base=5e5,
        norm_epsilon=1e-5,
        qk_layernorm=config_class is Qwen3Config,
        untie_embeddings_and_output_weights=not tied,
    )


@pytest.mark.parametrize(
    ("config_class", "implied"),
    [
        (Qwen2Config, {"add_qkv_bias": True}),
        (GlmConfig, {"add_qkv_bias": True, "rotary_percent": 0.5, "rotary_interleaved": True}),
        (
            Glm4Config,
            {
                "add_qkv_bias": True,
                "rotary_percent": 0.5,
                "rotary_interleaved": True,
                "post_self_attn_layernorm": True,
                "post_mlp_layernorm": True,
            },
        ),
    ],
)
def test_what_a_family_implies(tmp_path, config_class, implied):
    """Whether the config says it, or leaves it to the family's defaults."""
    config = {**LLAMA, "head_dim": 16, "model_type": config_class.model_type, "rope_theta": 1e4}
    bare = ModelShape.from_hf_config(config)
    assert bare == replace(ModelShape.from_hf_config(LLAMA), family=config_class.model_type, **implied)
    config.pop("model_type")
    config_class(**config, pad_token_id=0).save_pretrained(tmp_path)
    assert ModelShape.from_hf_config(tmp_path) == bare


def test_old_and_new_places_of_the_rotary_settings_agree():
    old = ModelShape.from_hf_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING})
    new = ModelShape.from_hf_config({**LLAMA, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}})
    assert old == new
    assert (old.rotary_base, old.use_rope_scaling, old.rope_scaling_factor) == (5e5, True, 32.0)


@pytest.mark.parametrize(
    ("family", "channels"),
    [("llama", 16), ("qwen2", 16), ("qwen3", 128), ("qwen3_moe", 16), ("glm", 128), ("glm4", 128), ("glm4_moe", 128)],
)
def test_what_is_left_out_is_the_familys(family, channels):
    shape = ModelShape.from_hf_config(
        {**DEEPSEEK, **QWEN3_MOE, "n_group": 1, "topk_group": 1, "model_type": family, "rope_scaling": None}
    )
    assert shape.kv_channels == channels


def test_a_config_that_does_not_tie_the_output_layer_unties_it():
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    assert ModelShape.from_hf_config(config).untie_embeddings_and_output_weights


def test_heads_without_groups_and_head_dim_left_out():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    shape = ModelShape.from_hf_config(config)
    assert (shape.num_query_groups, shape.kv_channels, shape.rotary_base) == (4, 16, 10000.0)
    assert "--group-query-attention" not in shape.to_megatron_flags()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, ["'gpt2'", "llama, mistral, mixtral, qwen2, ", "glm4"]),
        ({"model_type": None}, UnsupportedModelError, ["None", "llama, mistral, mixtral, qwen2, ", "glm4"]),
        ({"attention_bias": True}, UnsupportedModelError, ["attention_bias true", "false"]),
        ({"hidden_act": "gelu"}, UnsupportedModelError, ['hidden_act "gelu"', '"silu"']),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, UnsupportedModelError, ["'linear'", "'llama3'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, HfConfigError, ["low_freq_factor"]),
        ({"num_hidden_layers": None}, HfConfigError, ["num_hidden_layers", "integer"]),
        ({"num_attention_heads": 0, "num_key_value_heads": None}, HfConfigError, ["num_attention_heads 0", "positive"]),
        ({"num_key_value_heads": "2"}, HfConfigError, ['num_key_value_heads is "2"', "integer"]),
        ({"num_key_value_heads": 0}, HfConfigError, ["num_query_groups 0", "positive"]),
        ({"head_dim": 16.0}, HfConfigError, ["head_dim is 16.0", "integer"]),
        ({"rms_norm_eps": "1e-5"}, HfConfigError, ['rms_norm_eps is "1e-5"', "number"]),
        ({"rms_norm_eps": math.nan}, HfConfigError, ["norm_epsilon nan", "positive and finite"]),
        ({"rope_theta": "1e4"}, HfConfigError, ['rope_theta is "1e4"', "number"]),
        ({"rope_parameters": [1]}, HfConfigError, ["rotary settings are [1]", "object"]),
        ({"rope_scaling": {**LLAMA3_SCALING, "factor": "8"}}, HfConfigError, ['factor is "8"', "llama3 rope scaling"]),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, ["partial_rotary_factor 0.5", "with 1.0"]),
        (
            {"model_type": "glm4", "rope_scaling": {"type": "yarn", "factor": 4}},
            UnsupportedModelError,
            ["'yarn'", "partial_rotary_factor 0.5", "allowed: 'default' with any"],
        ),
        ({"mlp_bias": True}, UnsupportedModelError, ["mlp_bias true", "false"]),
        ({"use_sliding_window": True}, UnsupportedModelError, ["use_sliding_window true", "false"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            UnsupportedModelError,
            ["layer_types sliding_attention", "allowed: full_attention"],
        ),
        ({"layer_types": 2}, HfConfigError, ["layer_types is 2", "list of texts"]),
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, ["final_logit_softcapping 30.0", "none"]),
        ({"num_key_value_heads": 3}, HfConfigError, ["num_query_groups 3", "multiple"]),
        ({"vocab_size": 0}, HfConfigError, ["vocab_size 0", "positive"]),
    ],
)
def test_refused_configs_say_what_is_wrong(change, error, words):
    with pytest.raises(error) as caught:
        ModelShape.from_hf_config({**LLAMA, **change})
    assert isinstance(caught.value, ConvertError)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_quantized_model_has_the_shape_of_the_same_model_unquantized():
    quantized = {**LLAMA, "quantization_config": {"quant_method": "awq"}}
    assert ModelShape.from_hf_config(quantized) == ModelShape.from_hf_config(LLAMA)


@pytest.mark.parametrize(
    "config_class", [LlamaConfig, Qwen2Config, GlmConfig, Glm4Config, Glm4MoeConfig, Glm4MoeLiteConfig]
)
def test_a_norms_epsilon_that_is_left_out_is_the_familys(config_class):
    config = {**DEEPSEEK, "rope_scaling": None, "model_type": config_class.model_type}
    del config["rms_norm_eps"]
    assert ModelShape.from_hf_config(config).norm_epsilon == config_class().rms_norm_eps


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_directory_that_is_no_model_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(HfConfigError, match=r"config\.json.*give a Hugging Face model directory"):
        ModelShape.from_hf_config(tmp_path)


def test_every_field_reaches_the_recorded_arguments():
    shape = ModelShape.from_hf_config(LLAMA)
    assert replace(shape, num_query_groups=4).to_megatron_args()["group_query_attention"] is False
    args = shape.to_megatron_args()
    assert args["group_query_attention"] is True and args["add_bias_linear"] is False and args["num_query_groups"] == 2
    json.dumps(args)


QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("vocab", "tp", "divisible_by", "padded"),
    [
        (151936, 1, 128, 151936),
        (151936, 2, 128, 152064),
        (154880, 8, 64, 155136),
        (101, 1, 128, 128),
        (128, 1, 128, 128),
    ],
)
def test_padded_vocabulary(vocab, tp, divisible_by, padded):
    shape = ModelShape.from_hf_config({**LLAMA, "vocab_size": vocab})
    assert shape.padded_vocab_size(tp, divisible_by) == padded
