"""Hugging Face checkpoints of weight versions: written whole or not at all, read and verified tensor by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_core.errors import DamagedError, DataError, FormatVersionError, IntegrityError
from slime_core.files import read_bytes, sync
from slime_core.interfaces import NamedTensors

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
VERSION_FILE = "slime_weights.json"
FORMAT_VERSION = 2  # 1 had checksums of another kind
_NAME = "weight_v"
# Weights in any form; all other files of a checkpoint belong to every version.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_SHOWN = 5

Record = TypeVar("Record")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A dense tensor's bytes in row-major order; no copy of a contiguous tensor on the CPU, which lives as long.

    Not through NumPy: a tensor that it has seen can no longer be emptied, as sleeping trainers empty their weights.
    """
    whole = tensor.detach().cpu().contiguous()
    if not whole.nbytes:
        return memoryview(b"")
    content = (ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr())
    content.tensor = whole  # type: ignore[attr-defined]  # keeps the memory
    return memoryview(content).cast("B")


def tensor_checksum(tensor: torch.Tensor) -> str:
    """XXH3 of a tensor's dtype, shape and bytes, as 32 hexadecimal digits. NaN and -0.0 are bits like any other."""
    checksum = xxhash.xxh3_128(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}".encode())
    checksum.update(tensor_bytes(tensor))
    return str(checksum.hexdigest())


def combined_checksum(checksums: Mapping[str, str]) -> str:
    """One checksum for many named tensors, whatever their order."""
    return str(xxhash.xxh3_128_hexdigest(json.dumps(sorted(checksums.items())).encode()))


def verify_checksums(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Check that a receiver has what was sent; an `IntegrityError` names the tensors where it has not."""
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
        self._final = final
        final.parent.mkdir(parents=True, exist_ok=True)
        for left in final.parent.glob(f".{_NAME}*.*"):  # by a process that was killed: one writes at a time
            shutil.rmtree(left, ignore_errors=True)
        self.path = final.with_name(f".{final.name}.new")
        self.path.mkdir()

    def publish(self) -> Path:
        """Give it its name, once its bytes are on disk."""
        for path in (*self.path.iterdir(), self.path):
            sync(path)
        old = self._final.with_name(f".{self._final.name}.old")
        with contextlib.suppress(FileNotFoundError):
            self._final.rename(old)
        self.path = self.path.rename(self._final)
        shutil.rmtree(old, ignore_errors=True)
        sync(self.path.parent)
        return self.path

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A version's description of itself."""

    version: int
    checksums: dict[str, str]
    first: str = ""  # the checkpoint that the first delta was applied to, in a receiver's copy
    sent: tuple[str, ...] = ()  # tensors that were ever sent to the receiver
    format_version: int = FORMAT_VERSION


class CheckpointWriter(NewDirectory):
    """Writes a version, with a file for each bucket; config, tokenizer and the like are copied from ``template``."""

    def __init__(self, final: Path, template: Path, version: int) -> None:
        super().__init__(final)
        self._template, self._version = template, version
        self._files: dict[str, str] = {}
        self._bytes = self._count = 0
        self.checksums: dict[str, str] = {}

    def add(self, bucket: NamedTensors) -> None:
        """Write some tensors; a `DataError` if one was written before."""
        check_new(bucket, self._files)
        self._count += 1
        file = f"model-{self._count:05d}.safetensors"
        # Clones: safetensors takes no views of one storage, which parts of a fused weight are.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in bucket}
        try:
            save_file(tensors, self.path / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{self.path / file} cannot be written: {error}") from error
        for name, tensor in tensors.items():
            self._files[name] = file
            self.checksums[name] = tensor_checksum(tensor)
            self._bytes += tensor.nbytes

    def finish(self, *, first: str = "", sent: Iterable[str] = ()) -> Path:
        """Write index, config and tokenizer, and publish it; see :class:`VersionInfo`."""
        for source in self._template.iterdir():
            if source.is_file() and not source.name.endswith(_WEIGHT_SUFFIXES) and source.name != VERSION_FILE:
                shutil.copyfile(source, self.path / source.name)
        index = {"metadata": {"total_size": self._bytes}, "weight_map": self._files}
        info = VersionInfo(version=self._version, checksums=self.checksums, first=first, sent=tuple(sorted(sent)))
        for name, content in ((INDEX_FILE, index), (VERSION_FILE, info)):
            text = msgspec.json.format(msgspec.json.encode(content), indent=1)
            (self.path / name).write_bytes(text)  # written: a folder that this process made
        return self.publish()


class CheckpointReader:
    """Reads tensors of a Hugging Face directory one at a time; a `DataError` if it holds no safetensors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = _weight_map(directory)
        self._handles: dict[str, Any] = {}
        self.names = frozenset(self._files)

    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU."""
        with reading(self.directory / self._files[name]):
            tensor: torch.Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        """The file that a tensor is in, opened once."""
        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(self.directory / file, framework="pt", device="cpu")
        return self._handles[file]

    def check_shapes(self, bucket: NamedTensors) -> None:
        """Refuse a tensor that has another shape here."""
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


def remove_others(versions: Iterable[Path], *kept: Path) -> None:
    """Remove versions but for some, by whatever path these are given."""
    paths = {path.resolve() for path in kept}
    for version in versions:
        if version.resolve() not in paths:
            shutil.rmtree(version, ignore_errors=True)


def read_info(directory: Path) -> VersionInfo:
    """A version's description of itself; an `IntegrityError` if that cannot be read."""
    path = directory / VERSION_FILE
    with reading(path):
        return read_record(path, read_bytes(path), VersionInfo, FORMAT_VERSION)


def read_record(path: Path, text: bytes, kind: type[Record], format_version: int) -> Record:
    """A record from a file's JSON. Call it in :func:`reading`; another format version is a `FormatVersionError`."""
    content = msgspec.json.decode(text)
    check_format(path, content["format_version"], format_version)
    return msgspec.convert(content, kind)


def check_format(path: Path, found: int, expected: int) -> None:
    """Refuse a file of another format version."""
    if found != expected:
        raise FormatVersionError(
            f"{path} has format version {found}, and this slime reads {expected}; write it again with this one"
        )


def verify_checkpoint(directory: Path) -> dict[str, str]:
    """Read a version that :class:`CheckpointWriter` wrote; returns its checksums, or raises an `IntegrityError`."""
    expected, reader = read_info(directory).checksums, CheckpointReader(directory)
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
            return dict(msgspec.json.decode(read_bytes(index))["weight_map"])
    single = directory / SINGLE_FILE
    if not single.exists():
        raise DataError(f"{directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}; give a checkpoint in safetensors")
    with reading(single), safe_open(single, framework="pt", device="cpu") as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)
