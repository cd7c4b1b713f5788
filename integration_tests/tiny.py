"""Tiny random models with a real trained tokenizer: what the integration tests train and serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 499  # no multiple of 128 and odd, so that vocabulary padding is always in play
END, START, PAD = "<|end|>", "<|start|>", "<|pad|>"
TEXT = ["one and one is two", "12 + 30 = 42", "the sum of 7 and 8 is 15", "say a number: 3", "what is 9 + 4? 13"]

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 2,
    "dtype": "float32",
}


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on a few lines and save it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, START, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, bos_token=START, pad_token=PAD)
    tokenizer.save_pretrained(directory)
    return tokenizer


_ROUTED = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "tie_word_embeddings": False,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_THREE = _SHAPE | {"num_hidden_layers": 3}
_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_SHAPE, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_THREE, **_EXPERTS, tie_word_embeddings=False),
    # On a CPU SGLang pads an expert's share of a rank to 32 rows. These two ranks share as they would on a GPU.
    "qwen3-moe-split": lambda: Qwen3MoeConfig(
        **_THREE, **(_EXPERTS | {"num_experts": 6, "moe_intermediate_size": 64}), tie_word_embeddings=False
    ),
    "glm4-moe": lambda: Glm4MoeConfig(**_THREE, **_ROUTED, use_qk_norm=True, attention_bias=True),
    "deepseek": lambda: DeepseekV3Config(**(_THREE | _LATENT), **_ROUTED),
}


def make_model(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a tiny random model of one of these families with its tokenizer; return the directory.

    Experts come in threes that a router can hardly tell apart, and a token goes to two: which of the three is often
    left to rounding.
    """
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("mlp.gate.weight"):
                for further in (1, 2):
                    parameter[further::3] = parameter[::3] + 1e-8 * torch.randn_like(parameter[::3])
    model.save_pretrained(directory)
    if family == "deepseek":  # published ones have it, and SGLang asks for it; transformers leaves it out
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps(config | {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
        )
    return directory


def write_prompts(path: Path, count: int) -> Path:
    """Write `count` different prompts in the documented JSONL format."""
    rows = [{"prompt": f"say a number: {i}", "label": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
