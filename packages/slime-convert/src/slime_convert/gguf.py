"""GGUF files → Hugging Face directories, through transformers' own reader (the ``gguf`` extra)."""

from __future__ import annotations

import importlib.util
import io
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime_convert.errors import GgufError
from slime_convert.output import new_directory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_gguf(source: str | Path) -> Path:
    """The GGUF file that ``source`` is, or the only one in or below the directory that it is.

    Raises:
        GgufError: There is none, or there are several.
    """
    path = Path(source)
    if path.is_file():
        return path
    advice = "give a .gguf file, or a directory that holds exactly one"
    if not path.is_dir():
        raise GgufError(f"there is no file or directory {path}; {advice}")
    found = sorted(path.rglob("*.gguf"))
    if len(found) != 1:
        names = "".join(f" {file.relative_to(path)}" for file in found[:5])
        raise GgufError(f"{path} holds {len(found)} .gguf files{':' * bool(found)}{names}; {advice}")
    return found[0]


def gguf_to_hf(gguf: str | Path, save: str | Path, *, dtype: str = "float32", force: bool = False) -> None:
    """Convert a GGUF model into a Hugging Face directory with tokenizer and chat template.

    Quantized weights are expanded; ``float32`` keeps their exact values.

    Args:
        gguf: A GGUF file, or a directory that holds exactly one.
        save: Directory to create.
        dtype: Element type of the written weights, a key of :data:`DTYPES`.
        force: Replace an earlier model at ``save``.

    Raises:
        GgufError: The file is missing, ambiguous or unreadable, or the ``gguf`` extra is not installed.
        OutputError: ``save`` exists or cannot be written.
    """
    file = find_gguf(gguf)
    _need_extra()
    target = new_directory(save, force=force, keep=frozenset({file}), marker="config.json")
    with target as directory, _bars_on_terminals_only():
        model, tokenizer = _load(file, DTYPES[dtype])
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _bars_on_terminals_only() -> AbstractContextManager[Any]:
    """Transformers draws its progress bars into log files too, unless it is kept from it."""
    return nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())


def _need_extra() -> None:
    missing = [name for name in ("gguf", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise GgufError(
            f"reading GGUF needs {', '.join(missing)}, which is not installed; "
            "install slime-convert with its extra: pip install './packages/slime-convert[gguf]'"
        )


def _load(file: Path, dtype: torch.dtype) -> tuple[Any, Any]:
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
    except (ValueError, OSError, KeyError, RuntimeError, NotImplementedError) as error:
        summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise GgufError(f"transformers cannot read {file} ({summary}); give a GGUF file that it supports") from error
    # A model that was loaded from GGUF refuses to be saved as anything else; a fresh one of its config does not.
    loaded.config.__dict__.pop("quantization_config", None)
    # GGUF stores numbers in 32 bits: 1e-5 comes back as 9.999999747378752e-06.
    loaded.config.rms_norm_eps = float(str(np.float32(loaded.config.rms_norm_eps)))
    model = type(loaded)(loaded.config).to(dtype)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    return model, tokenizer
