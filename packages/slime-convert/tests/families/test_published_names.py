"""Names and shapes of the published checkpoints that no transformers class writes: prediction modules, Kimi-K2."""

import re
from functools import cache

import pytest
import torch

from slime_convert.mapping import WeightMap
from slime_convert.published import PUBLISHED

# By name behind `model.layers.N.`; of the experts, the last.
LATENT_ATTENTION = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
}
DEEPSEEK_ATTENTION = {
    **LATENT_ATTENTION,
    "self_attn.q_b_proj.weight": (24576, 1536),
    "self_attn.kv_b_proj.weight": (32768, 512),
    "self_attn.o_proj.weight": (7168, 16384),
}
KIMI_ATTENTION = {
    **LATENT_ATTENTION,
    "self_attn.q_b_proj.weight": (12288, 1536),
    "self_attn.kv_b_proj.weight": (16384, 512),
    "self_attn.o_proj.weight": (7168, 8192),
}
GLM_ATTENTION = {
    "input_layernorm.weight": (5120,),
    "post_attention_layernorm.weight": (5120,),
    "self_attn.q_proj.weight": (12288, 5120),
    "self_attn.q_proj.bias": (12288,),
    "self_attn.k_proj.weight": (1024, 5120),
    "self_attn.k_proj.bias": (1024,),
    "self_attn.v_proj.weight": (1024, 5120),
    "self_attn.v_proj.bias": (1024,),
    "self_attn.o_proj.weight": (5120, 12288),
    "self_attn.q_norm.weight": (128,),
    "self_attn.k_norm.weight": (128,),
}


def dense_mlp(hidden, ffn):
    return {
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def experts(count, hidden, ffn):
    weights = {"mlp.gate.weight": (count, hidden), "mlp.gate.e_score_correction_bias": (count,)}
    for owner in (f"mlp.experts.{count - 1}", "mlp.shared_experts"):
        weights |= {name.replace("mlp", owner, 1): shape for name, shape in dense_mlp(hidden, ffn).items()}
    return weights


def prediction_module(hidden, vocab):
    return {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }


DEEPSEEK_EXPERTS = experts(256, 7168, 2048)
GLM_EXPERTS = experts(160, 5120, 1536)
LAYERS = [
    ("deepseek-v3", 2, DEEPSEEK_ATTENTION | dense_mlp(7168, 18432)),
    ("deepseek-v3", 60, DEEPSEEK_ATTENTION | DEEPSEEK_EXPERTS),
    ("deepseek-v3", 61, DEEPSEEK_ATTENTION | DEEPSEEK_EXPERTS | prediction_module(7168, 129280)),
    ("kimi-k2", 0, KIMI_ATTENTION | dense_mlp(7168, 18432)),
    ("kimi-k2", 60, KIMI_ATTENTION | experts(384, 7168, 2048)),
    ("glm4.5-355B-A32B", 2, GLM_ATTENTION | dense_mlp(5120, 12288)),
    ("glm4.5-355B-A32B", 91, GLM_ATTENTION | GLM_EXPERTS),
    ("glm4.5-355B-A32B", 92, GLM_ATTENTION | GLM_EXPERTS | prediction_module(5120, 151552)),
]


@cache
def weight_map_of(name):
    return WeightMap(PUBLISHED[name].shape)


@pytest.mark.parametrize(("name", "layer", "expected"), LAYERS)
def test_names_and_shapes_of_a_layer(name, layer, expected):
    weight_map = weight_map_of(name)
    prefix, last_expert = f"model.layers.{layer}.", f".experts.{PUBLISHED[name].shape.num_experts - 1}."
    found = {}
    for weight in weight_map.megatron_names():
        if not any(part.startswith((prefix, "model.embed", "lm_head")) for part in weight_map.hf_parts(weight)):
            continue
        whole = torch.empty(weight_map.megatron_shape(weight), device="meta")
        found |= {part: tuple(tensor.shape) for part, tensor in weight_map.to_hf(weight, whole)}
    found = {part.removeprefix(prefix): shape for part, shape in found.items() if part.startswith(prefix)}
    others = {part for part in found if re.search(r"\.experts\.\d+\.", part) and last_expert not in part}
    assert len(others) == 3 * (PUBLISHED[name].shape.num_experts - 1) * any("experts" in part for part in expected)
    assert {part: shape for part, shape in found.items() if part not in others} == expected


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        (
            "deepseek-v3",
            {
                "mtp.layers.0.enorm": ["model.layers.61.enorm"],
                "mtp.layers.0.hnorm": ["model.layers.61.hnorm"],
                "mtp.layers.0.eh_proj": ["model.layers.61.eh_proj"],
                "mtp.layers.0.final_layernorm": ["model.layers.61.shared_head.norm"],
                "mtp.layers.0.transformer_layer.input_layernorm": ["model.layers.61.input_layernorm"],
                "mtp.layers.0.transformer_layer.pre_mlp_layernorm": ["model.layers.61.post_attention_layernorm"],
                "mtp.layers.0.transformer_layer.mlp.shared_experts.linear_fc1": [
                    "model.layers.61.mlp.shared_experts.gate_proj",
                    "model.layers.61.mlp.shared_experts.up_proj",
                ],
                "decoder.layers.3.self_attention.q_layernorm": ["model.layers.3.self_attn.q_a_layernorm"],
                "decoder.layers.3.self_attention.kv_layernorm": ["model.layers.3.self_attn.kv_a_layernorm"],
            },
        ),
        (
            "glm4-9B",
            {
                "decoder.layers.1.input_layernorm": ["model.layers.1.input_layernorm"],
                "decoder.layers.1.post_self_attn_layernorm": ["model.layers.1.post_self_attn_layernorm"],
                "decoder.layers.1.pre_mlp_layernorm": ["model.layers.1.post_attention_layernorm"],
                "decoder.layers.1.post_mlp_layernorm": ["model.layers.1.post_mlp_layernorm"],
                "decoder.layers.1.mlp.linear_fc1": ["model.layers.1.mlp.gate_up_proj"],
            },
        ),
    ],
)
def test_weights_of_one_shape_are_not_swapped(name, pairs):
    """Shapes and a way there and back would not tell."""
    weight_map = weight_map_of(name)
    found = {weight: weight_map.hf_parts(f"{weight}.weight") for weight in pairs}
    assert found == {weight: [f"{part}.weight" for part in parts] for weight, parts in pairs.items()}
