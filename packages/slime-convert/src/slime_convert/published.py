"""The published models for which shape flags are kept: what their ``config.json`` says about the shape. No torch here.

One entry stands for every model with the same shape flags; :class:`PublishedModel` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_convert.shape import ModelShape


@dataclass(frozen=True)
class PublishedModel:
    """A published shape.

    Attributes:
        models: The models that have it, as their makers name them.
        config: The values of their ``config.json`` that the shape depends on. ``max_position_embeddings``, which no
            weight depends on and no flag is compared with, is that of one of them.
    """

    models: str
    config: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        """The shape that the config describes."""
        return ModelShape.from_hf_config(self.config)


def _sizes(layers: int, hidden: int, ffn: int, heads: int, groups: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
    }


def _llama3_scaling(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
_QWEN25_LARGE = {**_QWEN25, "vocab_size": 152064, "max_position_embeddings": 131072, "tie_word_embeddings": False}
_QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_QWEN3_LARGE = {**_QWEN3, "tie_word_embeddings": False}
_QWEN3_MOE = {
    **_QWEN3_LARGE,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_GLM4 = {
    "model_type": "glm4",
    "head_dim": 128,
    "vocab_size": 151552,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_SIGMOID_ROUTER = {
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
}
_GLM45 = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "vocab_size": 151552,
}
_DEEPSEEK_HEADS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def _experts(routed: int, per_token: int, ffn: int, shared: int, dense: int, scaling: float) -> dict[str, Any]:
    return {
        "n_routed_experts": routed,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": ffn,
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": scaling,
    }


def _yarn(factor: float, beta_fast: float) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }


PUBLISHED: Mapping[str, PublishedModel] = {
    "smollm2-135M": PublishedModel(
        "SmolLM2-135M, SmolLM2-135M-Instruct",
        {
            "model_type": "llama",
            **_sizes(30, 576, 1536, 9, 3),
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 100000,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "llama3-8B": PublishedModel(
        "Meta-Llama-3-8B, Meta-Llama-3-8B-Instruct",
        {**_LLAMA3, **_sizes(32, 4096, 14336, 32, 8), "max_position_embeddings": 8192},
    ),
    "llama3-70B": PublishedModel(
        "Meta-Llama-3-70B, Meta-Llama-3-70B-Instruct",
        {**_LLAMA3, **_sizes(80, 8192, 28672, 64, 8), "max_position_embeddings": 8192},
    ),
    "llama3.1-8B": PublishedModel(
        "Llama-3.1-8B, Llama-3.1-8B-Instruct",
        {
            **_LLAMA3,
            **_sizes(32, 4096, 14336, 32, 8),
            "max_position_embeddings": 131072,
            "rope_scaling": _llama3_scaling(8.0),
        },
    ),
    "llama3.2-3B": PublishedModel(
        "Llama-3.2-3B, Llama-3.2-3B-Instruct",
        {
            **_LLAMA3,
            **_sizes(28, 3072, 8192, 24, 8),
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_scaling": _llama3_scaling(32.0),
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-0.5B": PublishedModel("Qwen2.5-0.5B, Qwen2.5-0.5B-Instruct", {**_QWEN25, **_sizes(24, 896, 4864, 14, 2)}),
    "qwen2.5-1.5B": PublishedModel("Qwen2.5-1.5B, Qwen2.5-1.5B-Instruct", {**_QWEN25, **_sizes(28, 1536, 8960, 12, 2)}),
    "qwen2.5-3B": PublishedModel("Qwen2.5-3B, Qwen2.5-3B-Instruct", {**_QWEN25, **_sizes(36, 2048, 11008, 16, 2)}),
    "qwen2.5-7B": PublishedModel(
        "Qwen2.5-7B, Qwen2.5-7B-Instruct", {**_QWEN25_LARGE, **_sizes(28, 3584, 18944, 28, 4)}
    ),
    "qwen2.5-32B": PublishedModel(
        "Qwen2.5-32B", {**_QWEN25_LARGE, **_sizes(64, 5120, 27648, 40, 8), "rms_norm_eps": 1e-5}
    ),
    "qwen2.5-32B-Instruct": PublishedModel(
        "Qwen2.5-32B-Instruct",
        {**_QWEN25_LARGE, **_sizes(64, 5120, 27648, 40, 8), "max_position_embeddings": 32768},
    ),
    "qwen3-0.6B": PublishedModel("Qwen3-0.6B, Qwen3-0.6B-Base", {**_QWEN3, **_sizes(28, 1024, 3072, 16, 8)}),
    "qwen3-1.7B": PublishedModel("Qwen3-1.7B, Qwen3-1.7B-Base", {**_QWEN3, **_sizes(28, 2048, 6144, 16, 8)}),
    "qwen3-4B": PublishedModel("Qwen3-4B, Qwen3-4B-Base", {**_QWEN3, **_sizes(36, 2560, 9728, 32, 8)}),
    "qwen3-8B": PublishedModel("Qwen3-8B, Qwen3-8B-Base", {**_QWEN3_LARGE, **_sizes(36, 4096, 12288, 32, 8)}),
    "qwen3-14B": PublishedModel("Qwen3-14B, Qwen3-14B-Base", {**_QWEN3_LARGE, **_sizes(40, 5120, 17408, 40, 8)}),
    "qwen3-32B": PublishedModel("Qwen3-32B", {**_QWEN3_LARGE, **_sizes(64, 5120, 25600, 64, 8)}),
    "qwen3-30B-A3B": PublishedModel(
        "Qwen3-30B-A3B, Qwen3-30B-A3B-Base",
        {**_QWEN3_MOE, **_sizes(48, 2048, 6144, 32, 4), "moe_intermediate_size": 768},
    ),
    "qwen3-235B-A22B": PublishedModel(
        "Qwen3-235B-A22B", {**_QWEN3_MOE, **_sizes(94, 4096, 12288, 64, 4), "moe_intermediate_size": 1536}
    ),
    "glm4-9B": PublishedModel(
        "GLM-4-9B-0414, GLM-Z1-9B-0414", {**_GLM4, **_sizes(40, 4096, 13696, 32, 2), "attention_bias": True}
    ),
    "glm4-32B": PublishedModel(
        "GLM-4-32B-0414, GLM-4-32B-Base-0414, GLM-Z1-32B-0414",
        {**_GLM4, **_sizes(61, 6144, 23040, 48, 2), "attention_bias": False},
    ),
    "glm4.5-106B-A12B": PublishedModel(
        "GLM-4.5-Air, GLM-4.5-Air-Base",
        {
            **_GLM45,
            **_sizes(46, 4096, 10944, 96, 8),
            **_experts(128, 8, 1408, shared=1, dense=1, scaling=1.0),
            "use_qk_norm": False,
        },
    ),
    "glm4.5-355B-A32B": PublishedModel(
        "GLM-4.5, GLM-4.5-Base, GLM-4.6, GLM-4.7",
        {
            **_GLM45,
            **_sizes(92, 5120, 12288, 96, 8),
            **_experts(160, 8, 1536, shared=1, dense=3, scaling=2.5),
            "use_qk_norm": True,
        },
    ),
    "glm4.7-30B-A3B": PublishedModel(
        "GLM-4.7-Flash",
        {
            "model_type": "glm4_moe_lite",
            **_sizes(47, 2048, 10240, 20, 20),
            **_experts(64, 4, 1536, shared=1, dense=1, scaling=1.8),
            "kv_lora_rank": 512,
            "max_position_embeddings": 202752,
            "n_group": 1,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "v_head_dim": 256,
            "vocab_size": 154880,
        },
    ),
    "deepseek-v3": PublishedModel(
        "DeepSeek-V3, DeepSeek-V3-0324, DeepSeek-V3.1, DeepSeek-R1, DeepSeek-R1-0528",
        {
            "model_type": "deepseek_v3",
            **_SIGMOID_ROUTER,
            **_DEEPSEEK_HEADS,
            **_sizes(61, 7168, 18432, 128, 128),
            **_experts(256, 8, 2048, shared=1, dense=3, scaling=2.5),
            "max_position_embeddings": 163840,
            "n_group": 8,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "rms_norm_eps": 1e-6,
            "rope_scaling": _yarn(40, beta_fast=32),
            "rope_theta": 10000,
            "topk_group": 4,
            "vocab_size": 129280,
        },
    ),
    "moonlight": PublishedModel(
        "Moonlight-16B-A3B, Moonlight-16B-A3B-Instruct",
        {
            "model_type": "deepseek_v3",
            **_SIGMOID_ROUTER,
            **_DEEPSEEK_HEADS,
            **_sizes(27, 2048, 11264, 16, 16),
            **_experts(64, 6, 1408, shared=2, dense=1, scaling=2.446),
            "max_position_embeddings": 8192,
            "n_group": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "topk_group": 1,
            "vocab_size": 163840,
        },
    ),
    "kimi-k2": PublishedModel(
        "Kimi-K2-Base, Kimi-K2-Instruct",
        {
            "model_type": "kimi_k2",
            **_SIGMOID_ROUTER,
            **_DEEPSEEK_HEADS,
            **_sizes(61, 7168, 18432, 64, 64),
            **_experts(384, 8, 2048, shared=1, dense=1, scaling=2.827),
            "max_position_embeddings": 131072,
            "n_group": 1,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
            "rms_norm_eps": 1e-6,
            "rope_scaling": _yarn(32.0, beta_fast=1.0),
            "rope_theta": 50000.0,
            "topk_group": 1,
            "vocab_size": 163840,
        },
    ),
}
"""Published shapes by the name of their file in ``scripts/models``."""
