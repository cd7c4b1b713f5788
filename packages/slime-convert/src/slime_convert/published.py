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
        config: The values of their ``config.json`` that the shape depends on.
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
}
"""Published shapes by the name of their file in ``scripts/models``."""
