"""Configs of Qwen3 with experts."""

import pytest

from slime_convert import ModelShape, check_flags
from slime_convert.errors import HfConfigError, ShapeMismatchError, UnsupportedModelError
from support.shapes import LLAMA, parse

QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def test_experts():
    shape = ModelShape.from_hf_config(QWEN3_MOE)
    assert (shape.num_experts, shape.moe_router_topk, shape.moe_ffn_hidden_size) == (8, 2, 24)
    assert shape.qk_layernorm and not shape.moe_router_pre_softmax
    check_flags(shape, parse(shape.to_megatron_flags()))
    with pytest.raises(ShapeMismatchError, match=r"2 shape flags .*--num-experts 4 .* 8; --moe-router-topk 3 .* 2\."):
        check_flags(shape, {"num_experts": 4, "moe_router_topk": 3})
    with pytest.raises(ShapeMismatchError, match=r"--num-experts 4 is given, but the config has no such setting"):
        check_flags(ModelShape.from_hf_config(LLAMA), {"num_experts": 4})
    assert shape.to_megatron_args()["num_experts"] == 8
    assert "num_experts" not in ModelShape.from_hf_config(LLAMA).to_megatron_args()


def test_router_probabilities_among_all_experts():
    shape = ModelShape.from_hf_config({**QWEN3_MOE, "norm_topk_prob": False})
    assert shape.moe_router_pre_softmax and "--moe-router-pre-softmax" in shape.to_megatron_flags()


def test_router_probabilities_that_the_config_does_not_mention_are_not_normalised():
    config = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
    assert ModelShape.from_hf_config(config).moe_router_pre_softmax


def test_experts_in_every_layer_are_no_list():
    """With a list, Megatron would look for each layer under a key of its own."""
    shape = ModelShape.from_hf_config(QWEN3_MOE)
    assert shape.to_megatron_args()["moe_layer_freq"] == 1
    check_flags(shape, {"moe_layer_freq": "1"})
    with pytest.raises(ShapeMismatchError, match="--moe-layer-freq 2 is given, but the config says 1"):
        check_flags(shape, {"moe_layer_freq": "2"})


@pytest.mark.parametrize(
    ("change", "freq"),
    [
        ({"mlp_only_layers": [0]}, (0, 1, 1, 1)),
        ({"decoder_sparse_step": 2}, (0, 1, 0, 1)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 1, 0, 0)),
    ],
)
def test_layers_without_experts(change, freq):
    shape = ModelShape.from_hf_config({**QWEN3_MOE, "num_hidden_layers": 4, **change})
    assert shape.moe_layer_freq == freq
    check_flags(shape, parse(shape.to_megatron_flags()))
    check_flags(shape, {"moe_layer_freq": str(list(freq))})
    with pytest.raises(ShapeMismatchError, match="--moe-layer-freq 1 is given, but the config says"):
        check_flags(shape, {"moe_layer_freq": "1"})


def test_the_newer_name_of_the_number_of_experts():
    config = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_MOE.items()}
    assert ModelShape.from_hf_config(config) == ModelShape.from_hf_config(QWEN3_MOE)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"mlp_only_layers": ["0"]}, HfConfigError, ['mlp_only_layers is ["0"]', "list of integers"]),
        ({"decoder_sparse_step": 0}, UnsupportedModelError, ["decoder_sparse_step 0", "allowed: 1 or more"]),
        ({"num_experts": None}, HfConfigError, ["num_experts is null", "integer"]),
        ({"num_experts_per_tok": 9}, HfConfigError, ["moe_router_topk 9", "at most num_experts 8"]),
    ],
)
def test_refused_experts(change, error, words):
    with pytest.raises(error) as caught:
        ModelShape.from_hf_config({**QWEN3_MOE, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
