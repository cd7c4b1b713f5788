"""Hugging Face checkpoints of weight versions: written whole or not at all, and read tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import DamagedError, DataError
from slime_core.integrity import CHECKSUM_ALGORITHM, tensor_checksum, verify_checksums
from slime_core.interfaces import NamedTensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
VERSION_FILE = "slime_weights.json"
FORMAT_VERSION = 1
_NAME = "weight_v"
# Weights in any form; everything else beside them belongs to every version.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def version_name(version: int) -> str:
    """Name of a version's directory."""
    return f"{_NAME}{version:06d}"


def version_number(path: Path) -> int:
    """The version that a directory of this name is of; -1 if it is of none."""
    number = path.name.removeprefix(_NAME)
    return int(number) if number.isdecimal() else -1


class NewDirectory:
    """A directory that appears under its name with everything in it, or not at all.

    Args:
        final: Where it shall be. What is there is replaced.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(".weight_v*.*"):  # by a process that was killed: one writes at a time
            shutil.rmtree(left, ignore_errors=True)
        self.path = final.parent / f".{final.name}.{uuid.uuid4().hex[:8]}"
        self.path.mkdir()

    def publish(self) -> Path:
        """Give it its name, once its bytes are on disk."""
        for path in (*self.path.iterdir(), self.path):
            _sync(path)
        if self.final.exists():
            old = self.final.parent / f".{self.final.name}.{uuid.uuid4().hex[:8]}"
            self.final.rename(old)
            self.path.rename(self.final)
            shutil.rmtree(old)
        else:
            self.path.rename(self.final)
        _sync(self.final.parent)
        return self.final

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


class CheckpointWriter:
    """Writes one version, bucket by bucket, with one file for each.

    Args:
        final: Directory of the version.
        template: Hugging Face directory that config, tokenizer and the like are copied from.
        version: The weight version.
    """

    def __init__(self, final: Path, template: Path, version: int) -> None:
        self._template, self._version = template, version
        self._directory = NewDirectory(final)
        self._files: dict[str, str] = {}
        self._bytes = self._count = 0
        self.checksums: dict[str, str] = {}

    def add(self, bucket: NamedTensors) -> None:
        """Write some tensors.

        Raises:
            DataError: One was there before.
        """
        if twice := [name for name, _ in bucket if name in self._files]:
            raise DataError(f"{twice[0]} was sent twice in one update")
        self._count += 1
        file = f"model-{self._count:05d}.safetensors"
        # Clones: safetensors takes no views of one storage, which parts of a fused weight are.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket}
        write_tensors(self._directory.path / file, tensors)
        for name, tensor in tensors.items():
            self._files[name] = file
            self.checksums[name] = tensor_checksum(tensor)
            self._bytes += tensor.numel() * tensor.element_size()

    def finish(self, about: Mapping[str, Any] | None = None) -> Path:
        """Write what belongs to it and give it its name.

        Args:
            about: More for :func:`read_about` to tell; JSON.

        Returns:
            The directory.
        """
        path = self._directory.path
        for source in self._template.iterdir():
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES) and source.name != VERSION_FILE:
                shutil.copyfile(source, path / source.name)
        _write_json(path / INDEX_FILE, {"metadata": {"total_size": self._bytes}, "weight_map": self._files})
        head = {"format_version": FORMAT_VERSION, "version": self._version, "algorithm": CHECKSUM_ALGORITHM}
        _write_json(path / VERSION_FILE, {**(about or {}), **head, "checksums": self.checksums})
        return self._directory.publish()

    def discard(self) -> None:
        """Remove what was written."""
        self._directory.discard()


class CheckpointReader:
    """Reads tensors of a Hugging Face directory in safetensors, one at a time.

    Args:
        directory: The checkpoint.

    Raises:
        DataError: It holds no safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = _weight_map(directory)
        self._handles: dict[str, Any] = {}

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU.

        Raises:
            DamagedError: Its file cannot be read.
        """
        with reading(self.directory / self._files[name]):
            tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape.

        Raises:
            DamagedError: Its file cannot be read.
        """
        with reading(self.directory / self._files[name]):
            return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str) -> Any:
        """The file that a tensor is in, mapped into memory; opened once."""
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self.directory / file, framework="pt", device="cpu")
        return self._handles[file]

    def check_shapes(self, bucket: NamedTensors) -> None:
        """Check tensors against those of the same name.

        Raises:
            DataError: One has another shape; the engines would not survive it.
        """
        for name, tensor in bucket:
            if name in self._files and tuple(tensor.shape) != (expected := self.shape(name)):
                raise DataError(f"{name} has shape {list(tensor.shape)}; in {self.directory} it is {list(expected)}")


def is_safetensors(directory: str) -> bool:
    """Whether a directory holds a checkpoint that :class:`CheckpointReader` reads; false for no directory."""
    return bool(directory) and any((Path(directory) / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def written_versions(directory: Path) -> list[Path]:
    """Directories that :class:`CheckpointWriter` wrote."""
    return sorted(path for path in directory.glob("weight_v*") if (path / VERSION_FILE).exists())


def read_about(directory: Path) -> dict[str, Any]:
    """What a version that :class:`CheckpointWriter` wrote says of itself: ``version``, ``checksums`` and ``about``.

    Raises:
        DamagedError: It cannot be read, or is of another format.
    """
    path = directory / VERSION_FILE
    with reading(path):
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (about["format_version"], about["algorithm"]) != (FORMAT_VERSION, CHECKSUM_ALGORITHM):
            raise ValueError(f"format {about['format_version']} with {about['algorithm']} is unknown")
    return about


def verify_checkpoint(directory: Path) -> dict[str, str]:
    """Read a version that :class:`CheckpointWriter` wrote, and compare with the checksums in it.

    Returns:
        Name → checksum, of all its tensors.

    Raises:
        IntegrityError: Tensors differ, are missing or too many, or a file cannot be read.
    """
    with reading(directory / VERSION_FILE):
        expected = dict(read_about(directory)["checksums"])
    reader = CheckpointReader(directory)
    found = {name: tensor_checksum(reader.read(name)) for name in sorted(reader.names)}
    verify_checksums(found, expected)
    return found


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file.

    Raises:
        OSError: It cannot be written, for instance because the disk is full.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file causes into one kind of error.

    Raises:
        DamagedError: Naming the file.
    """
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _weight_map(directory: Path) -> Mapping[str, str]:
    index = directory / INDEX_FILE
    if index.exists():
        with reading(index):
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return files
    single = directory / SINGLE_FILE
    if not single.exists():
        raise DataError(f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}; give a checkpoint in safetensors")
    with reading(single), safe_open(single, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
