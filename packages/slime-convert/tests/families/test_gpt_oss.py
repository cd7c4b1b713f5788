"""Configs of gpt-oss: its own defaults, widths and activation."""

import pytest

from slime_convert import ModelShape
from slime_convert.errors import UnsupportedModelError
from support.shapes import LLAMA

GPT_OSS = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "rms_norm_eps")} | {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
}


def test_what_is_left_out_is_the_classs():
    shape = ModelShape.from_hf_config(GPT_OSS)
    assert shape.window_attn_skip_freq == (1, 0) and shape.window_size == 127
    assert (shape.rope_type, shape.rotary_scaling_factor, shape.yarn_rounds_range) == ("yarn", 32.0, False)
    assert shape.rotary_base == 150000.0 and shape.activation_func_clamp_value == 7.0


def test_experts_have_the_width_that_others_give_an_mlp():
    shape = ModelShape.from_hf_config(GPT_OSS)
    assert shape.moe_ffn_hidden_size == LLAMA["intermediate_size"] and not shape.moe_router_pre_softmax
    assert shape.quick_geglu and not shape.swiglu and shape.add_bias_linear


@pytest.mark.parametrize("change", [{"swiglu_alpha": 1.5}, {"attention_bias": False}, {"hidden_act": "gelu"}])
def test_another_activation_and_no_biases_are_refused(change):
    with pytest.raises(UnsupportedModelError, match=next(iter(change))):
        ModelShape.from_hf_config(GPT_OSS | change)
