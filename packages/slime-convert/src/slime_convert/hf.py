"""Hugging Face model directories: weights read lazily, and the other files copied."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from torch import Tensor

from slime_convert.errors import HfConfigError, WeightError
from slime_convert.mapped import map_tensor
from slime_convert.quantize.formats import without_quantization
from slime_convert.safetensors_files import TORCH_NAMES, Entry, read_directory
from slime_convert.shard_file import SAFETENSORS_DTYPES, TensorSpec
from slime_convert.unfinished import refuse_unfinished

_PLAIN = ("BF16", "F16", "F32", "F64")
_KINDS = {name: kind for kind, name in TORCH_NAMES.items()}
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class HfReader:
    """The weights of a Hugging Face directory, read one by one. Use it in a ``with`` statement.

    Args:
        directory: Holds ``*.safetensors``.

    Raises:
        HfConfigError: There are no safetensors files, or one is damaged or missing.
    """

    def __init__(self, directory: str | Path) -> None:
        refuse_unfinished(directory)
        self.directory = Path(directory)
        self._entries: dict[str, Entry] = read_directory(self.directory)
        self._path: Path | None = None  # the file that is open
        self._file: BinaryIO | None = None

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def names(self) -> set[str]:
        """Names of all weights."""
        return set(self._entries)

    @property
    def names_in_order(self) -> list[str]:
        """Names of all weights, file by file: read in this order, each file is opened once."""
        return list(self._entries)

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: There is none of this name, or its type is unknown.
            HfConfigError: Its file cannot be read any more, or its checksum, if the file has one, is wrong.
        """
        spec, entry = HfReader.spec(self, name), self._entry(name)
        try:
            file = self._file if self._file and entry.path == self._path else self._open(entry.path)
            flat = map_tensor(file, entry.offset, math.prod(spec.shape), spec.dtype)
        except (OSError, ValueError) as error:
            raise HfConfigError(f"cannot read {entry.path} ({error}); fetch the model again") from error
        if entry.checksum is not None:
            entry.check(name, flat.view(torch.uint8).numpy().data)
        return flat.reshape(spec.shape)

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of one weight, quantized or not, without reading it.

        Raises:
            WeightError: There is no weight of this name, or its type is unknown.
        """
        entry = self._entry(name)
        kind = _KINDS.get(entry.dtype, entry.dtype)
        if kind not in SAFETENSORS_DTYPES:
            raise WeightError(
                f"{name} of {self.directory} has type {kind}; allowed: {', '.join(SAFETENSORS_DTYPES)}; "
                "convert an unquantized model"
            )
        return TensorSpec(name, SAFETENSORS_DTYPES[kind], entry.shape)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight, without reading it.

        Raises:
            WeightError: There is no weight of this name, or its type is no plain floating point.
        """
        dtype = self._entry(name).dtype
        kind = _KINDS.get(dtype, dtype)
        if kind not in _PLAIN:
            raise WeightError(
                f"{name} of {self.directory} has type {kind}; allowed: {', '.join(_PLAIN)}; "
                "convert an unquantized model"
            )
        return SAFETENSORS_DTYPES[kind]

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise WeightError(
                f"{self.directory} has no weight {name}, which its config.json asks for; fetch the model again"
            ) from None

    def _open(self, path: Path) -> BinaryIO:
        self._close()
        self._file, self._path = path.open("rb", buffering=0), path
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = self._path = None


def copy_model_files(origin: Path, directory: Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer and chat template; everything at the top but weights.

    Args:
        origin: A Hugging Face directory.
        directory: Where the files go.
        dtype: Element type of the weights written beside them, which are not quantized; ``config.json`` then says so.
    """
    for path in sorted(origin.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)
    templates = origin / "additional_chat_templates"
    for path in sorted(templates.rglob("*")):
        if path.is_file():
            copy = directory / path.relative_to(origin)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)  # without the mode: a next run could not write over a read-only file
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    plain = without_quantization(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    name = str(dtype).removeprefix("torch.")
    if plain.get(key, name) != name or plain != config:
        (directory / "config.json").write_text(json.dumps(plain | {key: name}, indent=2) + "\n", encoding="utf-8")
