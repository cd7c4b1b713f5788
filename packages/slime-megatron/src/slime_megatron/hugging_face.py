"""Load a Hugging Face model's weights directly: each rank reads its own parts of the safetensors files."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state

from slime_convert.errors import ConvertError
from slime_convert.files.reading import TensorReader
from slime_convert.files.tensors import LazyTensor
from slime_convert.formats.hf import open_model, refuse_other_copies
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_megatron.errors import CheckpointError
from slime_megatron.model import Chunks, named_weights
from slime_megatron.parts import VALUE_HEAD


def load_hugging_face(directory: Path, shape: ModelShape, model: Chunks) -> None:
    """Load the weights of a Hugging Face directory into this rank's part of a model.

    Quantized weights (block-scaled FP8, packed INT4, MXFP4) are expanded. The result is that of loading the checkpoint
    which `slime-convert hf-to-torch-dist` makes of the directory.

    Raises:
        CheckpointError: A weight is missing or of another shape, or a file is damaged.
    """
    try:
        with TensorReader() as reader, torch.no_grad():
            _load(directory, shape, model, reader)
    except ConvertError as error:
        raise CheckpointError(f"cannot load the model {directory}: {error}") from error


def _load(directory: Path, shape: ModelShape, model: Chunks, reader: TensorReader) -> None:
    source = open_model(directory)
    tensors = {name: source.tensor(name) for name in source.tensors}
    refuse_other_copies(tensors, shape, directory)
    weight_map = WeightMap(shape, shape.padded_vocab_size(parallel_state.get_tensor_model_parallel_world_size()))

    def stored(name: str) -> LazyTensor:
        if name not in tensors:
            raise CheckpointError(f"{directory} has no weight {name}; give the model that --hf-checkpoint describes")
        return tensors[name]

    for name, weight in named_weights(model, with_copies=True):
        if name == VALUE_HEAD:
            continue  # a language model has none: it stays as made
        if name == "output_layer.weight" and not shape.untie_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"  # a last stage's copy
        size, rank = _tensor_parallel(is_expert="local_experts" in name)
        own = weight_map.split_tp(name, weight_map.from_hf(name, stored), size)[rank]
        weight.copy_(reader.load(own))


def _tensor_parallel(*, is_expert: bool) -> tuple[int, int]:
    """Over how many ranks a weight is split, and which of them this one is."""
    if is_expert:
        return (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
