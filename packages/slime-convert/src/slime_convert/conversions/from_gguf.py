"""GGUF files → Hugging Face directories: weights one by one, config and tokenizer by transformers (extra ``gguf``)."""

from __future__ import annotations

import io
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from slime_convert.errors import GgufError
from slime_convert.files.partial import Conversion, Partial
from slime_convert.files.reading import computed
from slime_convert.files.writing import NewTensor, in_hand
from slime_convert.formats import GGUF, detect
from slime_convert.formats.gguf import INSTEAD, GgufWeights, decimal, name_in_gguf, need_extra
from slime_convert.formats.hf import OutputOptions, write_model
from slime_convert.mapping import WeightMap
from slime_convert.progress import Converted
from slime_convert.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = ("float32", "bfloat16", "float16")


def gguf_to_hf(
    gguf: str | Path, save: str | Path, *, dtype: str = "float32", **output: Unpack[OutputOptions]
) -> Converted:
    """Convert a GGUF model into a Hugging Face directory with tokenizer and chat template.

    Quantized weights are expanded; ``float32`` keeps their exact values.

    Args:
        gguf: A GGUF file, or a directory that holds exactly one.
        save: Directory to create.
        dtype: Element type of the written weights: ``float32``, ``bfloat16`` or ``float16``.
        output: ``force``, ``max_shard_bytes``, ``on_progress``; see :class:`slime_convert.OutputOptions`.

    Raises:
        CheckpointError: There is no GGUF file at ``gguf``.
        GgufError: The file is ambiguous or unreadable, holds more or less than the model's weights or what ``dtype``
            has no room for, the ``gguf`` extra is not installed, or ``dtype`` is unknown.
        UnsupportedModelError: The model's family, or one of its settings, is not supported.
        OutputError: ``save`` exists or cannot be written.
    """
    begun = time.monotonic()
    if dtype not in _DTYPES:
        raise GgufError(f"dtype {dtype!r} is unknown; allowed: {', '.join(_DTYPES)}")
    file = detect(gguf, (GGUF,)).path
    need_extra("gguf", "transformers")
    versions = {name: version(name) for name in ("transformers", "gguf")}
    conversion = Conversion("gguf-to-hf", (file,), {"dtype": dtype, "versions": versions}, begun)
    weights = GgufWeights(file)
    _refuse_loss(weights)
    # Transformers would draw its progress bars into log files too.
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    with nullcontext() if has_terminal else redirect_stderr(io.StringIO()):
        config, tokenizer = _load_settings(file)
    weight_map = WeightMap(ModelShape.from_hf_config(config.to_dict()))
    tensors = [_new_tensor(weights, name, weight_map.hf_shape(name), dtype) for name in weight_map.hf_names()]
    return write_model(tensors, save, conversion, partial(_save_settings, config, tokenizer, dtype), **output)


def _refuse_loss(weights: GgufWeights) -> None:
    """Refuse a file that would be converted in part: weights are missing or left over, or positions are scaled."""
    file, shape = weights.header, weights.shape
    held = {tensor.name for tensor in file.tensors}
    wanted = held if shape is None else {name_in_gguf(name) for name in WeightMap(shape).hf_names()}
    wrong = [f"lacks {name}" for name in sorted(wanted - held)]
    lost = sorted(held - wanted)
    lost += [
        f"{name} {value!r}"
        for name, value in file.settings.items()
        if name.endswith(".rope.scaling.type") and value != "none"
    ]
    wrong += [f"has {what}, which would be lost" for what in lost]
    if shape is None and not wrong:
        wrong = ["has a scaled rotary embedding, which would be lost"]
    if wrong:
        more = f" and {len(wrong) - 3} more" * (len(wrong) > 3)
        raise GgufError(
            f"{file.path} is not a plain {file.architecture} model: it {'; '.join(wrong[:3])}{more}; {INSTEAD}"
        )


def _new_tensor(weights: GgufWeights, name: str, shape: tuple[int, ...], dtype: str) -> NewTensor:
    """A weight, refused if it has another size than transformers takes from the file's settings."""
    tensor, file = weights.tensor(name), weights.directory
    if tensor.shape != shape:
        raise GgufError(
            f"{file} has weights of other sizes than transformers reads from its settings ({name} has "
            f"{list(tensor.shape)}, not {list(shape)}); {INSTEAD}"
        )

    def cast(weight: Tensor) -> Tensor:
        import torch

        result = weight.to(getattr(torch, dtype))
        # Rounding can overflow: float16 ends at 65504.
        if result.numel() and not torch.stack(torch.aminmax(result)).isfinite().all():
            raise GgufError(
                f"{name} of {file} holds a NaN, an infinity or what {dtype} has no room for; "
                "give a file that is complete, or write dtype= float32"
            )
        return result

    return in_hand(name, computed(dtype, shape, cast, tensor))


def _load_settings(file: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    # Alone in a directory: files next to it are not the model's, and could name code that transformers runs.
    try:
        with tempfile.TemporaryDirectory(prefix="slime-convert-") as place:
            (Path(place) / "model.gguf").symlink_to(file.resolve())
            where: dict[str, Any] = {"gguf_file": "model.gguf", "trust_remote_code": False}
            config = AutoConfig.from_pretrained(place, **where)
            tokenizer = AutoTokenizer.from_pretrained(place, **where)
    except Exception as error:  # the readers check little: damaged bytes can raise anything
        summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise GgufError(
            f"transformers cannot read {file} ({summary}); give a GGUF file that is complete and that it supports"
        ) from error
    # With this entry, a model refuses to be built or saved as anything but GGUF.
    vars(config).pop("quantization_config", None)
    return config, tokenizer


def _save_settings(config: Any, tokenizer: Any, dtype: str, output: Partial) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig

    config.rms_norm_eps = decimal(config.rms_norm_eps)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.dtype = dtype
    # Elsewhere first: only files whose names are known before may be created in the output.
    with tempfile.TemporaryDirectory(prefix="slime-convert-") as place:
        try:
            for part in (config, GenerationConfig.from_model_config(config), tokenizer):
                part.save_pretrained(place)
        except Exception as error:
            # The tokenizers library has no type of its own for a full disk.
            if type(error) is Exception and "(os error " in str(error):
                raise OSError(str(error)) from error
            raise
        for path in sorted(Path(place).rglob("*")):
            if path.is_file():
                output.write(str(path.relative_to(place)), path.read_bytes())
