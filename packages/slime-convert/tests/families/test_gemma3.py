"""Configs of Gemma 3, with two kinds of layers."""

import pytest

from slime_convert import ModelShape
from slime_convert.errors import UnsupportedModelError
from support.shapes import LLAMA

GEMMA = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_act": "gelu_pytorch_tanh"}


def shape(**changes):
    return ModelShape.from_hf_config({**GEMMA, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 64, **changes})


def test_every_sixth_layer_sees_everything():
    assert shape(sliding_window=16).window_attn_skip_freq == (1, 1, 1, 1, 1, 0)
    assert shape(sliding_window=16).window_size == 15
    assert shape(layer_types=["full_attention"] * 6).window_size is None


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
    ],
    ids=["apart", "nested"],
)
def test_both_rotary_bases_are_read(settings):
    found = ModelShape.from_hf_config({key: value for key, value in GEMMA.items() if key != "rope_theta"} | settings)
    assert (found.rotary_base, found.rotary_base_local) == (5e5, 2e4)


def test_scores_are_divided_by_the_root_of_a_setting():
    assert shape().softmax_scale == 0.125 and not shape().swiglu


def test_a_scaling_in_layers_with_a_window_is_refused():
    with pytest.raises(UnsupportedModelError, match='rope_type "linear" of the local rotary settings'):
        shape(rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}})
