"""Megatron's layer with GLM-4's norms behind attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from slime_megatron.model.norm import RMSNorm


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose attention and MLP outputs are normalised before they join the residual stream.

    Args:
        config: Megatron's transformer configuration.
        args: What :class:`TransformerLayer` takes.
        after_attention: Normalise the output of attention.
        after_mlp: Normalise the output of the MLP.
        kwargs: What :class:`TransformerLayer` takes.
    """

    def __init__(
        self, config: Any, *args: Any, after_attention: bool = True, after_mlp: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.self_attn_bda: Callable[..., Any]
        self.mlp_bda: Callable[..., Any]
        if after_attention:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attn_bda = _normalised(self.self_attn_bda, self.post_self_attn_layernorm)
        if after_mlp:
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp_bda = _normalised(self.mlp_bda, self.post_mlp_layernorm)


def _normalised(make_bda: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """Megatron's maker of the function that adds bias, dropout and residual, with ``norm`` on what is added."""

    def make(*args: Any) -> Callable[..., Any]:
        add = make_bda(*args)

        def normalise_and_add(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> Any:
            # The linear layers of these models have no biases.
            output, bias = output_with_bias
            return add((norm(output), bias), residual, dropout)

        return normalise_and_add

    return make
