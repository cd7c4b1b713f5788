"""Hugging Face model directories: weights read lazily, written in shards, and the other files copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime_convert.errors import HfConfigError, WeightError
from slime_convert.safetensors_files import INDEX
from slime_convert.shards import DEFAULT_SHARD_BYTES as DEFAULT_SHARD_BYTES
from slime_convert.shards import SAFETENSORS_DTYPES, TensorSpec

_PLAIN = ("BF16", "F16", "F32", "F64")
_MAPPED_BYTES = 2**30
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


class HfReader:
    """The weights of a Hugging Face directory, read one by one. Use it in a ``with`` statement.

    Args:
        directory: Holds ``*.safetensors``.

    Raises:
        HfConfigError: There are no safetensors files, or one is damaged or missing.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._places: dict[str, tuple[Path, str, tuple[int, ...]]] = {}
        self._path: Path | None = None  # the file that is open
        self._file: Any = None
        self._read_bytes = 0
        for path in self._paths():
            file = self._open(path)
            for name in file.keys():  # noqa: SIM118 - the file is no mapping
                part = file.get_slice(name)
                self._places[name] = (path, part.get_dtype(), tuple(part.get_shape()))

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def names(self) -> set[str]:
        """Names of all weights."""
        return set(self._places)

    @property
    def names_in_order(self) -> list[str]:
        """Names of all weights, file by file: read in this order, each file is opened once."""
        return list(self._places)

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: There is none of this name.
            HfConfigError: Its file cannot be read any more.
        """
        path, _, _ = self._place(name)
        # A file is mapped into memory, and what was read of it counts as this process's until it is closed.
        if path != self._path or self._read_bytes > _MAPPED_BYTES:
            self._open(path)
        tensor: Tensor = self._file.get_tensor(name)
        self._read_bytes += tensor.nbytes
        return tensor

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of one weight, quantized or not, without reading it.

        Raises:
            WeightError: There is no weight of this name, or its type is unknown.
        """
        _, kind, shape = self._place(name)
        if kind not in SAFETENSORS_DTYPES:
            raise WeightError(
                f"{name} of {self.directory} has type {kind}; allowed: {', '.join(SAFETENSORS_DTYPES)}; "
                "convert an unquantized model"
            )
        return TensorSpec(name, SAFETENSORS_DTYPES[kind], shape)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight, without reading it.

        Raises:
            WeightError: There is no weight of this name, or its type is no plain floating point.
        """
        kind = self._place(name)[1]
        if kind not in _PLAIN:
            raise WeightError(
                f"{name} of {self.directory} has type {kind}; allowed: {', '.join(_PLAIN)}; "
                "convert an unquantized model"
            )
        return SAFETENSORS_DTYPES[kind]

    def _place(self, name: str) -> tuple[Path, str, tuple[int, ...]]:
        try:
            return self._places[name]
        except KeyError:
            raise WeightError(
                f"{self.directory} has no weight {name}, which its config.json asks for; fetch the model again"
            ) from None

    def _open(self, path: Path) -> Any:
        self._close()
        try:
            self._file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise HfConfigError(f"cannot read {path} ({error}); fetch the model again") from error
        self._path, self._read_bytes = path, 0
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._file = self._path = None

    def _paths(self) -> list[Path]:
        index = self.directory / INDEX
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise HfConfigError(f"cannot read {index} ({error!r}); fetch the model again") from error
            return [self.directory / name for name in sorted(names)]
        found = sorted(self.directory.glob("*.safetensors"))
        if not found:
            raise HfConfigError(
                f"{self.directory} has no *.safetensors; give a Hugging Face directory with safetensors weights"
            )
        return found


def write_weights(
    directory: Path, weights: Iterable[tuple[str, Tensor]], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write weights as ``model.safetensors``, or as numbered shards with an index.

    Args:
        directory: Where the files go.
        weights: Names and tensors; one shard of them is held in memory.
        max_shard_bytes: Largest shard, in bytes; a single larger tensor makes a shard of its own.
    """
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = total = 0

    def flush() -> None:
        path = directory / f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        # Parts of one Megatron weight are views of it; safetensors wants memory of their own.
        pending[name] = tensor.clone(memory_format=torch.contiguous_format)
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    flush()
    _name_shards(directory, shards, total)


def _name_shards(directory: Path, shards: list[tuple[Path, list[str]]], total: int) -> None:
    if len(shards) == 1:
        shards[0][0].rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, start=1):
        final = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        path.rename(final)
        weight_map |= dict.fromkeys(names, final.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")


def copy_model_files(origin: Path, directory: Path, dtype: torch.dtype) -> None:
    """Copy config, tokenizer and chat template; everything at the top but weights.

    Args:
        origin: A Hugging Face directory.
        directory: Where the files go.
        dtype: Element type of the weights written beside them; ``config.json`` then names it.
    """
    for path in sorted(origin.iterdir()):
        is_weight = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weight and not path.name.startswith("."):
            shutil.copyfile(path, directory / path.name)
    templates = origin / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, directory / templates.name)
    config = json.loads((origin / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    name = str(dtype).removeprefix("torch.")
    if config.get(key, name) != name:
        (directory / "config.json").write_text(json.dumps(config | {key: name}, indent=2) + "\n", encoding="utf-8")
