"""Files of ``torch.save``, read tensor by tensor: nothing foreign is unpickled, what is not asked for stays on disk.

``torch.load(mmap=True)`` would leave the rest on disk too, but maps the file privately and writably, which Linux
refuses for a file that is larger than the memory. Here each tensor is mapped when its turn comes, and checked.
Torch is imported when the first tensor is: what a file holds is told without it.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from slime_convert import plain_pickle
from slime_convert.checkpoint import ITEM_BYTES
from slime_convert.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LOCAL_HEADER_BYTES = 30  # fixed part of the header before a record in a zip archive; its name and extra field follow
_CHECK_BYTES = 2**24
_STORAGES = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet.

    Attributes:
        file: The file.
        key: The storage that holds it; tensors may share one.
        dtype: Torch's name of the element type, one of :data:`slime_convert.checkpoint.ITEM_BYTES`.
        offset: Its first element's place in the storage, in elements.
        shape: Its shape.
        stride: Its strides, in elements.
    """

    file: TorchFile
    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def load(self) -> Tensor:
        """Read it.

        Raises:
            CheckpointError: Its bytes are missing, or are not those that were written.
        """
        import torch

        dtype = getattr(torch, self.dtype)
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        span, start = _span(self.shape, self.stride), self.offset * ITEM_BYTES[self.dtype]
        return self.file.map(self.key, start, span, dtype).as_strided(self.shape, self.stride)


class TorchFile:
    """A file that ``torch.save`` wrote, or a part of one.

    Args:
        path: The file.
        part: Offset and length, in bytes, of what ``torch.save`` wrote into a larger file.

    Raises:
        CheckpointError: It is no such file, or damaged.
    """

    def __init__(self, path: Path, part: tuple[int, int] | None = None) -> None:
        self.path = path
        self._part = part
        self._checked: set[str] = set()
        with self._opened() as archive:
            self._records = {info.filename: info for info in archive.infolist()}
            (pickled,) = (name for name in self._records if name.count("/") == 1 and name.endswith("/data.pkl"))
            self._root = pickled.removesuffix("data.pkl")

    def content(self) -> Any:
        """The saved object, each tensor a :class:`StoredTensor`, each object of a foreign type inert.

        Raises:
            CheckpointError: The file is damaged.
        """
        with self._opened() as archive:
            order = self._records.get(f"{self._root}byteorder")
            if order is not None and _bytes(archive, order) != b"little":
                raise CheckpointError(f"{self.path} was written on a big-endian machine; save it on another")
            pickled = _bytes(archive, self._records[f"{self._root}data.pkl"])
            return _Unpickler(io.BytesIO(pickled), self).load()

    def require(self, key: str, nbytes: int) -> zipfile.ZipInfo:
        """The record of one storage, which must have this many bytes.

        Raises:
            CheckpointError: It has not.
        """
        info = self._records.get(f"{self._root}data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size < nbytes:
            raise self._damaged(f"it lacks bytes of storage {key}")
        return info

    def map(self, key: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements of one storage, from its byte ``start`` on, as :func:`slime_convert.mapped.map_tensor` gives them.

        Raises:
            CheckpointError: They are missing, or the storage's checksum is another than when it was written.
        """
        import torch

        from slime_convert.mapped import map_tensor

        nbytes = count * dtype.itemsize
        info = self.require(key, start + nbytes)
        whole = nbytes == info.file_size
        begin, length = self._part or (0, self.path.stat().st_size)
        try:
            with self._file() as file:
                first = _first_byte(file, info)
                if not whole:
                    self._check_once(file, info, first)
                if first + start + nbytes > length:
                    raise EOFError("the file is cut off")
                flat = map_tensor(file, begin + first + start, count, dtype)
        except (OSError, EOFError, ValueError, struct.error) as error:
            raise self._damaged(repr(error)) from error
        if whole and info.CRC and zlib.crc32(flat.view(torch.uint8).numpy().data) != info.CRC:
            raise self._damaged(f"the checksum of storage {key} is wrong")
        return flat

    def _check_once(self, file: BinaryIO, info: zipfile.ZipInfo, first: int) -> None:
        """Check the checksum of a storage that is read in parts. A checksum of 0 was not computed when saving."""
        if info.filename in self._checked or not info.CRC:
            return
        file.seek(first)
        left, checksum = info.file_size, 0
        buffer = memoryview(bytearray(min(_CHECK_BYTES, left)))
        while left:
            part = buffer[: min(len(buffer), left)]
            _fill(file, part)
            checksum = zlib.crc32(part, checksum)
            left -= len(part)
        if checksum != info.CRC:
            raise self._damaged(f"the checksum of {info.filename} is wrong")
        self._checked.add(info.filename)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged ({what}); use another checkpoint")

    def _file(self) -> BinaryIO:
        file = self.path.open("rb", buffering=0)
        return file if self._part is None else _Part(file, *self._part)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        try:
            with self._file() as file, zipfile.ZipFile(file) as archive:
                yield archive
        except CheckpointError:
            raise
        except Exception as error:  # unpickling damaged bytes can raise anything
            raise CheckpointError(
                f"cannot read {self.path} ({error!r}); it must be a whole file of torch.save in its zip format, "
                "use another checkpoint"
            ) from error


class _Part(io.RawIOBase, BinaryIO):
    """A part of a file, as a file of its own."""

    def __init__(self, file: BinaryIO, first: int, length: int) -> None:
        self._file, self._first, self._length, self._place = file, first, length, 0

    def fileno(self) -> int:
        """Of the whole file."""
        return self._file.fileno()

    def seekable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The place of what is read next."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"negative place {start + offset}")
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read what fits, up to the part's end."""
        target = memoryview(buffer)[: max(self._length - self._place, 0)]
        self._file.seek(self._first + self._place)
        count: int = self._file.readinto(target)  # type: ignore[attr-defined]
        self._place += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _bytes(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """One record, its checksum checked if it has one."""
    if not info.CRC:
        info.CRC = None  # type: ignore[assignment]  # zipfile's word for a checksum that is unknown
    return archive.read(info)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last in storage."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _first_byte(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Where a record's bytes begin in the archive."""
    file.seek(info.header_offset)
    header = file.read(_LOCAL_HEADER_BYTES)
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    return int(info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def _fill(file: BinaryIO, target: memoryview) -> None:
    """One read gives 2 GiB at most."""
    while len(target):
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("the file is cut off")
        target = target[count:]


class _Unpickler(plain_pickle.Unpickler):
    """Gives :class:`StoredTensor` where torch would give tensors."""

    def __init__(self, file: io.BytesIO, owner: TorchFile) -> None:
        super().__init__(file)
        self._owner = owner

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage, by its type and key; torch names nothing else in this way."""
        kind, storage_type, key, *_ = pid
        if kind != "storage" or not isinstance(key, str):
            raise ValueError(f"unknown reference {pid!r}")
        return _Storage(key, storage_type if isinstance(storage_type, str) else None)

    def find_class(self, module_name: str, global_name: str) -> Any:
        """As the base class does, but nothing of torch: its types stand here by their names."""
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        if module_name == "torch" and global_name in ITEM_BYTES:
            return global_name
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        if module_name == "torch._utils" and global_name in (rebuilders := self._rebuilders()):
            return rebuilders[global_name]
        return (
            plain_pickle.Inert if module_name.split(".")[0] == "torch" else super().find_class(module_name, global_name)
        )

    def _rebuilders(self) -> dict[str, Callable[..., Any]]:
        return {
            "_rebuild_tensor_v2": lambda storage, offset, size, stride, *_: self._tensor(storage, offset, size, stride),
            "_rebuild_tensor_v3": lambda storage, offset, size, stride, grad, hooks, dtype, *_: self._tensor(
                _Storage(storage.key, dtype), offset, size, stride
            ),
            "_rebuild_parameter": lambda data, *_: data,
            "_rebuild_parameter_with_state": lambda data, *_: data,
        }

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Any:
        sizes, strides = tuple(size), tuple(stride)
        numbers = (offset, *sizes, *strides)
        plain = isinstance(storage, _Storage) and storage.dtype in ITEM_BYTES and len(sizes) == len(strides)
        if not plain or not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            return plain_pickle.Inert()
        if math.prod(sizes) > _span(sizes, strides):
            return plain_pickle.Inert()  # elements would share bytes: none of Megatron's weights, and of any size
        return StoredTensor(self._owner, storage.key, storage.dtype, offset, sizes, strides)


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str | None
