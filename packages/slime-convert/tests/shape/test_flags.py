"""Megatron's shape flags: those of a shape agree with it, and others are refused."""

import re

import pytest

from slime_convert import SHAPE_FLAGS, ModelShape, check_flags
from slime_convert.errors import ShapeMismatchError
from support.shapes import LLAMA, LLAMA3_SCALING, parse


def test_flags_of_a_shape_agree_with_it():
    shape = ModelShape.from_hf_config({**LLAMA, "rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}})
    check_flags(shape, parse(shape.to_megatron_flags()))
    check_flags(shape, {"group_query_attention": True, "position_embedding_type": "rope", "rotary_percent": 1.0})
    shape = ModelShape.from_hf_config({**LLAMA, "model_type": "glm4"})
    words = shape.to_megatron_flags()
    assert {"--add-qkv-bias", "--rotary-interleaved", "--post-self-attn-layernorm", "--post-mlp-layernorm"} < set(words)
    check_flags(shape, parse(words))


def test_all_contradictions_stand_in_one_message():
    shape = ModelShape.from_hf_config(LLAMA)
    given = {
        "num_layers": 3,
        "rotary_base": 1e6,
        "qk_layernorm": True,
        "rope_scaling_factor": 8.0,
        "rotary_percent": 0.5,
        "rotary_interleaved": True,
        "post_mlp_layernorm": True,
        "add_qkv_bias": True,
        "hidden_size": 64,
        "vocab_size": None,
        "use_rope_scaling": False,
    }
    with pytest.raises(ShapeMismatchError) as caught:
        check_flags(shape, given)
    message = str(caught.value)
    assert message.startswith("8 shape flags contradict the model's config")
    for part in [
        "--num-layers 3",
        "says 2",
        "--rotary-base 1000000",
        "says 10000",
        "--qk-layernorm",
        "--rope-scaling-factor 8 is given, but the config has no such setting",
        "--rotary-percent 0.5 is given, but the config says 1",
        "--rotary-interleaved",
        "--post-mlp-layernorm",
        "--add-qkv-bias",
    ]:
        assert part in message
    assert "--hidden-size" not in message and "\n" not in message


def test_each_flag_that_is_compared_is_refused_when_it_differs():
    shape = ModelShape.from_hf_config({**LLAMA, "rope_parameters": LLAMA3_SCALING})
    for flag in SHAPE_FLAGS:
        if flag.compared and not flag.is_switch:
            right = flag.value(shape)
            wrong = "other" if flag.type is str else (right or 0) + 1
            given, own = (one if isinstance(one, str | None) else f"{one:g}" for one in (wrong, right))
            said = rf"{flag.name} {given} is given, but the config (says {re.escape(str(own))}\.|has no such setting)"
            with pytest.raises(ShapeMismatchError, match=said):
                check_flags(shape, {flag.dest: wrong})
