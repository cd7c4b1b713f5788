"""Weight versions as deltas in a directory: ``weight_v000123/`` with an index and a file of deltas for each bucket.

The index is a frame of :mod:`slime_core.frame` (magic ``SLWI``) with: ``version``; ``base_version``, the version that
the deltas were made from, or ``null`` for the checkpoint that everything began with; ``base`` and ``result``, checksums
over all tensors' checksums before and after; ``files``, the data files in order; ``tensors``, name → checksum after it.
A data file is a safetensors file of bytes: under a tensor's name its delta, a frame of
:mod:`slime_core.integrity.delta` with a checksum of its own and those of both versions.

A tensor that the first checkpoint has in another dtype is taken to the delta's dtype first; one that it has not, such
as a tied output layer, is taken as zeros. Versions form a chain by ``base_version`` and ``base``, which a receiver
follows back to what it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slime_core.errors import DamagedError, DataError
from slime_core.frame import pack_frame, unpack_frame
from slime_core.integrity import combined_checksum
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    NewDirectory,
    reading,
    version_name,
    version_number,
    write_tensors,
)

INDEX_FILE = "index.slwi"
MAGIC = b"SLWI"
FORMAT_VERSION = 1
_WHAT = "a delta's index"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaIndex:
    """What a published version says of itself.

    Attributes:
        version: Its number.
        base_version: The version before; ``None`` for the checkpoint that everything began with.
        base: Checksum over the checksums of all tensors before.
        result: The same after.
        files: Data files in order.
        tensors: Checksum of each tensor in them after.
    """

    version: int
    base_version: int | None
    base: str
    result: str
    files: tuple[str, ...]
    tensors: Mapping[str, str]


class DeltaPublication:
    """A version on its way into the directory.

    Args:
        directory: Where versions are published.
        version: Its number.
    """

    def __init__(self, directory: Path, version: int) -> None:
        self._directory = NewDirectory(directory / version_name(version))
        self._version = version
        self._files: list[str] = []
        self.tensors: dict[str, str] = {}
        self.bytes = 0

    def add(self, deltas: Mapping[str, bytes], checksums: Mapping[str, str]) -> None:
        """Write the deltas of a bucket.

        Args:
            deltas: Name → delta.
            checksums: Name → checksum after it.

        Raises:
            DataError: A tensor was there before.
        """
        if twice := self.tensors.keys() & deltas:
            raise DataError(f"{min(twice)} was sent twice in one update")
        file = f"delta-{len(self._files) + 1:05d}.safetensors"
        arrays = {name: torch.frombuffer(bytearray(delta), dtype=torch.uint8) for name, delta in deltas.items()}
        write_tensors(self._directory.path / file, arrays)
        self._files.append(file)
        self.tensors |= checksums
        self.bytes += sum(map(len, deltas.values()))

    def publish(self, *, base_version: int | None, before: Mapping[str, str]) -> dict[str, str]:
        """Give it its name.

        Args:
            base_version: The version that the deltas were made from.
            before: Checksums of all its tensors.

        Returns:
            Checksums of all tensors after it.
        """
        after = {**before, **self.tensors}
        head: dict[str, Any] = {
            "version": self._version,
            "base_version": base_version,
            "base": combined_checksum(before),
            "result": combined_checksum(after),
            "files": self._files,
            "tensors": self.tensors,
        }
        (self._directory.path / INDEX_FILE).write_bytes(pack_frame(MAGIC, FORMAT_VERSION, head, b""))
        self._directory.publish()
        return after

    def discard(self) -> None:
        """Remove what was written."""
        self._directory.discard()


def published_versions(directory: Path) -> list[Path]:
    """Directories of all versions that are published."""
    return sorted(path for path in directory.glob("weight_v*") if (path / INDEX_FILE).exists())


def newest_version(directory: Path) -> int | None:
    """Number of the version that was published last; ``None`` if there is none.

    By time: a run that goes back to an earlier checkpoint publishes smaller numbers again.
    """
    times: list[tuple[int, int]] = []
    for path in published_versions(directory):
        if (version := version_number(path)) >= 0:  # and not somebody's copy of one
            with contextlib.suppress(FileNotFoundError):  # removed just now
                times.append(((path / INDEX_FILE).stat().st_mtime_ns, version))
    return max(times)[1] if times else None


def read_index(directory: Path, version: int) -> DeltaIndex:
    """What a published version says of itself.

    Raises:
        DamagedError: It is not there, or was altered.
        FormatVersionError: It is of a format version that this slime does not know.
    """
    path = directory / version_name(version) / INDEX_FILE
    with reading(path):
        content = path.read_bytes()
    head, _ = unpack_frame(content, MAGIC, FORMAT_VERSION, f"{_WHAT} ({path})")
    with reading(path):
        index = DeltaIndex(**{**head, "files": tuple(head["files"])})
    if index.version != version:
        raise DamagedError(f"{path} is the index of version {index.version}; publish version {version} again")
    return index


class PublishedDeltas:
    """The deltas of a version, by name.

    Args:
        directory: Where versions are published.
        index: Of the version.

    Raises:
        DamagedError: A file cannot be read, or they do not hold what the index says.
    """

    def __init__(self, directory: Path, index: DeltaIndex) -> None:
        self.index = index
        self._directory = directory / version_name(index.version)
        self._files: dict[str, Path] = {}
        for path in (self._directory / Path(name).name for name in index.files):
            with reading(path), safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)
        if self._files.keys() != index.tensors.keys():
            raise DamagedError(
                f"version {index.version} in {directory} does not hold what its index says; publish it again"
            )

    def read(self, name: str) -> bytes:
        """A tensor's delta. The file is opened for it: a long chain has more files than a process may keep open.

        Raises:
            DamagedError: Its file cannot be read.
        """
        path = self._files[name]
        with reading(path), safe_open(path, framework="pt") as file:
            return bytes(file.get_tensor(name).numpy())


class FirstCheckpoint:
    """The checkpoint that everything began with, as the base of a delta.

    Args:
        directory: Hugging Face directory.
    """

    def __init__(self, directory: Path) -> None:
        self._reader = CheckpointReader(directory)
        self.names = self._reader.names

    def base(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """What a tensor of this name, dtype and shape was at first.

        Raises:
            DataError: It had another shape.
        """
        if name not in self._reader.names:
            return torch.zeros(shape, dtype=dtype)
        tensor = self._reader.read(name)
        if tuple(tensor.shape) != shape:
            raise DataError(f"{name} has shape {list(shape)}; in {self._reader.directory} it is {list(tensor.shape)}")
        return tensor.to(dtype)


Base = Callable[[str, torch.dtype, tuple[int, ...]], torch.Tensor]
"""Gives a tensor of the version that a delta was made from, by name, dtype and shape."""
