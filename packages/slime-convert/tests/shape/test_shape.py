import itertools
import json
import math
import re
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

from slime_convert import SHAPE_FLAGS, ConvertError, ModelShape, check_flags
from slime_convert.errors import HfConfigError, ShapeMismatchError, UnsupportedModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_importing_the_shape_does_not_import_torch():
    code = "import sys, slime_convert.shape; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


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


def test_glm4_without_biases():
    shape = ModelShape.from_hf_config({**LLAMA, "model_type": "glm4", "attention_bias": False})
    assert not shape.add_qkv_bias and "--add-qkv-bias" not in shape.to_megatron_flags()


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


DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "num_hidden_layers": 5,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "original_max_position_embeddings": 4096,
    },
}


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


def parse(words):
    """Values by dest, read the way a command line would."""
    by_name = {flag.name: flag for flag in SHAPE_FLAGS}
    given, words = {}, iter(words)
    for word in words:
        flag = by_name[word]
        given[flag.dest] = True if flag.is_switch else flag.type(next(words))
    return given
