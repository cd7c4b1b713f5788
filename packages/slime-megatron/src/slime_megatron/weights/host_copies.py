"""A model's weights as copies in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from slime_megatron.model.build import Chunks


class HostWeights:
    """Copies in host memory of a model's parameters and buffers, which can be put into it again."""

    def __init__(self, model: Chunks) -> None:
        self._copies = [tensor.detach().to("cpu", copy=True) for tensor in all_weights(model)]

    @torch.no_grad()
    def put(self, model: Chunks) -> None:
        """Write them into the model's own tensors."""
        for tensor, copy in zip(all_weights(model), self._copies, strict=True):
            tensor.copy_(copy)

    @contextlib.contextmanager
    def in_place(self, model: Chunks) -> Iterator[None]:
        """Have them in the model while the block runs, which must not train: on a CPU the tensors just change hands."""
        tensors = list(all_weights(model))
        if not all(tensor.device.type == "cpu" for tensor in tensors):
            own = HostWeights(model)
            self.put(model)
            try:
                yield
            finally:
                own.put(model)
            return
        data = [tensor.data for tensor in tensors]
        _hand_over(tensors, self._copies)
        try:
            yield
        finally:
            _hand_over(tensors, data)


def _hand_over(tensors: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    for tensor, own in zip(tensors, data, strict=True):
        tensor.data = own


def all_weights(model: Chunks) -> Iterator[torch.Tensor]:
    """Parameters and buffers of all chunks."""
    for chunk in model:
        yield from chunk.parameters()
        yield from chunk.buffers()
