"""Load weights from checkpoints other than ``torch_dist``: each rank reads its own parts of the files.

These are Hugging Face models and Megatron's legacy ``torch`` checkpoints, whose pickles run nothing when slime-convert
reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core import parallel_state

from slime_convert.conversions.checks import checked_type
from slime_convert.files.reading import TensorReader
from slime_convert.files.tensors import LazyTensor
from slime_convert.formats.hf import open_model, refuse_other_copies
from slime_convert.formats.legacy import LegacyWeights
from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape
from slime_megatron.checkpoints.find import CheckpointInfo, check_same_model
from slime_megatron.errors import TrainerCheckpointError, reading_files
from slime_megatron.model.build import Chunks, named_weights
from slime_megatron.model.parts import VALUE_HEAD
from slime_megatron.weights.sync import tensor_group

_Whole = Callable[[str], LazyTensor]
"""A whole weight by its Megatron name, with the vocabulary padded as here."""


def load_other_format(info: CheckpointInfo, shape: ModelShape, model: Chunks) -> None:
    """Load the weights of a Hugging Face model, or of a legacy checkpoint of any layout, into this rank's part.

    Quantized weights (block-scaled FP8, packed INT4, MXFP4) are expanded. The result is that of loading the checkpoint
    which `slime-convert hf-to-torch-dist` makes of the directory.

    Raises:
        TrainerCheckpointError: It is of another model, a rank or weight is missing, or a file is damaged.
    """
    directory, open_weights = info.directory, _legacy if info.format == "torch" else _hugging_face
    weight_map = WeightMap(shape, shape.padded_vocab_size(parallel_state.get_tensor_model_parallel_world_size()))
    with reading_files(f"cannot load the model {directory}: "), TensorReader(shared=True) as reader, torch.no_grad():
        whole = open_weights(directory, weight_map)
        for name, weight in named_weights(model, with_copies=True):
            if name == VALUE_HEAD:
                continue  # a language model has none: it stays as made
            if name == "output_layer.weight" and not shape.untie_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"  # a last stage's copy
            group = tensor_group("local_experts" in name)
            weight.copy_(reader.load(weight_map.split_tp(name, whole(name), group.size())[group.rank()]))


def _hugging_face(directory: Path, weight_map: WeightMap) -> _Whole:
    with reading_files(f"cannot read the model {directory}: "):
        saved = ModelShape.from_hf_config(directory).to_megatron_args()
    check_same_model(saved, weight_map.shape, directory)
    source = open_model(directory)
    tensors = {name: source.tensor(name) for name in source.tensors}
    refuse_other_copies(tensors, weight_map.shape, directory)

    def stored(name: str) -> LazyTensor:
        if name not in tensors:
            raise TrainerCheckpointError(
                f"{directory} has no weight {name}; give the model that --hf-checkpoint describes"
            )
        return tensors[name]

    return lambda name: weight_map.from_hf(name, stored)


def _legacy(directory: Path, weight_map: WeightMap) -> _Whole:
    source = LegacyWeights(directory)
    check_same_model(source.arguments, weight_map.shape, directory)
    found = source.named(weight_map)

    def whole(name: str) -> LazyTensor:
        tensor = source.tensor(name)
        checked_type(name, found[name], directory)
        return weight_map.padded(name, tensor)

    return whole
