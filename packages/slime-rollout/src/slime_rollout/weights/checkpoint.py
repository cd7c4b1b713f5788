"""Hugging Face checkpoints of weight versions: written whole or not at all, read and verified tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import DamagedError, DataError, FormatVersionError, IntegrityError
from slime_core.files import sync
from slime_core.interfaces import NamedTensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
VERSION_FILE = "slime_weights.json"
FORMAT_VERSION = 2  # 1 had checksums of another kind
_NAME = "weight_v"
# Weights in any form; all other files of a checkpoint belong to every version.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_SHOWN = 5


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A dense tensor's bytes in row-major order; no copy of a contiguous tensor on the CPU."""
    whole = tensor.detach().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # a contiguous dimension of one element may have any stride
    return flat.view(torch.uint8).numpy().data


def tensor_checksum(tensor: torch.Tensor) -> str:
    """XXH3 of a tensor's dtype, shape and bytes, as 32 hexadecimal digits.

    It sees bits and no values: NaN equals itself if its bits do, and 0.0 differs from -0.0.
    """
    checksum = xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    checksum.update(tensor_bytes(tensor))
    return str(checksum.hexdigest())


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum for many named tensors, whatever their order."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(sorted(checksums.items())).encode()))


def verify_checksums(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check that a receiver has the tensors that a sender sent, by name and checksum.

    Raises:
        IntegrityError: Naming the tensors that differ, are missing, or were not sent.
    """
    faults = {
        "differ": [name for name in expected if name in found and found[name] != expected[name]],
        "are missing": expected.keys() - found.keys(),
        "were not sent": found.keys() - expected.keys(),
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {fault}: {some(names)}" for fault, names in faults.items() if names)
        raise IntegrityError(f"of {len(expected)} tensors, {listed}; send the weights again")


def some(names: Collection[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(sorted(names)[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")


def version_name(version: int) -> str:
    """Name of a version's directory."""
    return f"{_NAME}{version:06d}"


class NewDirectory:
    """A directory that appears under its name with everything in it, or not at all. An earlier one is replaced."""

    def __init__(self, final: Path) -> None:
        self.final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".{_NAME}*.*"):  # by a process that was killed: one writes at a time
            shutil.rmtree(left, ignore_errors=True)
        self.path = self._other_name()
        self.path.mkdir()

    def _other_name(self) -> Path:
        return self.final.parent / f".{self.final.name}.{uuid.uuid4().hex[:8]}"

    def publish(self) -> Path:
        """Give it its name, once its bytes are on disk."""
        for path in (*self.path.iterdir(), self.path):
            sync(path)
        if self.final.exists():
            old = self._other_name()
            self.final.rename(old)
            self.path.rename(self.final)
            shutil.rmtree(old)
        else:
            self.path.rename(self.final)
        sync(self.final.parent)
        return self.final

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


class CheckpointWriter:
    """Writes one version, with one file for each bucket.

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
            DataError: A tensor was written before.
            OSError: The file cannot be written, for instance because the disk is full.
        """
        check_new(bucket, self._files)
        self._count += 1
        file = f"model-{self._count:05d}.safetensors"
        # Clones: safetensors takes no views of one storage, which parts of a fused weight are.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket}
        try:
            save_file(tensors, self._directory.path / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self._directory.path / file} cannot be written: {error}") from error
        for name, tensor in tensors.items():
            self._files[name] = file
            self.checksums[name] = tensor_checksum(tensor)
            self._bytes += tensor.nbytes

    def finish(self, about: Mapping[str, Any] | None = None) -> Path:
        """Write index, config and tokenizer, and give the directory its name; ``about`` is for :func:`read_about`."""
        path = self._directory.path
        for source in self._template.iterdir():
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES) and source.name != VERSION_FILE:
                shutil.copyfile(source, path / source.name)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._files}
        head = {"format_version": FORMAT_VERSION, "version": self._version, "checksums": self.checksums}
        for name, content in ((INDEX_FILE, index), (VERSION_FILE, {**(about or {}), **head})):
            (path / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        return self._directory.publish()

    def discard(self) -> None:
        """Remove what was written."""
        self._directory.discard()


class CheckpointReader:
    """Reads tensors of a Hugging Face directory in safetensors, one at a time.

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
        """A tensor on the CPU."""
        with reading(self.directory / self._files[name]):
            tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

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
            if name not in self._files:
                continue
            with reading(self.directory / self._files[name]):
                expected = list(self._file(name).get_slice(name).get_shape())
            if list(tensor.shape) != expected:
                raise DataError(f"{name} has shape {list(tensor.shape)}; in {self.directory} it is {expected}")


def check_new(bucket: NamedTensors, before: Collection[str]) -> None:
    """Refuse a tensor that comes twice."""
    if twice := [name for name, _ in bucket if name in before]:
        raise DataError(f"{twice[0]} was sent twice in one update")


def is_safetensors(directory: str) -> bool:
    """Whether a directory holds a checkpoint that :class:`CheckpointReader` reads."""
    return bool(directory) and any((Path(directory) / name).exists() for name in (INDEX_FILE, SINGLE_FILE))


def written_versions(directory: Path) -> list[Path]:
    """Directories that :class:`CheckpointWriter` wrote."""
    return sorted(path for path in directory.glob(f"{_NAME}*") if (path / VERSION_FILE).exists())


def read_about(directory: Path) -> dict[str, Any]:
    """What :class:`CheckpointWriter` noted about a version: ``version``, ``checksums`` and ``about``."""
    path = directory / VERSION_FILE
    with reading(path):
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        check_format(path, about["format_version"], FORMAT_VERSION)
    return about


def check_format(path: Path, found: int, expected: int) -> None:
    """Refuse a file of another format version."""
    if found != expected:
        raise FormatVersionError(
            f"{path} has format version {found}, and this slime reads {expected}; write it again with this one"
        )


def verify_checkpoint(directory: Path) -> dict[str, str]:
    """Read a version that :class:`CheckpointWriter` wrote, and compare it with its checksums, which are returned.

    Raises:
        IntegrityError: Tensors differ, are missing or were not written with it, or a file cannot be read.
    """
    with reading(directory / VERSION_FILE):
        expected = dict(read_about(directory)["checksums"])
    reader = CheckpointReader(directory)
    found = {name: tensor_checksum(reader.read(name)) for name in sorted(reader.names)}
    verify_checksums(found, expected)
    return found


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file causes into a `DamagedError` that names it."""
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
