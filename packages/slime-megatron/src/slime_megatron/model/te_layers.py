"""Transformer Engine's layers: its attention over packed rows, and where its layers keep what local ones name apart.

Of the layers that Megatron-core 0.16.1 builds of Transformer Engine's modules, all stay but the core attention. Not run
on CUDA: tested with stand-ins of Transformer Engine's modules on a CPU.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, layers
from megatron.core.transformer.enums import AttnMaskType

from slime_megatron.model.attention import AttentionLayout, PackedParams, attend, without_batch

# A norm that is part of the linear layer after it, and the norm's name in local layers.
_FUSED = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
}
_FUSED_ENDS = re.compile(rf"(?<=\.)(?:{'|'.join(map(re.escape, _FUSED))})$")
# Grouped experts are one module per product, with a weight for each of this rank's experts.
_GROUPED = re.compile(r"(?<=\.experts\.)(linear_fc[12])\.weight(\d+)$")
_NORM_OF_EXPERTS = re.compile(r"(?<=\.)pre_mlp_layernorm\.weight$")


def local_name(name: str) -> str:
    """A weight's name in a model of local layers, by which it is chosen, exported and loaded."""
    return _GROUPED.sub(r"local_experts.\2.\1.weight", _FUSED_ENDS.sub(lambda found: _FUSED[found[0]], name))


def checkpoint_key(key: str, *, latent_attention: bool) -> str:
    """The key under which a model of local layers keeps a weight in checkpoints, so that both kinds load both.

    Local layers use the fused names, too (``sharded_state_dict_keys_map`` in Megatron-core), but for latent attention;
    Transformer Engine's do not fuse the norm before experts.
    """
    if latent_attention:
        return local_name(key)
    return _NORM_OF_EXPERTS.sub("mlp.linear_fc1.layer_norm_weight", key)


def mark_whole_weights(modules: Iterable[Any]) -> None:
    """Take back that weights which every rank has whole are split: Transformer Engine says so of every linear layer.

    Otherwise they would be gathered for export, and counted by each rank in the norm of the gradient.
    """
    for module in modules:
        # Experts' layers may have no mode either, but they are split. Megatron tags the weights that are whole.
        weight = getattr(module, "weight", None)  # grouped experts have several
        if getattr(module, "parallel_mode", "") is None and hasattr(weight, "sequence_parallel"):
            module.weight.tensor_model_parallel = False


@contextlib.contextmanager
def fusing_without_apex() -> Iterator[None]:
    """Let local linear layers be built where gradients are to be added up in the matrix product, but not by them.

    Transformer Engine's layers need no kernel of Apex's for it. Megatron-core 0.16.1 asks for one where it builds the
    output layer, which multiplies nothing here. (Not run on CUDA.)
    """
    available, layers._grad_accum_fusion_available = layers._grad_accum_fusion_available, True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available


def stop_fusing(modules: Iterable[Any]) -> None:
    """Have local linear layers add no gradients up if Apex's kernel is not there."""
    for module in modules:
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and not layers._grad_accum_fusion_available:
            module.gradient_accumulation_fusion = False


def thd_params(layout: AttentionLayout) -> PackedSeqParams:
    """The arguments of Transformer Engine's attention for a packed row. Padding is a run of its own.

    Telling it of padding (``cu_seqlens_padded``) would turn flash attention off.
    """
    [call] = layout.flash_calls
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=call.query_ends,
        cu_seqlens_kv=call.key_ends,
        max_seqlen_q=call.most_queries,
        max_seqlen_kv=call.most_keys,
    )


class TEAttention(TEDotProductAttention):  # type: ignore[misc]
    """Transformer Engine's attention over packed rows; over shared prompts, variable-length calls that are merged.

    Megatron is told that rows are plain ones (``sbhd``), and applies the rotary angles row by row.
    """

    def __init__(self, config: Any, *args: Any, flash: bool, softmax_scale: float | None = None, **how: Any) -> None:
        super().__init__(config, *args, softmax_scale=softmax_scale, **how)
        self._flash, self._scale = flash, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None = None,
        *,
        packed_seq_params: PackedParams,
        **unused: Any,
    ) -> torch.Tensor:
        """As in :class:`slime_megatron.model.attention.PackedAttention`."""
        query_THE, key_TJE, value_TJF = map(without_batch, (query, key, value))
        layout = packed_seq_params.layout
        if layout.continuations:
            output = attend(query_THE, key_TJE, value_TJF, layout, self._scale, flash=self._flash)
        else:
            how = {"attn_mask_type": AttnMaskType.causal, "packed_seq_params": thd_params(layout)}
            output = super().forward(query_THE, key_TJE, value_TJF, None, **how)
        return output.reshape(len(query), 1, -1)
