"""``inspect``: what is in a checkpoint, as an object, as text and as JSON. No torch here."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_convert.checkpoint import Contents, TensorInfo
from slime_convert.formats import detect
from slime_convert.printable import json_value, printable

LARGEST = 5
_ARGUMENTS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "vocab_size")


def inspect_checkpoint(path: str | Path) -> Contents:
    """What a checkpoint holds, told from its headers alone; the tensors are not read.

    Args:
        path: A checkpoint of any format of :mod:`slime_convert.formats`; of a Megatron one, an iteration of it too.

    Raises:
        ConvertError: It is no checkpoint, or a file of it is missing, cut off or damaged.
    """
    form, found = detect(path)
    return form.inspect(found)


def to_json(contents: Contents) -> dict[str, Any]:
    """The contents as plain values."""
    return {
        "format": contents.format,
        "directory": str(contents.directory),
        "iteration": contents.iteration,
        "iterations": list(contents.iterations),
        "family": contents.family,
        "shape": dataclasses.asdict(contents.shape) if contents.shape else None,
        "arguments": {name: json_value(value) for name, value in contents.arguments.items()},
        "quantization": contents.quantization,
        "parameters": contents.num_parameters,
        "weights": _totals(contents.tensors),
        "dtypes": {dtype: _totals(tensors) for dtype, tensors in _by_dtype(contents.tensors)},
        "optimizer": _totals(contents.optimizer) if contents.optimizer else None,
        "files": dict(contents.files),
        "notes": list(contents.notes),
        "largest": [dataclasses.asdict(tensor) for tensor in _largest(contents.tensors)],
    }


def to_text(contents: Contents) -> str:
    """The contents as a table for people."""
    optimizer = _sum_line(contents.optimizer) if contents.optimizer else "none"
    rows = [
        ("format", contents.format),
        ("file" if contents.directory.is_file() else "directory", str(contents.directory)),
        *([("iteration", _iterations(contents))] if contents.iteration else []),
        ("model", _model(contents)),
        ("parameters", f"{contents.num_parameters:,}"),
        ("weights", _sum_line(contents.tensors)),
        *((f"  {dtype}", _sum_line(tensors)) for dtype, tensors in _by_dtype(contents.tensors)),
        ("quantization", contents.quantization or "none"),
        ("optimizer", optimizer),
        ("files", f"{len(contents.files):,}, {size_text(sum(contents.files.values()))}"),
        *(("note", note) for note in contents.notes),
    ]
    largest = [
        ("largest weights", "dtype", "shape", "size"),
        *((t.name, t.dtype, shape_text(t.shape), size_text(t.nbytes)) for t in _largest(contents.tensors)),
    ]
    return aligned(rows) + "\n\n" + aligned(largest)


def size_text(nbytes: int) -> str:
    """Bytes with a binary unit, such as ``1.5 GiB``."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as ``128×24``; a single number is ``scalar``."""
    return "×".join(map(str, shape)) or "scalar"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns of equal width."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _iterations(contents: Contents) -> str:
    others = [name for name in contents.iterations if name != contents.directory.name]
    return f"{contents.iteration}" + (f" (beside it: {', '.join(others)})" if others else "")


def _model(contents: Contents) -> str:
    """Family and sizes, from the config or from the arguments that Megatron recorded."""
    recorded: Mapping[str, Any] = vars(contents.shape) if contents.shape else contents.arguments
    sizes = [f"{name} {recorded[name]}" for name in _ARGUMENTS if recorded.get(name) is not None]
    untied = recorded.get("untie_embeddings_and_output_weights")
    ties = [] if untied is None else ["untied embeddings" if untied else "tied embeddings"]
    return ", ".join([*([contents.family] if contents.family else []), *sizes, *ties]) or "unknown"


def _totals(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    listed = list(tensors)
    return {
        "tensors": len(listed),
        "elements": sum(tensor.num_elements for tensor in listed),
        "bytes": sum(tensor.nbytes for tensor in listed),
    }


def _sum_line(tensors: Iterable[TensorInfo]) -> str:
    totals = _totals(tensors)
    noun = "tensor" if totals["tensors"] == 1 else "tensors"
    return f"{totals['tensors']:,} {noun}, {totals['elements']:,} elements, {size_text(totals['bytes'])}"


def _by_dtype(tensors: Iterable[TensorInfo]) -> list[tuple[str, list[TensorInfo]]]:
    """Tensors by type, the type with most bytes first."""
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    return sorted(groups.items(), key=lambda item: -sum(tensor.nbytes for tensor in item[1]))


def _largest(tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    return sorted(tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))[:LARGEST]
