"""Every family: published configs, from which tiny models are made that must come there and back and run in Megatron.

This is what the table of families in the README stands on.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from check.prediction import all_logits
from slime_convert.check import check_models, proofs
from slime_convert.errors import ConvertError
from slime_convert.families import FAMILIES
from slime_convert.shape import ModelShape

LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
QWEN = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_EXPERTS = {"decoder_sparse_step": 1, "output_router_logits": False, "router_aux_loss_coef": 0.001}
GLM = {
    "eos_token_id": [151329, 151336, 151338],
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "pad_token_id": 151329,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
ROUTED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
DEEPSEEK = ROUTED | {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

PUBLISHED = {
    "llama": {
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistral": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mixtral": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen2": QWEN
    | {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
    },
    "qwen2_moe": QWEN
    | QWEN_EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
    },
    "qwen3": QWEN
    | {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": QWEN
    | QWEN_EXPERTS
    | {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen3_next": QWEN_EXPERTS
    | {
        "attention_bias": False,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "mimo": QWEN
    | {
        "attention_bias": True,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "vocab_size": 151680,
    },
    "glm": GLM
    | {
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
        "rope_theta": 10000.0,
    },
    "glm4": GLM
    | {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 6144,
        "intermediate_size": 23040,
        "num_attention_heads": 48,
        "num_hidden_layers": 61,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
    },
    "glm4_moe": GLM
    | {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK
    | {
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN | {"beta_fast": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "glm4_moe_lite": ROUTED
    | {
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "deepseek_v32": DEEPSEEK | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
    "glm_moe_dsa": ROUTED
    | {
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 3,
        "head_dim": 64,
        "hidden_size": 6144,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "index_topk": 2048,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "gpt_oss": {
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "pad_token_id": 199999,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "gemma3_text": {
        "attn_logit_softcapping": None,
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
# Other members of a family, in what they differ from the one above.
VARIANTS = {
    "llama, of old": (
        "llama",
        {"rope_scaling": None, "head_dim": None, "num_key_value_heads": 32, "tie_word_embeddings": False},
    ),
    "llama, other constants": (
        "llama",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096, "low_freq_factor": 2.0}},
    ),
    "mistral, Nemo": (
        "mistral",
        {"sliding_window": None, "head_dim": 128, "hidden_size": 5120, "rope_theta": 1000000.0},
    ),
    "mixtral, tied and with a window": ("mixtral", {"tie_word_embeddings": True, "sliding_window": 4096}),
    "qwen2_moe, experts in some layers": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3_next, lists": (
        "qwen3_next",
        {
            "full_attention_interval": None,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"] * 16,
            "linear_num_value_heads": 16,
            "num_nextn_predict_layers": 0,
        },
    ),
    "mimo, two modules": ("mimo", {"num_nextn_predict_layers": 2}),
    "glm, no biases": ("glm", {"attention_bias": False}),
    "glm4, biases": ("glm4", {"attention_bias": True}),
    "glm4_moe, 4.5": ("glm4_moe", {"use_qk_norm": True, "first_k_dense_replace": 3, "num_hidden_layers": 92}),
    "deepseek_v3, Moonlight": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 1,
            "n_group": 1,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "topk_group": 1,
        },
    ),
    "glm_moe_dsa, no dense layers": ("glm_moe_dsa", {"first_k_dense_replace": 0}),
    "gpt_oss, plain rotary and another order": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 8,
            "rope_scaling": {"rope_type": "default"},
            "swiglu_limit": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss, rounded YaRN": (
        "gpt_oss",
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}},
    ),
    "gemma3_text, 27B": (
        "gemma3_text",
        {
            "head_dim": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "tie_word_embeddings": False,
        },
    ),
}
CONFIGS = {name: config | {"model_type": name} for name, config in PUBLISHED.items()}
CONFIGS |= {
    name: {key: value for key, value in (CONFIGS[base] | changes).items() if value is not None or key == "q_lora_rank"}
    for name, (base, changes) in VARIANTS.items()
}
# transformers has no classes for these names: Kimi-K2 is DeepSeek V3, and MiMo's layers are Qwen2's.
CLASSES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
# Left out, it counts as none here; in some classes of transformers as one, which they do not build.
KNOWN_TO_DIFFER = {"num_nextn_predict_layers"}


# One of each way in which Megatron's layers differ.
QUICK = (
    "llama, other constants",
    "qwen2_moe",
    "qwen3_next",
    "mimo",
    "glm4",
    "deepseek_v3",
    "glm_moe_dsa",
    "gpt_oss",
    "gemma3_text",
)
EVERY = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in CONFIGS]


@pytest.fixture(scope="module")
def results(request):
    """What is found of each config that a test asks for.

    They share a process of Megatron's, with parts for what stock core lacks.
    """
    asking = [item for item in request.session.items if "results" in getattr(item, "fixturenames", ())]
    names = [item.callspec.params["name"] for item in asking]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "_MEGATRON", "core_parts")
        patch.setattr(proofs, "what_core_lacks", lambda shape: "")
        patch.setattr(proofs, "expected_logits", all_logits)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        return dict(zip(names, check_models([CONFIGS[name] for name in names]), strict=True))


@pytest.mark.parametrize("name", EVERY)
def test_a_tiny_model_of_each_kind_passes_every_proof(results, name):
    outcomes = {row.name: (row.outcome, row.detail) for row in results[name].rows}
    assert len(outcomes) == 5
    assert {outcome for outcome, _ in outcomes.values()} == {"passed"}, outcomes
    print(results[name].to_text())


def test_every_family_is_proven():
    assert PUBLISHED.keys() == FAMILIES.keys()


def saved(config):
    """A config as transformers saves it, with everything that it fills in."""
    values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
    filled = AutoConfig.for_model(CLASSES.get(config["model_type"], config["model_type"]), **values)
    return json.loads(filled.to_json_string(use_diff=False)) | {"model_type": config["model_type"]}


def differences(config):
    """The fields of a shape in which a config and its saved form differ."""
    given, written = (dataclasses.asdict(ModelShape.from_hf_config(form)) for form in (config, saved(config)))
    return {name: (given[name], written[name]) for name in given if given[name] != written[name]}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_saves_means_the_same(name):
    assert differences(CONFIGS[name]) == {}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_key_that_is_left_out_counts_as_in_transformers(name):
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    left_out = 0
    for key in config.keys() - KNOWN_TO_DIFFER - {"model_type"}:
        shorter = {other: value for other, value in config.items() if other != key}
        try:
            ModelShape.from_hf_config(shorter)
        except ConvertError:
            continue  # it must be there
        assert differences(shorter) == {}, key
        left_out += 1
    assert left_out > 3
