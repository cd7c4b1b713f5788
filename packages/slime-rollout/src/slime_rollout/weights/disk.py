"""New weights through files, as whole checkpoints or as deltas: what changed from a version to the next, to the bit.

A published delta is a directory ``weight_v000123/`` with ``deltas.bin``, the tensors' deltas end to end, and
``index.json``: the XXH3 of what follows, a line break, and a :class:`DeltaIndex` as JSON. It is made from the version
before, or from the first checkpoint, where another dtype is converted and a missing tensor, such as a tied output
layer, counts as zeros. A receiver follows this chain (``base_version``, ``base``) back to what it has.
"""

from __future__ import annotations

import abc
import functools
import hashlib
import hmac
import itertools
import logging
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from slime_core.errors import DamagedError, DataError, IntegrityError
from slime_core.files import read_text, write_whole
from slime_core.interfaces import NamedTensors
from slime_rollout.engine import WeightSyncError
from slime_rollout.weights.channel import EngineChannel, engine_weight_version
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    NewDirectory,
    check_format,
    check_new,
    combined_checksum,
    dtype_name,
    read_record,
    reading,
    remove_others,
    tensor_bytes,
    tensor_checksum,
    verify_checkpoint,
    verify_checksums,
    version_name,
    written_versions,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

DELTA_INDEX, DELTA_FILE = "index.json", "deltas.bin"
DELTA_FORMAT = 2
OLD_INDEX = "index.slwi"  # of format version 1
KEY_FILE = "receivers.hash"
_KEY_BYTES = 200
_ROUNDS = 100_000
_STRETCH = 2**20  # elements that are encoded at a time
_SPARSE = 8  # up to one in so many elements changed: only these are written
_LEVEL = 1  # zstandard's; level 3 makes deltas no smaller and takes up to twice the time


class _FileChannel(EngineChannel):
    """Writes a directory while engines generate, and pauses them to load it."""

    def _prepare(self) -> None:
        self._directory = Path(self._sync.update_weight_disk_dir or "")
        self._new: NewDirectory | None = None

    def close(self) -> None:
        if self._new is not None:
            self._new.discard()
        self._new = None

    def _begin(self) -> None:
        self._on_all(lambda url: engine_weight_version(url, self.spec.key))  # an engine that is gone is noticed now
        self._new = self._start(self._directory.absolute() / version_name(self._version))

    def _end(self) -> dict[str, str]:
        if self._new is None or not any(self._new.path.iterdir()):
            raise self._error("no tensor was sent")
        paths, checksums = self._publish()
        self._pause()
        self._on_all(
            lambda url: self._post(
                url, "/update_weights_from_disk", {"model_path": paths[url], "flush_cache": False}, is_long=True
            )
        )
        return checksums

    def _confirmed(self) -> None:
        self._new = None

    @abc.abstractmethod
    def _start(self, path: Path) -> NewDirectory:
        """Make the new version's directory."""

    @abc.abstractmethod
    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        """Publish the version; returns what each engine loads, and checksums as :meth:`end`."""


class DiskWeightChannel(_FileChannel):
    """Writes ``weight_v000123/`` and has the engines load it (SGLang's ``update_weights_from_disk``).

    Trainer and engines see ``directory`` under the same path. When all engines have confirmed a version, earlier ones
    are removed, whichever process wrote them, unless ``keep_files`` is set. With ``check``, the files are read back
    before engines load them.
    """

    def _start(self, path: Path) -> NewDirectory:
        self._writer = CheckpointWriter(path, Path(self.spec.hf_checkpoint), self._version)
        return self._writer

    def _send(self, bucket: NamedTensors) -> int:
        self._writer.add(bucket)
        return sum(tensor.nbytes for _, tensor in bucket)

    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        path = self._writer.finish()
        if self._sync.check_weight_update_equal:
            verify_checkpoint(path)
        return dict.fromkeys(self.spec.engine_urls, str(path)), {}

    def _confirmed(self) -> None:
        super()._confirmed()
        path = self._writer.path
        # The first checkpoint may be a version that another run left here.
        if not self._sync.update_weight_disk_keep_files:
            remove_others(written_versions(path.parent), path, Path(self.spec.hf_checkpoint))


class DeltaWeightChannel(_FileChannel):
    """Publishes ``weight_v000123/`` with what changed; receivers on the engines' machines apply it, and engines load.

    SGLang does not read deltas: a :class:`~slime_rollout.weights.receiver.DeltaReceiver` keeps a whole checkpoint on
    the engines' machine, and verifies every tensor. It must see ``directory``. ``receivers`` are the URL of the
    receiver for each engine, or of one for all.

    The last confirmed version is kept in memory. Without it, as in a new process or after an error, deltas are made
    from ``hf_checkpoint``; also once the chain of deltas is larger than the model, so that a new receiver has less to
    apply. Versions published before that are removed, whichever process wrote them, unless ``keep_files`` is set.
    Receivers know the ``key`` by :func:`publish_key`.
    """

    def _prepare(self) -> None:
        super()._prepare()
        receivers, engines = len(self.spec.receivers), len(self.spec.engine_urls)
        if receivers not in (1, engines):
            raise WeightSyncError(f"{receivers} receivers for {engines} engines; give one each")
        self._has_published_key = False
        self._start_over()

    def _start_over(self) -> None:
        self._last_version: int | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._before: dict[str, str] = {}
        self._chain_bytes = 0

    def close(self) -> None:
        """Forget the last version, and remove what an unfinished one has written. Confirmed versions stay."""
        super().close()
        self._start_over()

    def _start(self, path: Path) -> NewDirectory:
        is_later = self._last_version is None or self._version > self._last_version
        if not is_later or self._chain_bytes > self._model_bytes():
            self._start_over()
        self._first = CheckpointReader(Path(self.spec.hf_checkpoint))
        self._writer = DeltaWriter(path)
        return self._writer

    def _model_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._last.values())

    def _send(self, bucket: NamedTensors) -> int:
        check_new(bucket, self._writer.deltas)
        for name, tensor in bucket:
            new, last = tensor.detach().cpu(), self._last.get(name)
            if last is None:
                self._writer.add(name, first_tensor(self._first, name, new.dtype, new.shape), new)
                self._last[name] = new.clone(memory_format=torch.contiguous_format)
            else:
                self._writer.add(name, last, new)
                last.copy_(new)
        return sum(self._writer.deltas[name].size for name, _ in bucket)

    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        self._after = self._before | {name: delta.result for name, delta in self._writer.deltas.items()}
        self._writer.finish(self._version, self._last_version, self._before, self._after)
        if self.spec.key is not None and not self._has_published_key:
            publish_key(self._directory, self.spec.key)
            self._has_published_key = True
        receivers = tuple(dict.fromkeys(self.spec.receivers))
        paths = dict(zip(receivers, self._on_all(self._pull, receivers), strict=True))
        pairs = zip(self.spec.engine_urls, itertools.cycle(self.spec.receivers), strict=False)
        return {engine: paths[receiver] for engine, receiver in pairs}, dict(self._after)

    def _pull(self, receiver: str) -> str:
        """Have a receiver apply the version; returns what engines load."""
        answer = self._post(receiver, "/pull", {"version": self._version}, is_long=True)
        try:
            path, checksums = str(answer["path"]), dict(answer["checksums"])
            verify_checksums(checksums, self._after)
        except IntegrityError as error:
            raise self._error(f"{receiver}: {error}", receiver) from error
        except (KeyError, TypeError, ValueError) as error:
            text = (
                f"{receiver}/pull answered {str(answer)[:200]!r}, and not as a receiver does; look at what runs there"
            )
            raise self._error(text, receiver) from error
        return path

    def _confirmed(self) -> None:
        super()._confirmed()
        sent = sum(delta.size for delta in self._writer.deltas.values())
        logger.info("weight version %d: %d bytes of %d were sent", self._version, sent, self._model_bytes())
        if self._last_version is None and not self._sync.update_weight_disk_keep_files:
            remove_others(published_versions(self._writer.path.parent), self._writer.path)
        self._chain_bytes += sent
        self._last_version, self._before = self._version, self._after


class TensorDelta(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a published version: its checksums before and after, and its delta's place and XXH3."""

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str
    start: int
    size: int
    checksum: str


class DeltaIndex(msgspec.Struct, frozen=True, kw_only=True):
    """A published version's description of itself."""

    version: int
    base_version: int | None  # that it was made from; `None` for the first checkpoint
    base: str  # combined checksum of all tensors before
    result: str  # and after
    tensors: dict[str, TensorDelta]  # what it changes
    format_version: int = DELTA_FORMAT

    def read(self, directory: Path, name: str) -> bytes:
        """A tensor's delta, from the directory where versions are published."""
        path, tensor = directory / version_name(self.version) / DELTA_FILE, self.tensors[name]
        with reading(path), path.open("rb") as file:
            file.seek(tensor.start)
            delta = file.read(tensor.size)
        if xxhash.xxh3_128_hexdigest(delta) != tensor.checksum:
            raise DamagedError(f"{path}: the delta of {name} is damaged; publish version {self.version} again")
        return delta


class DeltaWriter(NewDirectory):
    """Writes the deltas of one version."""

    def __init__(self, final: Path) -> None:
        super().__init__(final)
        self.deltas: dict[str, TensorDelta] = {}

    def add(self, name: str, base: torch.Tensor, new: torch.Tensor) -> None:
        """Write what changed in a tensor."""
        delta = encode_delta(base, new)
        with (self.path / DELTA_FILE).open("ab") as file:  # written: a folder that this process made
            start = file.tell()
            file.write(delta)
        self.deltas[name] = TensorDelta(
            dtype=dtype_name(new.dtype),
            shape=tuple(new.shape),
            base=tensor_checksum(base),
            result=tensor_checksum(new),
            start=start,
            size=len(delta),
            checksum=xxhash.xxh3_128_hexdigest(delta),
        )

    def finish(
        self, version: int, base_version: int | None, before: Mapping[str, str], after: Mapping[str, str]
    ) -> None:
        """Write the index and publish; ``before`` and ``after`` are the checksums of all tensors ever sent."""
        index = DeltaIndex(
            version=version,
            base_version=base_version,
            base=combined_checksum(before),
            result=combined_checksum(after),
            tensors=self.deltas,
        )
        text = msgspec.json.encode(index)
        index_bytes = xxhash.xxh3_128_hexdigest(text).encode() + b"\n" + text
        (self.path / DELTA_INDEX).write_bytes(index_bytes)  # written: a folder that this process made
        self.publish()


def publish_key(directory: Path, key: str) -> None:
    """Let receivers know a key, by a hash in the directory where versions are published, which both sides see.

    The file is ``SALT HASH``: PBKDF2 with HMAC-SHA256 and 100,000 rounds, for keys that somebody has thought of.
    """
    salt = secrets.token_hex(16)
    write_whole(directory / KEY_FILE, f"{salt} {_key_hash(key, salt)}\n")


def is_published_key(directory: Path, key: str) -> bool:
    """Whether the last :func:`publish_key` was of this key."""
    try:
        salt, expected = read_text(directory / KEY_FILE, most=_KEY_BYTES).split()
    except (OSError, ValueError, DataError):  # none was published
        return False
    return hmac.compare_digest(_key_hash(key, salt).encode(), expected.encode())


@functools.lru_cache(maxsize=4)  # a run asks with the same one each time
def _key_hash(key: str, salt: str) -> str:
    return hashlib.pbkdf2_hmac("sha256", key.encode(errors="replace"), salt.encode(), _ROUNDS).hex()


def published_versions(directory: Path) -> list[Path]:
    """Directories of all versions that are published, in any format version."""
    return [index.parent for name in (DELTA_INDEX, OLD_INDEX) for index in directory.glob(f"weight_v*/{name}")]


def read_index(directory: Path, version: int) -> DeltaIndex:
    """The index of a published version; an error if it is missing, damaged or of another format version."""
    path = directory / version_name(version) / DELTA_INDEX
    if (old := path.with_name(OLD_INDEX)).exists():
        check_format(old, 1, DELTA_FORMAT)
    with reading(path):
        checksum, _, text = path.read_bytes().partition(b"\n")
        if xxhash.xxh3_128_hexdigest(text).encode() != checksum:
            raise DamagedError(f"{path} is damaged; publish version {version} again")
        index = read_record(path, text, DeltaIndex, DELTA_FORMAT)
    if index.version != version:
        raise DamagedError(f"{path} is the index of version {index.version}; publish version {version} again")
    return index


def first_tensor(first: CheckpointReader, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the checkpoint that everything began with, as the base of a delta."""
    return first.read(name).to(dtype) if name in first.names else torch.zeros(shape, dtype=dtype)


class _Stretch(msgspec.Struct, frozen=True, array_like=True):
    """Changes of up to 2^20 elements, packed by Zstandard."""

    gaps: bytes  # from one changed element to the next, 32 bits each; empty if all elements have a difference
    differences: bytes  # new bytes minus old bytes modulo 256; empty if nothing changed


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """The changes between two versions of a tensor, to the bit: MessagePack with a list of :class:`_Stretch`.

    An optimizer's small step moves a bf16 number to a neighbour: its low byte changes by 1 or so, its high byte rarely
    at all. So bytes are subtracted, and numbers' first, second … bytes lie side by side, which then pack well.
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
