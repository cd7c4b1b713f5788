"""`PackedGPT`: Megatron's GPT over a packed batch, with logits only where a token is predicted.

Notation: T packed tokens, D hidden channels, N rows whose logits are wanted, V the rank's part of the (padded)
    vocabulary, E rotary channels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from slime_megatron.model.attention import LayoutParams
from slime_megatron.packing import PackedBatch


class PackedGPT(GPTModel):  # type: ignore[misc]
    """A decoder-only model that takes :class:`PackedBatch` and gives the logits of its ``logit_rows_N``.

    Args:
        inverse_frequencies_E: Rotary frequencies of half the rotated channels, radians per position.
        kwargs: What :class:`GPTModel` takes. The model has no position embedding of Megatron's own.
    """

    def __init__(self, *, inverse_frequencies_E: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(position_embedding_type="none", **kwargs)
        self.inverse_frequencies_E = inverse_frequencies_E
        # Under sequence parallelism the hidden states are gathered before rows are picked, here and not in the
        # output layer, so that only the wanted rows are multiplied with the vocabulary.
        self.output_layer.sequence_parallel = False
        self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits of the wanted rows, N × V, this rank's part of the vocabulary."""
        hidden_T1D = self.embedding(input_ids=batch.tokens_T[None], position_ids=None)
        hidden_T1D = self.decoder(
            hidden_states=hidden_T1D,
            attention_mask=None,
            rotary_pos_emb=self._rotary(batch.positions_T),
            packed_seq_params=LayoutParams(qkv_format="sbhd", layout=batch.attention),
        )
        if self.config.sequence_parallel:
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden_N1D = hidden_T1D.index_select(0, batch.logit_rows_N)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits_N1V: torch.Tensor = self.output_layer(hidden_N1D, weight=weight)[0]
        return logits_N1V.squeeze(1)

    def _rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Rotary angles of every token, T × 1 × 1 × 2E."""
        angles_TE = torch.outer(positions_T.float(), self.inverse_frequencies_E.to(positions_T.device))
        if self.config.rotary_interleaved:
            return angles_TE.repeat_interleave(2, dim=-1)[:, None, None, :]
        return torch.cat([angles_TE, angles_TE], dim=-1)[:, None, None, :]
