"""What a sequence costs a decoder to compute: a linear and a quadratic term. Plain numbers; no torch."""

from __future__ import annotations

import dataclasses

from slime_core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlopsModel:
    """Floating-point operations of a decoder with causal attention, 2 per multiply-add.

    Kaplan et al. 2020 (table 1): a token multiplies with every matrix weight once, 2 × weights; its attention adds a
    dot product and a weighted sum over the tokens up to and including itself, 4 × heads × head width × context per
    layer. Norms, rotary embedding and softmax are left out.

    Attributes:
        num_layers: Transformer layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the MLP; for a mixture of experts, the widths that one token visits, added up.
        num_attention_heads: Query heads.
        num_query_groups: Key and value heads; ``None`` means as many as query heads.
        head_dim: Width of a head; ``None`` means hidden size / heads.
        vocab_size: Entries of the output layer; 0 leaves it out.
        gated: Whether the MLP has three matrices (SwiGLU) rather than two.

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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), int(field.name not in ("vocab_size", "gated"))
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
        heads, groups = self.num_attention_heads, self.num_query_groups or self.num_attention_heads
        attention = 2 * self.hidden_size * self._head_dim * (heads + groups)
        mlp = (3 if self.gated else 2) * self.hidden_size * self.ffn_hidden_size
        return 2 * (self.num_layers * (attention + mlp) + self.hidden_size * self.vocab_size)

    @property
    def per_pair(self) -> int:
        """The quadratic term of the forward pass: operations per pair of a token and one that it sees."""
        return 4 * self.num_layers * self.num_attention_heads * self._head_dim

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def forward(self, tokens: int) -> int:
        """Operations of the forward pass over one sequence, whose n tokens make n(n + 1)/2 causal pairs."""
        return tokens * self.per_token + tokens * (tokens + 1) // 2 * self.per_pair

    def training(self, tokens: int) -> int:
        """Operations of the forward and the backward pass, which costs twice the forward."""
        return 3 * self.forward(tokens)
