"""Files of ``torch.save`` in its zip format, or parts of files: read, and laid out for writing.

No code in a file is run (:mod:`slime_convert.formats.pickles`), and nothing is unpacked: torch stores records as they
are, so a tensor is a range of bytes in the file.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from slime_convert.errors import CheckpointError
from slime_convert.files import file_inside, open_file
from slime_convert.files.reading import read_whole
from slime_convert.files.tensors import ITEM_BYTES, ByteRange, LazyTensor, StoredBytes
from slime_convert.formats.pickles import External, Name, New, Obj, dumps, loads

_STORAGES = {
    **{"BFloat16Storage": "bfloat16", "BoolStorage": "bool", "ComplexFloatStorage": "complex64"},
    **{"ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32"},
    **{"LongStorage": "int64", "HalfStorage": "float16", "FloatStorage": "float32", "DoubleStorage": "float64"},
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
_PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
_LOCAL_HEADER_BYTES = 30
_ALIGNMENT = 64
_LARGE = 2**32 - 1
_DAMAGE = (OSError, ValueError, EOFError, struct.error, zipfile.BadZipFile, NotImplementedError, MemoryError)
MAX_PICKLE_BYTES = 2**30
"""Largest pickle that is read: of a description of tensors, not of the tensors."""


class TorchFile:
    """A file of a checkpoint that ``torch.save`` wrote, or a part of one: ``part`` is its offset and length in bytes.

    Raises:
        CheckpointError: It is not such a file, or damaged, or outside the directory.
    """

    def __init__(self, directory: Path, name: str, part: tuple[int, int] | None = None) -> None:
        file_inside(directory, name, CheckpointError)
        self.path = directory / name
        self._storages: dict[str, StoredBytes] = {}
        with self._read_errors(), os.fdopen(open_file(self.path), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            self._begin, length = part or (0, size)
            if self._begin < 0 or length < 0 or self._begin + length > size:
                raise ValueError(f"the file is cut off: it has {size} of {self._begin + length} bytes")
            with zipfile.ZipFile(_Part(file.fileno(), self._begin, length)) as archive:  # noqa: TID251  (only its list)
                self._records = {info.filename: info for info in archive.infolist()}
            self._places = {name: self._place(file.fileno(), info, length) for name, info in self._records.items()}
            (pickled,) = (name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl"))
            self._root = pickled.removesuffix("data.pkl")
            order = self._bytes(file.fileno(), f"{self._root}byteorder") or b"little"
            if order != b"little":
                raise ValueError("it was written on a big-endian machine; save it on another")
            self._pickled = self._bytes(file.fileno(), pickled) or b""

    def content(self) -> Any:
        """The saved object, as :func:`slime_convert.formats.pickles.loads` gives it; see :meth:`tensor`."""
        with self._read_errors():
            return loads(self._pickled)

    def tensor(self, value: Any, name: str) -> LazyTensor | None:
        """The tensor that a value of :meth:`content` describes; ``None`` if it is not a plain one.

        A :class:`CheckpointError` calls it ``name`` if bytes are missing.
        """
        if isinstance(value, Obj) and value.name in _PARAMETERS and isinstance(value.args, tuple) and value.args:
            value = value.args[0]
        if not isinstance(value, Obj):
            return None
        match value.name.removeprefix("torch._utils "), value.args:
            case "_rebuild_tensor_v2", (Obj(args=("storage", kind, key, *_)), offset, shape, stride, *_):
                pass
            case "_rebuild_tensor_v3", (Obj(args=("storage", _, key, *_)), offset, shape, stride, _, _, kind, *_):
                pass
            case _:
                return None
        shape, stride = sizes(shape), sizes(stride)
        if not isinstance(kind, Name) or shape is None or stride is None or len(shape) != len(stride):
            return None
        dtype = _STORAGES.get(kind.removeprefix("torch "), kind.removeprefix("torch "))
        if dtype not in ITEM_BYTES or not isinstance(key, str) or type(offset) is not int or not 0 <= offset < 2**60:
            return None
        return self._lay(self._storage(key, name), dtype, offset, shape, stride, name)

    def _lay(
        self, stored: StoredBytes, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], name: str
    ) -> LazyTensor | None:
        count, item = math.prod(shape), ITEM_BYTES[dtype]
        if not count:
            return LazyTensor(dtype, shape, ())
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if span < count:
            return None  # elements would share bytes: not one of Megatron's weights, and of any size
        if (needed := (offset + span) * item) > stored.nbytes:
            raise CheckpointError(f"{self.path} lacks bytes of {name}: it has {stored.nbytes} of {needed}; use another")
        flat = LazyTensor(dtype, (span,), (ByteRange(stored, offset * item, span * item),))
        if span == count and _is_in_order(shape, stride):
            return flat.reshape(*shape)

        def make() -> memoryview:
            import numpy as np

            strides = tuple(step * item for step in stride)
            return np.ascontiguousarray(np.ndarray(shape, f"u{item}", read_whole(flat), strides=strides)).data.cast("B")

        return LazyTensor.made(dtype, shape, make)

    def _storage(self, key: str, name: str) -> StoredBytes:
        if key not in self._storages:
            record = f"{self._root}data/{key}"
            info = self._records.get(record)
            if info is None:
                raise CheckpointError(f"{self.path} lacks storage {key} of {name}; use another checkpoint")
            checksum = info.CRC or None  # 0: it was not computed when the file was written
            self._storages[key] = StoredBytes(self.path, self._places[record], info.file_size, name, checksum)
        return self._storages[key]

    def _place(self, descriptor: int, info: zipfile.ZipInfo, length: int) -> int:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{info.filename} is compressed, which torch does not do")
        header = os.pread(descriptor, _LOCAL_HEADER_BYTES, self._begin + info.header_offset)
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        first = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if not 0 <= info.header_offset <= first + info.file_size <= length:
            raise ValueError(f"{info.filename} lies outside the file")
        return int(self._begin + first)

    def _bytes(self, descriptor: int, name: str) -> bytes | None:
        """A small record, its checksum compared if it has one."""
        info = self._records.get(name)
        if info is None:
            return None
        if info.file_size > MAX_PICKLE_BYTES:  # a sparse file may have any size
            raise ValueError(f"{name} has {info.file_size} bytes; allowed: {MAX_PICKLE_BYTES}")
        data = os.pread(descriptor, info.file_size, self._places[name])
        if len(data) != info.file_size or (info.CRC and crc32(data) != info.CRC):
            raise ValueError(f"the checksum of {name} is wrong")
        return data

    @contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except _DAMAGE as error:
            must = "it must be a whole file of torch.save in its zip format, use another checkpoint"
            raise CheckpointError(f"cannot read {self.path} ({error}); {must}") from error


def sizes(value: Any) -> tuple[int, ...] | None:
    """The lengths in a ``torch.Size``, tuple or list of a pickle; ``None`` if it is something else."""
    match value:
        case Obj(name="torch Size", args=(lengths,)):
            value = lengths
    if isinstance(value, tuple | list) and len(value) <= 16 and all(type(n) is int and 0 <= n < 2**60 for n in value):
        return tuple(value)
    return None


def _is_in_order(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor's elements lie one behind the other in C order."""
    step = 1
    for size, given in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and given != step:
            return False
        step *= size
    return True


class _Part(io.RawIOBase):
    """A part of an open file, as a file."""

    def __init__(self, descriptor: int, first: int, length: int) -> None:
        self._descriptor, self._first, self._length, self._at = descriptor, first, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"negative place {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)[: max(self._length - self._at, 0)]
        count = os.preadv(self._descriptor, [target], self._first + self._at)
        self._at += count
        return count


@dataclass(frozen=True)
class Archive:
    """The file that ``torch.save`` writes of one tensor.

    Attributes:
        offset: Of the tensor's first byte, a multiple of 64.
        nbytes: Of the whole archive.
        seal: Gives the bytes before the tensor and those after it, from the tensor's CRC-32.
    """

    offset: int
    nbytes: int
    seal: Callable[[int], tuple[bytes, bytes]]

    def around(self, data: memoryview) -> tuple[bytes, bytes]:
        """The bytes before the tensor and those after it, from the tensor's own."""
        return self.seal(crc32(data))


def tensor_archive(dtype: str, shape: tuple[int, ...], nbytes: int) -> Archive:
    """The archive that ``torch.load`` reads as a tensor; ``dtype`` is torch's name of the element type."""
    pickled = _pickled_tensor(dtype, shape, nbytes)

    def seal(checksum: int) -> tuple[bytes, bytes]:
        zipped = _Zip(pickled)
        zipped.add_header("data/0", nbytes, checksum, align=True)
        return bytes(zipped.data), zipped.directory(len(zipped.data) + nbytes)

    head, tail = seal(0)
    return Archive(len(head), len(head) + nbytes + len(tail), seal)


def _pickled_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    strides, hooks = tuple(reversed(steps)), New(Name("collections OrderedDict"))
    if dtype in _STORAGE_OF:
        storage = ("storage", Name(f"torch {_STORAGE_OF[dtype]}"), "0", "cpu", nbytes // ITEM_BYTES[dtype])
        return dumps(New(Name("torch._utils _rebuild_tensor_v2"), External(storage), 0, shape, strides, False, hooks))
    storage = ("storage", Name("torch.storage UntypedStorage"), "0", "cpu", nbytes)
    rest = (0, shape, strides, False, hooks, Name(f"torch {dtype}"))
    return dumps(New(Name("torch._utils _rebuild_tensor_v3"), External(storage), *rest))


def object_archive(value: Any) -> bytes:
    """The archive that ``torch.load`` reads as an object; see :func:`slime_convert.formats.pickles.dumps`."""
    zipped = _Zip(dumps(value))
    return bytes(zipped.data) + zipped.directory(len(zipped.data))


class _Zip:
    """A zip archive of stored records. `zipfile` does not lay one out before it knows the bytes."""

    def __init__(self, pickled: bytes) -> None:
        self.data = bytearray()
        self._directory: list[bytes] = []
        for name, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            self.add_header(name, len(data), crc32(data))
            self.data += data

    def add_header(self, name: str, nbytes: int, checksum: int, *, align: bool = False) -> None:
        """A record whose bytes come from elsewhere."""
        offset, text = len(self.data), f"archive/{name}".encode()
        large = nbytes >= _LARGE
        size = _LARGE if large else nbytes
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if large else b""
        fields = (45 if large else 20, 0, 0, 0, 33, checksum, size, size, len(text))  # 33: the first of January 1980
        self._directory.append(
            struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, *fields, len(extra), 0, 0, 0, 0, offset) + text + extra
        )
        if align:  # with the padding that torch uses
            padding = -(offset + _LOCAL_HEADER_BYTES + len(text) + len(extra) + 4) % _ALIGNMENT
            extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        self.data += struct.pack("<IHHHHHIIIHH", 0x04034B50, *fields, len(extra)) + text + extra

    def directory(self, offset: int) -> bytes:
        """The directory that ends the archive, at an offset from its beginning."""
        listed, count = b"".join(self._directory), len(self._directory)
        end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, len(listed), min(offset, _LARGE), 0)
        if offset >= _LARGE:
            numbers = (44, 45, 45, 0, 0, count, count, len(listed), offset)
            locator = struct.pack("<IIQI", 0x07064B50, 0, offset + len(listed), 1)
            end = struct.pack("<IQHHIIQQQQ", 0x06064B50, *numbers) + locator + end
        return listed + end
