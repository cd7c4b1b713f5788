"""``inspect``: what is in a checkpoint, from its headers, as an object, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_convert.files.tensors import TensorInfo
from slime_convert.formats import GGUF, HF, LEGACY, TORCH_DIST, detect
from slime_convert.formats.checkpoint import VOCABULARY_WEIGHTS, Weights
from slime_convert.formats.gguf import PLAIN_KINDS, hf_config, is_scaled, read_gguf
from slime_convert.formats.hf import HfWeights, describe_quantization, packed_bits, shape_of
from slime_convert.formats.torch_dist import TorchDistWeights
from slime_convert.formats.torch_dist_names import METADATA, RELEASE, other_names
from slime_convert.mapping import WeightMap, hf_copies
from slime_convert.progress import aligned, json_value, shape_text, size_text
from slime_convert.shape import ModelShape

_LARGEST = 5
_ARGUMENTS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")
# How the names of what quantized checkpoints store in addition to a weight end.
_SCALES = ("_scale_inv", "weight_scale", "input_scale", "_zero_point", "weight_shape", "weight_g_idx", "_proj_scales")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        directory: Where the files are: one iteration of a Megatron checkpoint; the file itself for GGUF.
        tensors: The model's tensors, stacks of layers taken apart.
        optimizer: Tensors of the optimizer's state.
        iteration: ``release`` or a step, of a Megatron checkpoint.
        iterations: Every iteration in the same directory, this one included.
        family: Hugging Face ``model_type``, or GGUF's architecture; ``None`` if unknown.
        shape: The model's shape; ``None`` if unknown or not supported.
        arguments: Megatron's arguments as the checkpoint records them, plain values only.
        packed_bits: Bits of one parameter in tensors named ``*_packed`` or ``*_blocks``.
        repeated: Tensors that do not count as parameters, because another holds the same.
        notes: What else a reader should know.
    """

    format: str
    directory: Path
    files: Mapping[str, int]
    tensors: tuple[TensorInfo, ...]
    optimizer: tuple[TensorInfo, ...] = ()
    iteration: str | None = None
    iterations: tuple[str, ...] = ()
    family: str | None = None
    shape: ModelShape | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    packed_bits: int = 4
    repeated: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters of the model: each once, packed ones too, without scales and the vocabulary's padding."""
        return sum(self._parameters(tensor) for tensor in self.tensors if tensor.name not in self.repeated)

    def _parameters(self, tensor: TensorInfo) -> int:
        if tensor.name.endswith(_SCALES):
            return 0
        if tensor.name.endswith(("_packed", "_proj_blocks")):
            return tensor.nbytes * 8 // self.packed_bits
        vocab_size = self.arguments.get("vocab_size")
        rows = tensor.shape[0] if tensor.name in VOCABULARY_WEIGHTS and tensor.shape else 0
        if isinstance(vocab_size, int) and 0 < vocab_size < rows:
            return tensor.num_elements // rows * vocab_size
        return tensor.num_elements

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "format": self.format,
            "directory": str(self.directory),
            "iteration": self.iteration,
            "iterations": list(self.iterations),
            "family": self.family,
            "shape": dataclasses.asdict(self.shape) if self.shape else None,
            "arguments": {name: json_value(value) for name, value in self.arguments.items()},
            "quantization": self.quantization,
            "parameters": self.num_parameters,
            "weights": _totals(self.tensors),
            "dtypes": {dtype: _totals(tensors) for dtype, tensors in _by_dtype(self.tensors)},
            "optimizer": _totals(self.optimizer) if self.optimizer else None,
            "files": dict(self.files),
            "notes": list(self.notes),
            "largest": [tensor._asdict() for tensor in _largest(self.tensors)],
        }

    def to_text(self) -> str:
        """A table for people."""
        others = ", ".join(name for name in self.iterations if name != self.directory.name)
        more = f" (others: {others})" if others else ""
        rows = [
            ("format", self.format),
            ("file" if self.directory.is_file() else "directory", str(self.directory)),
            *([("iteration", f"{self.iteration}{more}")] if self.iteration else []),
            ("model", _model(self)),
            ("parameters", f"{self.num_parameters:,}"),
            ("weights", _sum_line(self.tensors)),
            *((f"  {dtype}", _sum_line(tensors)) for dtype, tensors in _by_dtype(self.tensors)),
            ("quantization", self.quantization or "none"),
            ("optimizer", _sum_line(self.optimizer) if self.optimizer else "none"),
            ("files", f"{len(self.files):,}, {size_text(sum(self.files.values()))}"),
            *(("note", note) for note in self.notes),
        ]
        largest = [
            ("largest weights", "dtype", "shape", "size"),
            *((t.name, t.dtype, shape_text(t.shape), size_text(t.nbytes)) for t in _largest(self.tensors)),
        ]
        return aligned(rows) + "\n\n" + aligned(largest)


def inspect_checkpoint(path: str | Path) -> Contents:
    """The contents of a checkpoint of any format, or of one iteration. Its headers are read, not its tensors.

    Raises:
        ConvertError: It is not a checkpoint, or a file of it is missing, cut off or damaged.
    """
    form, found = detect(path)
    if form.name == GGUF:
        return _gguf(found)
    weights = form.open(found)
    return _hugging_face(weights) if isinstance(weights, HfWeights) else _megatron(form.name, weights)


def _hugging_face(weights: HfWeights) -> Contents:
    family = weights.config.get("model_type")
    tied = {"lm_head.weight"} if weights.tied else set()
    copies = hf_copies(weights.shape).keys() if weights.shape else set()
    return Contents(
        format=HF,
        directory=weights.directory,
        files=weights.files,
        tensors=tuple(weights.tensors.values()),
        family=family if isinstance(family, str) else None,
        shape=weights.shape,
        quantization=describe_quantization(weights.config),
        packed_bits=packed_bits(weights.config),
        repeated=frozenset(tied | copies),
    )


def _megatron(form: str, weights: Weights) -> Contents:
    family, directory = weights.arguments.get("hf_model_type"), weights.directory
    tensors, notes = weights.tensors, tuple(weights.notes)
    if form == LEGACY and notes:
        from slime_convert.compare.names import shape_from_arguments, vocabulary_of

        if (shape := shape_from_arguments(weights, vocabulary_of([weights]))) is not None:
            tensors, notes = weights.named(WeightMap(shape)), ()
    mark = METADATA if form == TORCH_DIST else "mp_rank_*"
    iterations = {found.parent.name for found in directory.resolve().parent.glob(f"*/{mark}")}
    step = str(weights.step) if isinstance(weights, TorchDistWeights) and weights.step is not None else None
    repeated = {VOCABULARY_WEIGHTS[0]} if weights.tied else set()
    for key, info in tensors.items():  # norms may be stored under two names
        if any(name in tensors and tensors[name].shape == info.shape for name in other_names(key)):
            repeated.add(key)
    return Contents(
        format=form,
        directory=directory,
        files=weights.files,
        tensors=tuple(tensors.values()),
        optimizer=tuple(weights.optimizer),
        iteration=directory.name if _is_iteration(directory.name) else step,
        iterations=tuple(sorted(filter(_is_iteration, iterations))),
        family=family if isinstance(family, str) else None,
        arguments=weights.arguments,
        repeated=frozenset(repeated),
        notes=notes,
    )


def _gguf(file: Path) -> Contents:
    header = read_gguf(file)
    return Contents(
        format=GGUF,
        directory=file,
        files={file.name: file.stat().st_size},
        tensors=tuple(TensorInfo(t.name, PLAIN_KINDS.get(t.kind, t.kind), t.shape, t.nbytes) for t in header.tensors),
        family=header.architecture,
        shape=None if is_scaled(header) else shape_of(hf_config(header) or {}),
        quantization=", ".join(sorted({tensor.kind for tensor in header.tensors} - PLAIN_KINDS.keys())) or None,
    )


def _is_iteration(name: str) -> bool:
    return name == RELEASE or name.startswith("iter_")


def _model(contents: Contents) -> str:
    recorded: Mapping[str, Any] = vars(contents.shape) if contents.shape else contents.arguments
    sizes = [f"{name} {recorded[name]}" for name in _ARGUMENTS if recorded.get(name) is not None]
    untied = recorded.get("untie_embeddings_and_output_weights")
    ties = [] if untied is None else ["untied embeddings" if untied else "tied embeddings"]
    return ", ".join([*([contents.family] if contents.family else []), *sizes, *ties]) or "unknown"


def _totals(tensors: Sequence[TensorInfo]) -> dict[str, int]:
    elements, nbytes = (sum(getattr(tensor, name) for tensor in tensors) for name in ("num_elements", "nbytes"))
    return {"tensors": len(tensors), "elements": elements, "bytes": nbytes}


def _sum_line(tensors: Sequence[TensorInfo]) -> str:
    totals = _totals(tensors)
    noun = "tensor" if totals["tensors"] == 1 else "tensors"
    return f"{totals['tensors']:,} {noun}, {totals['elements']:,} elements, {size_text(totals['bytes'])}"


def _by_dtype(tensors: Iterable[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    """Tensors by type, the type with most bytes first."""
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return sorted(groups.items(), key=lambda item: -sum(tensor.nbytes for tensor in item[1]))


def _largest(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    return sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))[:_LARGEST]
