"""Configs of DeepSeek V3: router, latent attention, prediction modules."""

import itertools

import pytest

from slime_convert import ModelShape, check_flags
from slime_convert.errors import HfConfigError, ShapeMismatchError, UnsupportedModelError
from support.shapes import DEEPSEEK, LLAMA3_SCALING, parse


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_routed_experts": 17}, ["num_experts 17", "multiple of moe_router_num_groups 4"]),
        ({"topk_group": 5, "num_experts_per_tok": 10}, ["moe_router_group_topk 5", "at most moe_router_num_groups 4"]),
        ({"n_routed_experts": 4}, ["moe_router_topk 4", "at most the 2 experts of the moe_router_group_topk 2 groups"]),
    ],
)
def test_groups_of_experts_that_nothing_can_be_chosen_from_as_said_are_refused(change, words):
    with pytest.raises(HfConfigError) as caught:
        ModelShape.from_hf_config({**DEEPSEEK, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_expert_of_the_chosen_groups_may_be_chosen():
    assert ModelShape.from_hf_config({**DEEPSEEK, "n_routed_experts": 8}).moe_router_topk == 4


def test_latent_attention_router_and_prediction_modules():
    shape = ModelShape.from_hf_config(DEEPSEEK)
    words = shape.to_megatron_flags()
    values = dict(itertools.pairwise(words))
    expected = {
        "--num-experts": "16",
        "--moe-router-score-function": "sigmoid",
        "--moe-router-topk-scaling-factor": "2.5",
        "--moe-router-num-groups": "4",
        "--moe-router-group-topk": "2",
        "--moe-shared-expert-intermediate-size": "48",
        "--moe-layer-freq": "([0]*2+[1]*3)",
        "--mtp-num-layers": "1",
        "--q-lora-rank": "12",
        "--kv-lora-rank": "8",
        "--qk-head-dim": "6",
        "--qk-pos-emb-head-dim": "4",
        "--v-head-dim": "5",
        "--rope-type": "yarn",
        "--rotary-scaling-factor": "40",
        "--mscale-all-dim": "0.7",
    }
    assert expected.items() <= values.items()
    assert {"--multi-latent-attention", "--moe-router-enable-expert-bias"} < set(words) and "--kv-channels" not in words
    check_flags(shape, parse(words))
    args = shape.to_megatron_args()
    assert args["moe_layer_freq"] == [0, 0, 1, 1, 1] and args["mscale_all_dim"] == 0.7
    assert [shape.has_layer("experts", layer) for layer in range(6)] == [False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("given", "agrees"),
    [
        ("[0,0,1,1,1]", True),
        ("([0]*2+[1]*3)", True),
        ("1", False),
        ("[0,1,1,1,1]", False),
        ("[0]*10**9", False),
        ("__import__('os')", False),
    ],
)
def test_forms_of_the_layers_with_experts(given, agrees):
    shape = ModelShape.from_hf_config(DEEPSEEK)
    if agrees:
        check_flags(shape, {"moe_layer_freq": given})
    else:
        with pytest.raises(ShapeMismatchError, match=r"--moe-layer-freq .* says \(\[0\]\*2\+\[1\]\*3\)"):
            check_flags(shape, {"moe_layer_freq": given})


def test_latent_heads_have_no_groups_and_no_further_modules_unless_the_config_says_so():
    config = {key: value for key, value in DEEPSEEK.items() if key != "num_nextn_predict_layers"}
    shape = ModelShape.from_hf_config({**config, "num_key_value_heads": 2})
    assert (shape.num_query_groups, shape.mtp_num_layers) == (4, 0)


def test_queries_without_a_latent():
    shape = ModelShape.from_hf_config({**DEEPSEEK, "q_lora_rank": None, "rope_scaling": None})
    assert "--q-lora-rank" not in shape.to_megatron_flags() and shape.rope_type == "rope"
    with pytest.raises(ShapeMismatchError, match="--q-lora-rank 12 is given, but the config has no such setting"):
        check_flags(shape, {"q_lora_rank": 12})


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"n_group": 2, "topk_group": 1}, UnsupportedModelError, ["num_experts_per_tok 4 with topk_group 1"]),
        ({"topk_group": 1}, UnsupportedModelError, ["num_experts_per_tok 4 with topk_group 1", "models by two"]),
        ({"norm_topk_prob": False}, UnsupportedModelError, ["norm_topk_prob false", "true"]),
        # What transformers and DeepSeek's own code take for granted differs.
        ({"norm_topk_prob": None}, UnsupportedModelError, ["norm_topk_prob null", "true"]),
        ({"n_group": None}, HfConfigError, ["n_group is null"]),
        ({"topk_group": None}, HfConfigError, ["topk_group is null"]),
        ({"routed_scaling_factor": None}, HfConfigError, ["routed_scaling_factor is null"]),
        ({"first_k_dense_replace": None}, HfConfigError, ["first_k_dense_replace is null"]),
        ({"moe_layer_freq": 2}, UnsupportedModelError, ["moe_layer_freq 2", "allowed: 1"]),
        ({"topk_method": "group_limited_greedy"}, UnsupportedModelError, ["topk_method", '"noaux_tc"']),
        ({"attention_bias": True}, UnsupportedModelError, ["attention_bias true"]),
        ({"rope_interleave": False}, UnsupportedModelError, ["rope_interleave false", "true"]),
        ({"num_experts_per_tok": 1, "n_group": 1}, UnsupportedModelError, ["num_experts_per_tok 1", "2 or more"]),
        ({"mlp_layer_types": 3}, HfConfigError, ["mlp_layer_types is 3", "list of texts"]),
        ({"mlp_layer_types": ["dense", "dense", "sparse"]}, HfConfigError, ["has 3 entries", "num_hidden_layers is 5"]),
        (
            {"mlp_layer_types": ["dense"] + 4 * ["sparse"]},
            HfConfigError,
            ["1 dense of 5", "first_k_dense_replace is 2"],
        ),
        ({"scoring_func": "softmax"}, UnsupportedModelError, ['scoring_func "softmax"', '"sigmoid"']),
        (
            {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": None},
            UnsupportedModelError,
            ["dense layers behind sparse"],
        ),
        ({"kv_lora_rank": None}, HfConfigError, ["kv_lora_rank is null"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, HfConfigError, ["yarn rope scaling", "original_max"]),
        ({"rope_scaling": LLAMA3_SCALING}, UnsupportedModelError, ["'llama3'", "'default' or 'yarn'"]),
    ],
)
def test_refused_deepseek_settings(change, error, words):
    with pytest.raises(error) as caught:
        ModelShape.from_hf_config({**DEEPSEEK, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)
