"""Tiny random models with a real trained tokenizer: what the integration tests train and serve."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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


def make_model(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a tiny random model of a family (`qwen3` or `llama`) with its tokenizer; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer(directory)
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False))
    else:
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE, tie_word_embeddings=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return directory


def write_prompts(path: Path, count: int) -> Path:
    """Write `count` different prompts in the documented JSONL format."""
    rows = [{"prompt": f"say a number: {i}", "label": str(i)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
