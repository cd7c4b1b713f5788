"""Configs of GLM: biases, and norms behind attention and MLP."""

import pytest

from slime_convert import ModelShape
from support.shapes import LLAMA


def test_glm4_without_biases():
    shape = ModelShape.from_hf_config({**LLAMA, "model_type": "glm4", "attention_bias": False})
    assert not shape.add_qkv_bias and "--add-qkv-bias" not in shape.to_megatron_flags()


@pytest.mark.parametrize("model_type", ["glm", "glm4"])
def test_only_the_newer_one_has_norms_behind_attention_and_mlp(model_type):
    shape = ModelShape.from_hf_config({**LLAMA, "model_type": model_type})
    assert shape.post_self_attn_layernorm == shape.post_mlp_layernorm == (model_type == "glm4")
    assert shape.rotary_interleaved and shape.rotary_percent == 0.5
