"""Hugging Face model directories: weights read lazily, written in shards, and the other files copied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slime_convert.errors import HfConfigError, WeightError

INDEX = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 5 * 2**30
_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
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
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in self._paths():
                file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._files |= dict.fromkeys(file.keys(), file)
        except (SafetensorError, OSError) as error:
            self._stack.close()
            raise HfConfigError(f"cannot read {path} ({error}); fetch the model again") from error

    def __enter__(self) -> HfReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all weights."""
        return set(self._files)

    def load(self, name: str) -> Tensor:
        """One weight.

        Raises:
            WeightError: There is none of this name.
        """
        return self._file(name).get_tensor(name)  # type: ignore[no-any-return]

    def dtype(self, name: str) -> torch.dtype:
        """The element type of one weight, without reading it.

        Raises:
            WeightError: There is no weight of this name, or its type is no plain floating point.
        """
        kind = self._file(name).get_slice(name).get_dtype()
        if kind not in _DTYPES:
            raise WeightError(
                f"{name} of {self.directory} has type {kind}; allowed: {', '.join(_DTYPES)}; "
                "convert an unquantized model"
            )
        return _DTYPES[kind]

    def _file(self, name: str) -> Any:
        try:
            return self._files[name]
        except KeyError:
            raise WeightError(
                f"{self.directory} has no weight {name}, which its config.json asks for; fetch the model again"
            ) from None

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
