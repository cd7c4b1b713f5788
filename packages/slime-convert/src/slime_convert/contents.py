"""What checkpoints hold, told from their headers. No torch here, but for legacy checkpoints of several tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_convert.checkpoint import Contents, TensorInfo, tensor_info
from slime_convert.errors import ConvertError, QuantizationError
from slime_convert.gguf_file import PLAIN_KINDS, hf_config, is_scaled, read_gguf
from slime_convert.legacy.layout import rank_files
from slime_convert.legacy.reader import LegacyReader
from slime_convert.quantize.formats import format_of, settings_of, without_quantization
from slime_convert.quantize.formats import read_config as read_quantized_config
from slime_convert.safetensors_files import read_directory
from slime_convert.shape import ModelShape
from slime_convert.torch_dist.headers import plain_arguments, read_headers
from slime_convert.torch_dist.layout import METADATA, RELEASE, fused_name, is_optimizer
from slime_convert.torch_file import StoredTensor, TorchFile

_PACKED_BITS = 4  # unless the settings say another number


def hf_contents(directory: Path) -> Contents:
    """The contents of a Hugging Face directory.

    Raises:
        HfConfigError: A shard is missing, cut off or damaged, or ``config.json`` is no JSON object.
    """
    entries = read_directory(directory)
    config = read_config(directory)
    family = config.get("model_type")
    quantization, packed_bits = quantization_of(config)
    shape = shape_of(config)
    return Contents(
        format="hf",
        directory=directory,
        files={path.name: path.stat().st_size for path in sorted({entry.path for entry in entries.values()})},
        tensors=tuple(TensorInfo(name, e.dtype, e.shape, e.nbytes) for name, e in entries.items()),
        family=family if isinstance(family, str) else None,
        shape=shape,
        quantization=quantization,
        packed_bits=packed_bits,
        repeated=_repeated_in_hf(config, shape),
    )


def torch_dist_contents(iteration: Path) -> Contents:
    """The contents of one iteration of a ``torch_dist`` checkpoint.

    Raises:
        CheckpointError: It is no readable ``torch_dist`` checkpoint.
    """
    headers = read_headers(iteration)
    tensors = {key: info for key, info in headers.tensors.items() if not is_optimizer(key)}
    step = None if headers.iteration is None else str(headers.iteration)
    return Contents(
        format="torch_dist",
        directory=iteration,
        files=headers.files,
        tensors=tuple(tensors.values()),
        optimizer=tuple(info for key, info in headers.tensors.items() if is_optimizer(key)),
        iteration=iteration.name if _is_named(iteration.name) else step,
        iterations=_iterations_beside(iteration, METADATA),
        family=_family(headers.arguments),
        arguments=headers.arguments,
        repeated=_repeated_in_megatron(tensors, headers.arguments),
    )


def _repeated_in_hf(config: Mapping[str, Any], shape: ModelShape | None) -> frozenset[str]:
    """A tied output layer, and the copies of embedding and output layer in modules that predict further tokens."""
    names = {"lm_head.weight"} if config.get("tie_word_embeddings") is True else set()
    if shape is not None:
        for layer in range(shape.num_layers, shape.num_layers + shape.mtp_num_layers):
            names |= {f"model.layers.{layer}.{copy}.weight" for copy in ("embed_tokens", "shared_head.head")}
    return frozenset(names)


def _repeated_in_megatron(tensors: Mapping[str, TensorInfo], arguments: Mapping[str, Any]) -> frozenset[str]:
    """A tied output layer, and norms that lie there under two names."""
    names = {"output_layer.weight"} if arguments.get("untie_embeddings_and_output_weights") is False else set()
    for key, info in tensors.items():
        other = tensors.get(fused_name(key) or key)
        if other is not None and other is not info and other.shape == info.shape:
            names.add(key)
    return frozenset(names)


def _family(arguments: Mapping[str, Any]) -> str | None:
    family = arguments.get("hf_model_type")
    return family if isinstance(family, str) else None


def legacy_contents(iteration: Path) -> Contents:
    """The contents of one iteration of a legacy ``torch`` checkpoint.

    The shards of several tensor-parallel ranks are joined as the model's table says, which needs torch.

    Raises:
        CheckpointError: It is no readable legacy checkpoint, or a rank's file is missing.
    """
    reader = LegacyReader(iteration, lambda _, shards: shards[0])
    paths = list(rank_files(iteration).values())
    sharded = any(len(shards) > 1 for shards in reader.shards.values())
    joined, notes = _joined(iteration) if sharded else (None, ())
    tensors = joined or tuple(_stored(name, shards[0]) for name, shards in reader.shards.items())
    arguments = plain_arguments(reader.args())
    return Contents(
        format="torch",
        directory=iteration,
        files={str(path.relative_to(iteration)): path.stat().st_size for path in paths},
        tensors=tensors,
        optimizer=tuple(info for path in paths for info in _optimizer_in(path, path.parent.name)),
        iteration=iteration.name if _is_named(iteration.name) else None,
        iterations=_iterations_beside(iteration, "mp_rank_*"),
        family=_family(arguments),
        arguments=arguments,
        repeated=_repeated_in_megatron({info.name: info for info in tensors}, arguments),
        notes=notes,
    )


def _joined(iteration: Path) -> tuple[tuple[TensorInfo, ...] | None, tuple[str, ...]]:
    """The whole weights of a legacy checkpoint of several tensor-parallel ranks; ``None`` if the model is unknown."""
    from slime_convert.mapping import WeightMap
    from slime_convert.verify.legacy_weights import LegacyWeights
    from slime_convert.verify.names import shape_from_arguments, vocabulary_of

    weights = LegacyWeights(iteration)
    shape = shape_from_arguments(weights, vocabulary_of([weights]))
    if shape is None:
        return None, ("of each weight the first tensor-parallel rank's shard is told: nothing tells the model's shape",)
    return tuple(weights.named(WeightMap(shape)).values()), ()


def _stored(name: str, tensor: StoredTensor) -> TensorInfo:
    return tensor_info(name, tensor.dtype, tensor.shape)


def _optimizer_in(path: Path, rank: str) -> Iterator[TensorInfo]:
    """The tensors of optimizer state in a rank's file."""
    content = TorchFile(path).content()
    pending = [(f"{rank}.{key}", value) for key, value in content.items() if "optimizer" in str(key)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, StoredTensor):
            yield _stored(name, value)
        elif isinstance(value, dict):
            pending += [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}.{number}", item) for number, item in enumerate(value)]


def _is_named(name: str) -> bool:
    return name == RELEASE or name.startswith("iter_")


def _iterations_beside(iteration: Path, mark: str) -> tuple[str, ...]:
    """Iterations in the same directory, known by a file or directory in each."""
    found = {other.parent.name for other in iteration.parent.glob(f"*/{mark}")}
    return tuple(sorted(filter(_is_named, found)))


def gguf_contents(file: Path) -> Contents:
    """The contents of a GGUF file.

    Raises:
        GgufError: It is none, cut off, damaged, or one of several parts of a model.
    """
    header = read_gguf(file)
    kinds = header.quantized_kinds
    return Contents(
        format="gguf",
        directory=file,
        files={file.name: file.stat().st_size},
        tensors=tuple(TensorInfo(t.name, PLAIN_KINDS.get(t.kind, t.kind), t.shape, t.nbytes) for t in header.tensors),
        family=header.architecture,
        shape=None if is_scaled(header) else shape_of(hf_config(header) or {}),
        quantization=", ".join(kinds) if kinds else None,
    )


def read_config(directory: Path) -> Mapping[str, Any]:
    """``config.json`` as a mapping; empty if there is none.

    Raises:
        HfConfigError: It is no JSON object.
    """
    return read_quantized_config(directory) if (directory / "config.json").is_file() else {}


def shape_of(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config describes; ``None`` if there is no config, or the model is not supported."""
    try:
        return ModelShape.from_hf_config(without_quantization(config)) if config else None
    except ConvertError:
        return None


def quantization_of(config: Mapping[str, Any]) -> tuple[str | None, int]:
    """One line about how a model is quantized, ``None`` if it is not; and the bits of one packed weight.

    Of a way that is not read: the method, and what is set of its format, bits and block.
    """
    settings = settings_of(config)
    if not isinstance(settings, dict) or not settings:
        return None, _PACKED_BITS
    try:
        known = format_of(config, "config.json")
    except QuantizationError:
        known = None
    if known is not None:
        return str(known), _PACKED_BITS
    weights = _weight_settings(settings)
    found = {**settings, **weights}
    names = ("format", "fmt", "num_bits", "bits", "group_size", "weight_block_size", "activation_scheme")
    details = [f"{name} {found[name]}" for name in names if found.get(name) is not None]
    bits = weights.get("num_bits")
    line = ", ".join([str(settings.get("quant_method", "unknown method")), *details])
    return line, bits if isinstance(bits, int) and bits > 0 else _PACKED_BITS


def _weight_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors' settings say about the weights of their first group of layers."""
    try:
        weights = next(iter(settings["config_groups"].values()))["weights"]
    except (KeyError, TypeError, AttributeError, StopIteration):
        return {}
    return weights if isinstance(weights, dict) else {}
