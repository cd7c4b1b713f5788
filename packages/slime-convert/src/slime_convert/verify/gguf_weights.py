"""The weights of a GGUF file under Hugging Face's names, as :class:`slime_convert.checkpoint.Weights` asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_convert.checkpoint import Naming, TensorInfo, tensor_info
from slime_convert.errors import GgufError
from slime_convert.gguf import names_in_gguf, need_extra, refuse_family
from slime_convert.gguf_file import FAMILIES, FREQUENCIES, GgufTensor, hf_config, is_scaled, read_gguf
from slime_convert.mapping import WeightTranslation
from slime_convert.shape import ModelShape

_ROWS_ELEMENTS = 2**22  # expanded at a time


class GgufWeights:
    """The weights of a GGUF file, expanded to ``float32`` through the ``gguf`` package.

    Tensors that are none of the model's weights keep their names. A rotary scaling that is stored as a tensor is none
    of the weights.

    Args:
        path: The file.

    Raises:
        GgufError: The file is no readable GGUF file, or the ``gguf`` extra is not installed.
        UnsupportedModelError: The model is none whose names are known.
    """

    naming: Naming = "huggingface"
    arguments: Mapping[str, Any] = {}

    def __init__(self, path: Path) -> None:
        need_extra("gguf")
        self.directory = path
        file = read_gguf(path)
        if file.architecture not in FAMILIES:
            raise refuse_family(path, file.architecture)
        config = hf_config(file)
        if config is None:
            raise GgufError(f"{path} lacks a number that tells the model's shape, or its embedding; fetch it again")
        shape = ModelShape.from_hf_config(config)
        # With a scaling, the shape is another, which these settings do not tell in full.
        self.shape = None if is_scaled(file) else shape
        self.tied: bool | None = not shape.untie_embeddings_and_output_weights
        self.storage = f"{', '.join(sorted({tensor.kind for tensor in file.tensors}))}; expanded to float32"
        theirs = {short: name for name, short in names_in_gguf(shape).items()}
        self._places = {theirs.get(t.name, t.name): t for t in file.tensors if t.name != FREQUENCIES}
        self.tensors = {name: tensor_info(name, "float32", t.shape) for name, t in self._places.items()}
        rotated = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_query_groups}
        self._rotated = rotated if shape.family == "llama" else {}

    def named(self, weight_map: WeightTranslation) -> Mapping[str, TensorInfo]:
        """The tensors: they have Hugging Face's names already."""
        return self.tensors

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            GgufError: It cannot be read, or is of a type that the ``gguf`` package does not expand.
        """
        place = self._places[name]
        try:
            expanded = self._expanded(place)
        except (OSError, ValueError, NotImplementedError) as error:
            raise GgufError(f"cannot read {place.name} of {self.directory} ({error}); give another file") from error
        heads = self._rotated.get(name.split(".")[-2]) if "." in name else None
        if heads is None or expanded.dim() != 2 or expanded.shape[0] % (2 * heads) or not expanded.numel():
            return expanded
        # llama.cpp rotates neighbouring channels of a head, transformers the two halves.
        pairs = expanded.reshape(heads, -1, 2, expanded.shape[1])
        return pairs.swapaxes(1, 2).reshape(expanded.shape)

    def _expanded(self, place: GgufTensor) -> Tensor:
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType[place.kind]
        columns = place.shape[-1] if place.shape else 1
        rows = math.prod(place.shape) // max(columns, 1)
        expanded = torch.empty(rows, columns)
        step = max(1, _ROWS_ELEMENTS // max(columns, 1))
        with self.directory.open("rb") as file:
            file.seek(place.offset)
            for start in range(0, rows, step):
                part = expanded[start : start + step]
                data = np.fromfile(file, np.uint8, place.nbytes // rows * len(part))
                part.copy_(torch.from_numpy(dequantize(data.reshape(len(part), -1), kind)))
        return expanded.reshape(place.shape)
