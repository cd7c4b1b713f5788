"""Floating-point operations of a Llama-like decoder, counted as 2 per multiply-add.

A token's forward pass multiplies with every matrix weight once: 2 × weights. Attention adds, per layer, a dot product
and a weighted sum over the tokens it sees: 4 × heads × head_dim × context. The output layer runs only where logits are
wanted: 2 × hidden × vocabulary. The backward pass costs twice the forward pass. (Kaplan et al. 2020, table 1, with the
vocabulary counted apart; norms, rotary embedding and softmax are left out.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def forward_flops(config: Mapping[str, Any], *, tokens: float, context: float, logits: float) -> float:
    """Operations of a forward pass.

    Args:
        config: A Hugging Face `config.json` of a dense Llama-like model.
        tokens: Tokens that pass through the layers.
        context: Mean number of tokens that each of them is computed against.
        logits: Tokens whose logits are computed.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    attention_weights = 2 * hidden * head_dim * (heads + kv_heads)
    mlp_weights = 3 * hidden * config["intermediate_size"]
    per_layer = 2 * (attention_weights + mlp_weights) + 4 * heads * head_dim * context
    return float(tokens * config["num_hidden_layers"] * per_layer + logits * 2 * hidden * config["vocab_size"])


def training_flops(config: Mapping[str, Any], *, tokens: float, context: float, logits: float) -> float:
    """Operations of a forward and a backward pass; arguments as in :func:`forward_flops`."""
    return 3 * forward_flops(config, tokens=tokens, context=context, logits=logits)
