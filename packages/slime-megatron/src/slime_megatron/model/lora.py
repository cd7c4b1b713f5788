"""LoRA (Hu et al., "LoRA", arXiv:2106.09685): W x + (alpha / r) B A x with frozen W, on Megatron's split linear layers.

Of a column-parallel layer, whose outputs are split over the tensor-parallel ranks, B is split and every rank has A; of
a row-parallel one A is split and every rank has B. What crosses between ranks is only r wide.
Notation: T tokens, R the rank, I inputs and O outputs of this rank's part of a layer.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch.nn.functional import linear

from slime_convert.shape import ModelShape
from slime_megatron.errors import TrainerCheckpointError
from slime_megatron.model.build import Chunks, bare, named_weights
from slime_megatron.model.parts import WholeLinear
from slime_megatron.settings.trained import Lora

FACTORS = ("lora_A", "lora_B")


class _Adapted(torch.nn.Module):
    """The parts of a linear layer with an adapter. The base weight keeps its name, and its place in checkpoints."""

    weight: torch.nn.Parameter
    lora_A: torch.nn.Parameter
    lora_B: torch.nn.Parameter
    lora_scale: float
    lora_is_on: bool
    lora_is_gated: bool
    split_factor: Any = None

    def forward(self, input_T1I: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layer's output with the adapter's added, and the layer's bias."""
        output_T1O, bias_O = super().forward(input_T1I, *args, **kwargs)
        if self.lora_is_on:
            output_T1O = output_T1O + self.lora_scale * self.product(input_T1I)
        return output_T1O, bias_O

    def product(self, input_T1I: torch.Tensor) -> torch.Tensor:
        """B A x."""
        return linear(linear(input_T1I, self.lora_A), self.lora_B)

    def merged_weight(self) -> torch.Tensor:
        """This rank's part of W + scale · B A, summed in fp32 and rounded once."""
        delta_OI = self.lora_scale * (self.lora_B.float() @ self.lora_A.float())
        return (self.weight.float() + delta_OI).to(self.weight.dtype)


class _Split(_Adapted):
    """The same where tensor-parallel ranks share the layer, and one factor of the adapter, too."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The layer's part of a checkpoint; Megatron takes a parameter that it does not know for whole."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        key = prefix + self.split_factor
        state[key] = make_tp_sharded_tensor_for_checkpoint(
            getattr(self, self.split_factor),
            key,
            FACTORS[::-1].index(self.split_factor),
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.lora_is_gated:  # a rank's rows are its part of the gate, then of the up projection
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state


class AdaptedColumn(_Split, ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel layer with an adapter."""

    split_factor = "lora_B"

    def product(self, input_T1I: torch.Tensor) -> torch.Tensor:
        """B A x. The ranks' parts of the gradient of A x are summed, where the layer's own input's are too."""
        if self.is_expert:
            # The dispatcher sums the input's gradient over the ranks, so it must stay in parts, and A's is summed here.
            lora_A = copy_to_tensor_model_parallel_region(self.lora_A, group=self.tp_group)
            return linear(linear(input_T1I, lora_A), self.lora_B)
        inner_T1R = linear(input_T1I, self.lora_A)
        if self.sequence_parallel:
            inner_T1R = gather_from_sequence_parallel_region(inner_T1R, group=self.tp_group)
        else:
            inner_T1R = copy_to_tensor_model_parallel_region(inner_T1R, group=self.tp_group)
        return linear(inner_T1R, self.lora_B)


class AdaptedRow(_Split, RowParallelLinear):  # type: ignore[misc]
    """A row-parallel layer with an adapter."""

    split_factor = "lora_A"

    def product(self, input_T1I: torch.Tensor) -> torch.Tensor:
        """B A x. The ranks' parts of A x are summed before B, whose product all have or, by tokens, share."""
        inner_T1R = linear(input_T1I, self.lora_A)
        if self.is_expert:
            # The dispatcher sums the outputs of the ranks.
            return linear(inner_T1R, copy_to_tensor_model_parallel_region(self.lora_B, group=self.tp_group))
        if self.sequence_parallel:
            inner_T1R = reduce_scatter_to_sequence_parallel_region(inner_T1R, group=self.tp_group)
        else:
            inner_T1R = reduce_from_tensor_model_parallel_region(inner_T1R, group=self.tp_group)
        return linear(inner_T1R, self.lora_B)


class AdaptedWhole(_Adapted, WholeLinear):  # type: ignore[misc]
    """A layer that every rank has whole, with an adapter that it has whole too."""


_KINDS: dict[type[torch.nn.Module], type[_Adapted]] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    WholeLinear: AdaptedWhole,
}


def add_adapters(chunks: Chunks, shape: ModelShape, lora: Lora, seed: int) -> None:
    """Give this rank's layers their adapters, which do nothing at first, and freeze everything else.

    A starts as in PEFT, uniform within ±1/√inputs, from a seed of its layer's name: the same at every layout. B is 0.
    """
    wanted = set(lora.weights(shape))
    for chunk in chunks:
        bare(chunk).requires_grad_(False)
        bare(chunk).lora = lora
        layers = {layer.weight: layer for layer in bare(chunk).decoder.modules() if type(layer) in _KINDS}
        for name, weight in named_weights([chunk]):
            if name in wanted:
                _adapt(layers[weight], name, lora, seed, bare(chunk).config.sequence_parallel)


def _adapt(layer: Any, name: str, lora: Lora, seed: int, sequence_parallel: bool) -> None:
    layer.__class__ = _KINDS[type(layer)]
    weight, split = layer.weight, layer.split_factor
    group = layer.tp_group if split else None
    ranks, rank = (group.size(), group.rank()) if group else (1, 0)
    inputs = weight.shape[1] * (ranks if split == "lora_A" else 1)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    whole_RI = (torch.rand(lora.rank, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)
    own_RI = whole_RI.chunk(ranks, 1)[rank] if split == "lora_A" else whole_RI
    layer.lora_A = torch.nn.Parameter(own_RI.contiguous().to(weight))
    layer.lora_B = torch.nn.Parameter(weight.new_zeros(weight.shape[0], lora.rank))
    layer.lora_scale, layer.lora_is_on = lora.scale, True
    layer.lora_is_gated = name.endswith("linear_fc1.weight")
    for factor in FACTORS:
        _describe(layer, factor, rank, sequence_parallel)


def _describe(layer: Any, factor: str, rank: int, sequence_parallel: bool) -> None:
    """Mark for Megatron where a factor's gradient is summed, and which ranks count it in the gradient's norm."""
    param, is_expert = getattr(layer, factor), getattr(layer, "is_expert", False)
    param.allreduce = getattr(layer.weight, "allreduce", True)
    if factor == layer.split_factor:
        set_tensor_model_parallel_attributes(param, True, FACTORS[::-1].index(factor), 1)
    elif is_expert:
        # Megatron takes copies for those of the dense layers' ranks, which may be others than the experts'.
        param.tensor_model_parallel, param.shared = True, rank > 0
    else:
        param.sequence_parallel = sequence_parallel


def adapted_layers(chunks: Chunks) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """The layers with adapters: their weight's name, as in :func:`named_weights`, their weight, and they themselves."""
    for chunk in chunks:
        found = (layer for layer in bare(chunk).modules() if isinstance(layer, _Adapted))
        layers: dict[torch.Tensor, _Adapted] = {layer.weight: layer for layer in found}
        for name, weight in named_weights([chunk]) if layers else ():
            if weight in layers:
                yield name, weight, layers[weight]


@contextlib.contextmanager
def base_weights(chunks: Chunks) -> Iterator[None]:
    """Within the block the model computes without its adapters: the base model, as a reference."""
    layers = [layer for _, _, layer in adapted_layers(chunks)]
    for layer in layers:
        layer.lora_is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.lora_is_on = True


@torch.no_grad()
def reset_adapters(chunks: Chunks) -> None:
    """Have adapters, if there are any, do nothing, as at the start."""
    for _, _, layer in adapted_layers(chunks):
        layer.lora_B.zero_()


def loadable_adapters(saved: Any, chunks: Chunks, directory: Any) -> bool:
    """Whether a checkpoint has adapters, by what :meth:`Lora.saved` gave for it; without, the model's stay as they are.

    Raises:
        TrainerCheckpointError: It has adapters, and the model none, or others.
    """
    lora: Lora | None = getattr(bare(chunks[0]), "lora", None)
    if saved is None or (lora is not None and saved == lora.saved()):
        return saved is not None
    flags = f"--lora-rank {saved['rank']} --lora-alpha {saved['alpha']:g}"
    flags += f" --lora-target-modules {' '.join(saved['targets'])}" if saved["targets"] else ""
    here = "without adapters" if lora is None else "with others"
    raise TrainerCheckpointError(
        f"{directory} holds LoRA adapters, and this run is {here}; give {flags}, or merge its adapter/ into the base "
        "model by slime-convert merge-lora"
    )


def without_adapters(state: dict[str, Any]) -> dict[str, Any]:
    """A model's state without that of adapters."""
    return {key: value for key, value in state.items() if key.rpartition(".")[2] not in FACTORS}
