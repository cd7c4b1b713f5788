"""`PackedGPT`: Megatron's GPT over a packed batch, from tokens to log-probs, without ever holding the logits.

Notation: T packed tokens, D hidden channels, N targets, V the rank's part of the (padded) vocabulary, E rotary
    channels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from slime_core.ops import linear_log_probs_and_entropy
from slime_megatron.model.attention import LayoutParams
from slime_megatron.packing import PackedBatch


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A decoder-only model that takes a :class:`PackedBatch` and returns the log-probs of its targets.

    Args:
        inverse_frequencies_E: Rotary frequencies of half the rotated channels, radians per position.
        true_vocab_size: Token ids from here on are padding.
        kwargs: What :class:`GPTModel` takes. The model has no position embedding of Megatron's own.
    """

    def __init__(self, *, inverse_frequencies_E: torch.Tensor, true_vocab_size: int, **kwargs: Any) -> None:
        super().__init__(position_embedding_type="none", **kwargs)
        self.inverse_frequencies_E = inverse_frequencies_E
        self.true_vocab_size = true_vocab_size

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, which may be those of the embedding."""
        tied = self.share_embeddings_and_output_weights
        weight: torch.Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def forward(
        self, batch: PackedBatch, *, temperature: float, with_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs (nats) of the targets [N], and entropies [N] if wanted; the same on all tensor-parallel ranks."""
        group = self.pg_collection.tp
        return linear_log_probs_and_entropy(
            self.hidden_states(batch),
            self.output_weight,
            batch.targets_N,
            temperature=temperature,
            group=group if group.size() > 1 else None,
            vocab_size=self.true_vocab_size,
            with_entropy=with_entropy,
        )

    def hidden_states(self, batch: PackedBatch) -> torch.Tensor:
        """The hidden states that predict the targets, N × D."""
        hidden_T1D = self.embedding(input_ids=batch.tokens_T[None], position_ids=None)
        hidden_T1D = self.decoder(
            hidden_states=hidden_T1D,
            attention_mask=None,
            rotary_pos_emb=self._rotary(batch.positions_T),
            packed_seq_params=LayoutParams(qkv_format="sbhd", layout=batch.attention),
        )
        if self.config.sequence_parallel:
            # The log-probs' gradient is already that of the whole vocabulary, so it is split here and not summed.
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden_ND: torch.Tensor = hidden_T1D.squeeze(1).index_select(0, batch.logit_rows_N)
        return hidden_ND

    def _rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary angles of every token, T × 1 × 1 × 2E."""
        angles_TE = torch.outer(positions_T.float(), self.inverse_frequencies_E.to(positions_T.device))
        if self.config.rotary_interleaved:
            return angles_TE.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat([angles_TE, angles_TE], dim=-1)[:, None, None, :]
