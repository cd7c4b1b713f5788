"""GGUF files → Hugging Face directories, through transformers' own reader (the ``gguf`` extra)."""

from __future__ import annotations

import importlib.util
import io
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_convert.errors import GgufError, UnsupportedModelError
from slime_convert.formats import GGUF, detect
from slime_convert.gguf_file import FAMILIES, read_gguf
from slime_convert.mapping import WeightMap
from slime_convert.output import new_directory
from slime_convert.progress import OnProgress, no_progress
from slime_convert.shape import ModelShape
from slime_convert.shard_file import TensorSpec
from slime_convert.shards import DEFAULT_SHARD_BYTES, Step, write_shards
from slime_convert.unfinished import Conversion

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def gguf_to_hf(
    gguf: str | Path,
    save: str | Path,
    *,
    dtype: str = "float32",
    force: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_progress: OnProgress = no_progress,
) -> None:
    """Convert a GGUF model into a Hugging Face directory with tokenizer and chat template.

    Quantized weights are expanded; ``float32`` keeps their exact values.

    Args:
        gguf: A GGUF file, or a directory that holds exactly one.
        save: Directory to create.
        dtype: Element type of the written weights, a key of :data:`DTYPES`.
        force: Replace an earlier model at ``save``.
        max_shard_bytes: Largest safetensors file, in bytes.
        on_progress: Called with what an earlier run left, then after each weight.

    Raises:
        CheckpointError: There is no GGUF file at ``gguf``.
        GgufError: The file is ambiguous or unreadable, holds more or less than the model's weights or what ``dtype``
            has no room for, the ``gguf`` extra is not installed, or ``dtype`` is none.
        UnsupportedModelError: The model's family, or one of its settings, is not supported.
        OutputError: ``save`` exists or cannot be written.
    """
    if dtype not in DTYPES:
        raise GgufError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    file = detect(gguf, (GGUF,)).path
    need_extra("gguf", "transformers", "accelerate")
    versions = {name: version(name) for name in ("transformers", "gguf")}
    options = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "versions": versions}
    target = new_directory(save, Conversion("gguf-to-hf", (file,), options), force=force, marker="config.json")
    with target as unfinished:
        with _bars_on_terminals_only():
            model, tokenizer = _load(file)
        steps = [_step(file, name, tensor, DTYPES[dtype]) for name, tensor in _weights(file, model).items()]
        write_shards(unfinished.output, steps, max_shard_bytes, on_progress)
        _save_settings(model, DTYPES[dtype], unfinished.output)
        _save_tokenizer(tokenizer, unfinished.output)


def _step(file: Path, name: str, tensor: Tensor, dtype: torch.dtype) -> Step:
    def make() -> list[Tensor]:
        weight = tensor.to(dtype)
        # Rounding can overflow: float16 ends at 65504.
        if not torch.stack(torch.aminmax(weight)).isfinite().all():
            raise GgufError(
                f"{name} of {file} holds a NaN, an infinity or what {dtype} has no room for; "
                "give a file that is complete, or write --dtype float32"
            )
        return [weight]

    return Step((TensorSpec(name, dtype, tuple(tensor.shape)),), make)


def _save_settings(model: Any, dtype: torch.dtype, directory: Path) -> None:
    """Write config and generation config."""
    config = model.config
    # GGUF stores numbers in 32 bits: 1e-5 comes back as 9.999999747378752e-06.
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)


def _save_tokenizer(tokenizer: Any, directory: Path) -> None:
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:
        # The tokenizers library has no type of its own for a full disk.
        if type(error) is Exception and "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _bars_on_terminals_only() -> AbstractContextManager[Any]:
    """Transformers draws its progress bars into log files too, unless it is kept from it."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def need_extra(*modules: str) -> None:
    """Refuse to go on without a module of the ``gguf`` extra.

    Raises:
        GgufError: One is not installed.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise GgufError(
            f"reading GGUF needs {', '.join(missing)}, which is not installed; "
            "install slime-convert with its extra: pip install './packages/slime-convert[gguf]'"
        )


def _load(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer, as if they had never been quantized."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Newer releases can keep weights packed and say so with this config; older ones always expand them.
    packing = getattr(transformers, "GgufConfig", None)
    expand = {"quantization_config": packing(dequantize=True)} if packing else {}
    where = {"gguf_file": file.name}
    try:
        # In float32, the type that GGUF's scales are defined in; rounding to another type comes last.
        loaded = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where, **expand)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except Exception as error:  # the readers check little: damaged bytes can raise anything
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GgufError(
            f"transformers cannot read {file} ({summary}); give a GGUF file that is complete and that it supports"
        ) from error
    _refuse_loss(file, loaded.config)
    # With it, a model refuses to be built or saved as anything but GGUF.
    loaded.config.__dict__.pop("quantization_config", None)
    return loaded, tokenizer


def _weights(file: Path, model: Any) -> dict[str, Tensor]:
    """The model's weights by name, without a tied output layer.

    Raises:
        GgufError: Transformers reads weights of any size, and not every setting that gives them.
    """
    loaded = model.state_dict()
    with torch.device("meta"):
        expected = type(model)(model.config).state_dict()
    weights = {name: loaded[name] for name in WeightMap(_shape(model.config)).hf_names()}
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise GgufError(
                f"{file} has weights of other sizes than transformers reads from its settings ({name} has "
                f"{list(tensor.shape)}, not {list(expected[name].shape)}); "
                "convert the model's Hugging Face release instead"
            )
    return weights


def _shape(config: Any) -> ModelShape:
    settings = config.to_dict()
    settings.pop("quantization_config", None)
    return ModelShape.from_hf_config(settings)


def _refuse_loss(file: Path, config: Any) -> None:
    """Refuse a file that transformers reads in part: it makes up missing weights, and drops what it has no place for.

    Raises:
        GgufError: Weights are missing or left over, or the rotary embedding is scaled.
        UnsupportedModelError: The model is none that the weight tables describe.
    """
    shape = _shape(config)
    if shape.family not in FAMILIES:
        raise refuse_family(file, shape.family)
    wanted = set(names_in_gguf(shape).values())
    header = read_gguf(file)
    held = {tensor.name for tensor in header.tensors}
    wrong = [f"lacks {name}" for name in sorted(wanted - held)]
    wrong += [f"has {name}, which would be lost" for name in sorted(held - wanted)]
    wrong += [
        f"has {name} {value!r}, which would be lost"
        for name, value in header.settings.items()
        if name.endswith(".rope.scaling.type") and value != "none"
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        raise GgufError(
            f"{file} is no plain {shape.family} model of {shape.num_layers} layers: it {'; '.join(wrong[:3])}{more}; "
            "convert the model's Hugging Face release instead"
        )


def names_in_gguf(shape: ModelShape) -> dict[str, str]:
    """llama.cpp's names of a model's weights, by Hugging Face's.

    Args:
        shape: Of one of :data:`slime_convert.gguf_file.FAMILIES`.
    """
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.family.upper()], shape.num_layers)
    return {name: names.get_name(name, (".weight",)) for name in WeightMap(shape).hf_names()}


def refuse_family(file: Path, family: str) -> UnsupportedModelError:
    """The error of a model whose names and settings are not known."""
    return UnsupportedModelError(
        f"{file} holds a {family} model; GGUF files are read of {', '.join(FAMILIES)}; "
        "convert the model's Hugging Face release instead"
    )
