"""New weights through files, as whole checkpoints or as deltas.

A published delta is a directory ``weight_v000123/`` with ``deltas.bin``, the tensors' deltas end to end, and
``index.json``: the XXH3 of what follows, a line break, and a :class:`DeltaIndex` as JSON. It is made from the version
before, or from the first checkpoint, where another dtype is converted and a missing tensor, such as a tied output
layer, counts as zeros. A receiver follows this chain (``base_version``, ``base``) back to what it has.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from slime_core.errors import DamagedError, DataError, IntegrityError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.channel import EngineChannel
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    NewDirectory,
    check_format,
    check_new,
    combined_checksum,
    dtype_name,
    reading,
    tensor_bytes,
    tensor_checksum,
    verify_checkpoint,
    verify_checksums,
    version_name,
    written_versions,
)
from slime_rollout.weights.engines import EngineUpdate

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

DELTA_INDEX, DELTA_FILE = "index.json", "deltas.bin"
DELTA_FORMAT = 2
OLD_INDEX = "index.slwi"  # of format version 1
_STRETCH = 2**20  # elements that are encoded at a time
_SPARSE = 8  # up to one in so many elements changed: only these are written
_LEVEL = 1  # zstandard's; level 3 makes deltas no smaller and takes up to twice the time


@dataclasses.dataclass
class DiskWeightChannel(EngineChannel):
    """Writes ``weight_v000123/`` and has the engines load it (SGLang's ``update_weights_from_disk``).

    Engines generate while it is written, and pause to load it. The directory appears whole or not at all, with config
    and tokenizer of ``hf_checkpoint``. When all engines have confirmed it, earlier versions are removed, whichever
    process wrote them. Verified: engines respond and confirm the version; with ``check``, the files are read back
    before engines load them, and what engines hold is compared.

    Attributes:
        directory: Where versions are written; trainer and engines see it under the same path.
        keep_files: Keep all versions.
    """

    directory: str = ""
    keep_files: bool = False

    def _forget(self) -> None:
        super()._forget()
        self._discard: Callable[[], None] = lambda: None
        self._new: Path | None = None
        self._current: Path | None = None

    def close(self) -> None:
        """Remove what an unfinished version has written. The last whole one stays."""
        self._discard()

    def _begin(self, update: EngineUpdate) -> None:
        update.check_alive()
        final = Path(self.directory).absolute() / version_name(update.version)
        self._writer = CheckpointWriter(final, Path(self.hf_checkpoint), update.version)
        self._discard = self._writer.discard

    def _send(self, update: EngineUpdate, bucket: NamedTensors) -> None:
        self._writer.add(bucket)

    def _end(self, update: EngineUpdate) -> dict[str, str]:
        if not self._writer.checksums:
            raise WeightSyncError(f"weight version {update.version}: no tensor was sent")
        path = self._new = self._writer.finish()
        if self.check:
            verify_checkpoint(path)
        self._pause(update)
        update.on_all(lambda url: update.load(url, str(path)))
        return {}

    def _confirmed(self) -> None:
        self._current, self._new = self._new, None
        first = Path(self.hf_checkpoint).resolve()  # may be a version that another run left here
        for path in [] if self.keep_files else written_versions(Path(self.directory).absolute()):
            if path != self._current and path.resolve() != first:
                shutil.rmtree(path, ignore_errors=True)

    def _give_up(self) -> None:
        self.close()
        failed, self._new = self._new, None
        if failed is not None and failed != self._current:
            shutil.rmtree(failed, ignore_errors=True)


@dataclasses.dataclass
class DeltaWeightChannel(EngineChannel):
    """Publishes ``weight_v000123/`` with what changed; receivers on the engines' machines apply it, and engines load.

    SGLang does not read deltas: a :class:`~slime_rollout.weights.receiver.DeltaReceiver` keeps a whole checkpoint on
    the engines' machine. Engines generate meanwhile, and pause to load it. Verified: every tensor before and after, by
    checksum, at the receiver, whose checksums :meth:`end` compares with the sender's and returns; with ``check`` also
    what engines hold.

    The last confirmed version is kept in memory. Without it, as in a new process, deltas are made from
    ``hf_checkpoint``; also once the chain of deltas is larger than the model, so that a new receiver has less to apply.
    Versions published before that are removed, whichever process wrote them.

    Attributes:
        directory: Where versions are published; the receivers see it.
        receivers: URL of the receiver for each engine, or of one for all.
        keep_files: Keep all versions.
    """

    directory: str = ""
    receivers: tuple[str, ...] = ()
    keep_files: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.receivers) not in (1, len(self.engine_urls)):
            raise WeightSyncError(f"{len(self.receivers)} receivers for {len(self.engine_urls)} engines; give one each")

    def _forget(self) -> None:
        super()._forget()
        self._discard: Callable[[], None] = lambda: None
        self._start_over()

    def _start_over(self) -> None:
        self._version: int | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._before: dict[str, str] = {}
        self._after: dict[str, str] = {}
        self._chain_bytes = self._total_bytes = 0

    def close(self) -> None:
        """Forget the last version, and remove what an unfinished one has written. Published versions stay."""
        self._discard()
        self._start_over()

    def _begin(self, update: EngineUpdate) -> None:
        update.check_alive()
        if self._chain_bytes > self._total_bytes or (self._version is not None and update.version <= self._version):
            self._start_over()
        self._first = CheckpointReader(Path(self.hf_checkpoint))
        self._new = NewDirectory(Path(self.directory).absolute() / version_name(update.version))
        self._discard = self._new.discard
        self._deltas: dict[str, TensorDelta] = {}
        self._bytes = 0

    def _send(self, update: EngineUpdate, bucket: NamedTensors) -> None:
        check_new(bucket, self._deltas)
        for name, tensor in bucket:
            new, last = tensor.detach().cpu(), self._last.get(name)
            if last is None:
                self._write(name, first_tensor(self._first, name, new.dtype, new.shape), new)
                self._last[name] = new.clone(memory_format=torch.contiguous_format)
            else:
                self._write(name, last, new)
                last.copy_(new)

    def _write(self, name: str, base: torch.Tensor, new: torch.Tensor) -> None:
        delta = encode_delta(base, new)
        with (self._new.path / DELTA_FILE).open("ab") as file:
            file.write(delta)
        self._deltas[name] = TensorDelta(
            dtype=dtype_name(new.dtype),
            shape=tuple(new.shape),
            base=tensor_checksum(base),
            result=tensor_checksum(new),
            start=self._bytes,
            size=len(delta),
            checksum=xxhash.xxh3_128_hexdigest(delta),
        )
        self._bytes += len(delta)

    def _end(self, update: EngineUpdate) -> dict[str, str]:
        if not self._deltas:
            raise WeightSyncError(f"weight version {update.version}: no tensor was sent")
        self._publish(update.version)
        paths = self._pull(update)
        self._pause(update)
        update.on_all(lambda url: update.load(url, paths[url]))
        return dict(self._after)

    def _publish(self, version: int) -> None:
        self._after = {**self._before, **{name: delta.result for name, delta in self._deltas.items()}}
        index = DeltaIndex(
            version=version,
            base_version=self._version,
            base=combined_checksum(self._before),
            result=combined_checksum(self._after),
            tensors=self._deltas,
        )
        text = msgspec.json.encode(index)
        (self._new.path / DELTA_INDEX).write_bytes(xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text)
        self._new.publish()

    def _pull(self, update: EngineUpdate) -> dict[str, str]:
        """Have all receivers apply it; returns for each engine what to load."""
        receivers = self.receivers if len(self.receivers) > 1 else self.receivers * len(update.urls)
        urls = tuple(dict.fromkeys(receivers))
        pulls = dataclasses.replace(update, urls=urls)
        answers = dict(zip(urls, pulls.on_all(lambda url: self._pull_one(pulls, url)), strict=True))
        return {engine: answers[receiver] for engine, receiver in zip(update.urls, receivers, strict=True)}

    def _pull_one(self, pulls: EngineUpdate, url: str) -> str:
        answer = pulls.post(url, "/pull", {"version": pulls.version}, is_long=True)
        try:
            verify_checksums(answer["checksums"], self._after)
        except IntegrityError as error:
            raise WeightSyncError(f"weight version {pulls.version}: {url}: {error}", url=url) from error
        return str(answer["path"])

    def _confirmed(self) -> None:
        version, started_over = self._require_open().version, self._version is None
        self._total_bytes = sum(tensor.nbytes for tensor in self._last.values())
        logger.info("weight version %d: %d bytes of %d were sent", version, self._bytes, self._total_bytes)
        self._chain_bytes += self._bytes
        self._version, self._before = version, self._after
        if started_over and not self.keep_files:
            for path in published_versions(Path(self.directory).absolute()):
                if path.name != version_name(version):
                    shutil.rmtree(path, ignore_errors=True)

    def _give_up(self) -> None:
        """The next version is made from the first checkpoint: receivers may or may not have this one."""
        self.close()


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a published version: its checksums before and after, and its delta's place and XXH3."""

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str
    start: int
    size: int
    checksum: str


class DeltaIndex(msgspec.Struct, frozen=True, kw_only=True):
    """What a published version says about itself.

    Attributes:
        version: Its number.
        base_version: The version that it was made from; ``None`` for the first checkpoint.
        base: Combined checksum of all tensors before.
        result: Combined checksum of all tensors after.
        tensors: What it changes.
        format_version: Of the two files.
    """

    version: int
    base_version: int | None
    base: str
    result: str
    tensors: dict[str, TensorDelta]
    format_version: int = DELTA_FORMAT

    def read(self, directory: Path, name: str) -> bytes:
        """A tensor's delta, from the directory where versions are published.

        Raises:
            DamagedError: It cannot be read, or was altered.
        """
        path, tensor = directory / version_name(self.version) / DELTA_FILE, self.tensors[name]
        with reading(path), path.open("rb") as file:
            file.seek(tensor.start)
            delta = file.read(tensor.size)
        if xxhash.xxh3_128_hexdigest(delta) != tensor.checksum:
            raise DamagedError(f"{path}: the delta of {name} is damaged; publish version {self.version} again")
        return delta


def published_versions(directory: Path) -> list[Path]:
    """Directories of all versions that are published, in any format version."""
    indexes = (DELTA_INDEX, OLD_INDEX)
    return sorted(path for path in directory.glob("weight_v*") if any((path / name).exists() for name in indexes))


def read_index(directory: Path, version: int) -> DeltaIndex:
    """The index of a published version; an error if it is missing, damaged or of another format version."""
    path = directory / version_name(version) / DELTA_INDEX
    if (old := path.with_name(OLD_INDEX)).exists():
        check_format(old, 1, DELTA_FORMAT)
    with reading(path):
        checksum, _, text = path.read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(text).encode() != checksum:
            raise DamagedError(f"{path} is damaged; publish version {version} again")
        content = json.loads(text)
        check_format(path, content["format_version"], DELTA_FORMAT)
        index = msgspec.convert(content, DeltaIndex)
    if index.version != version:
        raise DamagedError(f"{path} is the index of version {index.version}; publish version {version} again")
    return index


def first_tensor(first: CheckpointReader, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """What a tensor was in the checkpoint that everything began with, as the base of a delta.

    Raises:
        DataError: It had another shape.
    """
    if name not in first.names:
        return torch.zeros(shape, dtype=dtype)
    first.check_shapes([(name, torch.empty(shape, device="meta"))])
    return first.read(name).to(dtype)


class _Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Changes of up to 2^20 elements, packed by Zstandard.

    Attributes:
        gaps: Distances from one changed element to the next, 32 bits each; empty if all elements have a difference.
        differences: New bytes minus old bytes modulo 256; empty if nothing changed.
    """

    gaps: bytes
    differences: bytes


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """What changed between two versions of a tensor, to the bit: MessagePack with a list of :class:`_Stretch`.

    An optimizer's small step moves a bf16 number to a neighbour: its low byte changes by 1 or so, its high byte rarely
    at all. So bytes are subtracted, and numbers' first, second … bytes lie side by side, which then pack well.

    Raises:
        DataError: The two differ in dtype or shape.
    """
    if (base.dtype, base.shape) != (new.dtype, new.shape):
        raise DataError(f"a delta needs two versions of one tensor, got {_describe(base)} and {_describe(new)}")
    width = min(base.element_size(), 8)
    old_N, new_N = (np.frombuffer(tensor_bytes(tensor), f"<u{width}") for tensor in (base, new))
    parts = (slice(start, start + _STRETCH) for start in range(0, len(old_N), _STRETCH))
    return msgspec.msgpack.encode([_encode_stretch(old_N[part], new_N[part]) for part in parts])


def _encode_stretch(old_N: NDArray[np.unsignedinteger], new_N: NDArray[np.unsignedinteger]) -> _Stretch:
    changed_C = np.flatnonzero(old_N != new_N)
    if not len(changed_C):
        return _Stretch(b"", b"")
    if len(changed_C) * _SPARSE > len(old_N):
        return _Stretch(b"", _pack(_bytes(new_N) - _bytes(old_N)))
    gaps_C = np.diff(changed_C, prepend=-1).astype("<u4")
    return _Stretch(_pack(_bytes(gaps_C)), _pack(_bytes(new_N[changed_C]) - _bytes(old_N[changed_C])))


def apply_delta(base: torch.Tensor, delta: bytes) -> torch.Tensor:
    """The new version, as a new tensor. The caller compares checksums before and after."""
    width = min(base.element_size(), 8)
    result = base.clone(memory_format=torch.contiguous_format)
    bytes_NW = np.frombuffer(tensor_bytes(result), np.uint8).reshape(-1, width)
    for number, stretch in enumerate(msgspec.msgpack.decode(delta, type=list[_Stretch])):
        part_NW = bytes_NW[number * _STRETCH : (number + 1) * _STRETCH]
        if stretch.gaps:
            changed_C = np.cumsum(_unpack(stretch.gaps, 4).view("<u4"), dtype=np.int64) - 1
            part_NW[changed_C] += _unpack(stretch.differences, width)
        elif stretch.differences:
            part_NW += _unpack(stretch.differences, width)
    return result


def _describe(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def _bytes(numbers_N: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    return numbers_N.view(np.uint8).reshape(len(numbers_N), -1)


def _pack(bytes_NW: NDArray[np.uint8]) -> bytes:
    packed: bytes = zstd.compress(np.ascontiguousarray(bytes_NW.T).data, _LEVEL)
    return packed


def _unpack(data: bytes, width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(np.frombuffer(zstd.decompress(data), np.uint8).reshape(width, -1).T)
