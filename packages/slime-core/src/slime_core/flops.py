"""The cost of a sequence in a decoder: a linear and a quadratic term. Plain numbers; no torch."""

from __future__ import annotations

import dataclasses

from slime_core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsModel:
    """Floating-point operations of a decoder with causal attention, 2 per multiply-add.

    Kaplan et al. 2020 (table 1): a token multiplies with every matrix weight once, 2 × weights; its attention adds a
    dot product and a weighted sum over the tokens up to and including itself, 4 × heads × head width × context per
    layer. Norms, rotary embedding and softmax are left out. Latent attention (DeepSeek-AI 2024, arXiv 2405.04434,
    eq. 9-19) has down- and up-projections in the places of those, and may have narrower values than keys.

    Attributes:
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the MLP; for a mixture of experts, the widths that one token visits, added up.
        num_attention_heads: Query heads.
        num_query_groups: Key and value heads; ``None`` means as many as query heads.
        head_dim: Width of a head's queries and keys; ``None`` means hidden size / heads.
        vocab_size: Entries of the output layer; 0 leaves it out.
        gated: Whether the MLP has three matrices (SwiGLU) rather than two.
        value_dim: Width of a head's values; ``None`` means ``head_dim``.
        latent_dim: Width of the latent of keys and values, in latent attention.
        rotary_dim: Channels of ``head_dim`` that all heads' keys share, in latent attention.
        query_latent_dim: Width of the queries' latent, in latent attention; ``None`` means there is none.
        further_weights: Other weights that each token multiplies with, such as those of routers.

    Raises:
        ConfigError: A size is below 1 (the vocabulary's: below 0), or the hidden size does not split into heads.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    head_dim: int | None = None
    vocab_size: int = 0
    gated: bool = True
    value_dim: int | None = None
    latent_dim: int | None = None
    rotary_dim: int = 0
    query_latent_dim: int | None = None
    further_weights: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name not in _MAY_BE_ZERO)
            if value is not None and value < least:
                raise ConfigError(f"{field.name} {value} of the FLOPs model must be {least} or more")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"hidden_size {self.hidden_size} of the FLOPs model is no multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )

    @property
    def per_token(self) -> int:
        """The linear term of the forward pass: operations per token whatever its context."""
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        return 2 * (self.num_layers * (self._attention_weights + mlp) + self.further_weights) + self.per_logit

    @property
    def per_logit(self) -> int:
        """The output layer's part of that: operations per token whose logits are computed."""
        return 2 * self.hidden_size * self.vocab_size

    @property
    def per_pair(self) -> int:
        """The quadratic term of the forward pass: operations per pair of a token and one that it sees."""
        return 2 * self.num_layers * self.num_attention_heads * (self._head_dim + self._value_dim)

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def _value_dim(self) -> int:
        return self.value_dim or self._head_dim

    @property
    def _attention_weights(self) -> int:
        """Weights of a layer's four projections, or of those that latent attention has in their place."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        output = heads * self._value_dim * hidden
        if self.latent_dim is None:
            groups = self.num_query_groups or heads
            return output + hidden * (heads * self._head_dim + groups * (self._head_dim + self._value_dim))
        keys_values = heads * (self._head_dim - self.rotary_dim + self._value_dim)
        down = hidden * (self.latent_dim + self.rotary_dim)
        queries = heads * self._head_dim
        rank = self.query_latent_dim
        queries = hidden * queries if rank is None else rank * (hidden + queries)
        return output + down + self.latent_dim * keys_values + queries

    def forward(self, tokens: int) -> int:
        """Operations of the forward pass over one sequence, whose n tokens make n(n + 1)/2 causal pairs."""
        return tokens * self.per_token + tokens * (tokens + 1) // 2 * self.per_pair

    def packed(self, *, tokens: int, pairs: int, logits: int) -> int:
        """Operations of the forward pass over a packed row: its tokens, the pairs in which one sees another or itself,
        and the tokens whose logits are computed."""
        return tokens * (self.per_token - self.per_logit) + pairs * self.per_pair + logits * self.per_logit

    def training(self, tokens: int) -> int:
        """Operations of the forward and the backward pass, which costs twice the forward."""
        return 3 * self.forward(tokens)


_MAY_BE_ZERO = ("vocab_size", "gated", "rotary_dim", "further_weights")
