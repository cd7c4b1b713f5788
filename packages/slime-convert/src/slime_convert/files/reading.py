"""Reading the elements of lazy tensors, and comparing them with the checksums in their files."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from isal.isal_zlib import crc32, crc32_combine

from slime_convert.files import open_file
from slime_convert.files.tensors import ByteRange, Cursor, LazyTensor, MadeBytes, StoredBytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

CHUNK_BYTES = 4 * 2**20
"""Bytes that are read at a time: few enough to stay in the processor's cache until they are written."""

_ZEROS = memoryview(bytes(CHUNK_BYTES))
_OPEN_FILES = 16
_CACHED_BYTES = 256 * 2**20


class TensorReader:
    """Reads tensors, in a ``with`` statement and in one thread at a time.

    A checksum is compared once all of its bytes were read, in whatever order; see :meth:`finish`. ``shared`` files are
    read by other processes at about the same time, so that the system should not forget them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._files: OrderedDict[Path, int] = OrderedDict()
        self._cached = 0
        self._made: dict[MadeBytes, memoryview] = {}
        self._checks: dict[StoredBytes, _Check] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: LazyTensor) -> memoryview:
        """All bytes of a tensor; a :class:`ConvertError` if they are not those that were written."""
        whole = memoryview(bytearray(tensor.nbytes))
        self.stream(tensor).fill(whole)
        return whole

    def load(self, tensor: LazyTensor) -> Tensor:
        """A tensor of torch's; errors as of :meth:`read`."""
        import torch

        dtype = getattr(torch, tensor.dtype)
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=dtype)
        return torch.frombuffer(self.read(tensor), dtype=dtype).reshape(tensor.shape)

    def stream(self, tensor: LazyTensor) -> TensorStream:
        """A tensor's bytes, to be read from front to back. Computed bytes that it does not need are freed."""
        for source in self._made.keys() - {piece.source for piece in tensor.pieces}:
            del self._made[source]
        return TensorStream(self, tensor)

    def fill(self, piece: ByteRange, target: memoryview) -> None:
        """Read a piece, as large as ``target``; errors as of :meth:`read`."""
        source, start, nbytes = piece
        if source is None:
            for begin in range(0, nbytes, CHUNK_BYTES):
                part = target[begin : begin + CHUNK_BYTES]
                part[:] = _ZEROS[: len(part)]
        elif isinstance(source, MadeBytes):
            if source not in self._made:
                self._made[source] = source.make()
            target[:] = self._made[source][start : start + nbytes]
        else:
            self._read(source, start, target)
            if source.checksum is not None:
                self._checks.setdefault(source, _Check(source)).add(start, target)

    def finish(self) -> None:
        """Read what is left of those tensors that were read in part, so that every checksum is compared."""
        unread = {source: check for source, check in self._checks.items() if check.next_gap() is not None}
        buffer = memoryview(bytearray(CHUNK_BYTES if unread else 0))
        for source, check in unread.items():
            while (gap := check.next_gap()) is not None:
                part = buffer[: min(gap[1], CHUNK_BYTES)]
                self._read(source, gap[0], part)
                check.add(gap[0], part)
        self._checks.clear()

    def _read(self, source: StoredBytes, start: int, target: memoryview) -> None:
        place = source.offset + start
        try:
            descriptor = self._opened(source.path)
            while target:
                count = os.preadv(descriptor, [target], place)
                if not count:
                    raise OSError("the file is cut off")
                target, place = target[count:], place + count
                self._uncache(count)
        except OSError as error:
            raise source.error(
                f"cannot read {source.name} from {source.path} ({error.strerror or error}); use a complete copy"
            ) from error

    def _uncache(self, nbytes: int) -> None:
        """Now and then have the system forget what was read, so that its memory is used again: new memory takes longer,
        and is taken from what other programs have read."""
        self._cached += nbytes
        if self._cached >= _CACHED_BYTES and not self._shared:
            for descriptor in self._files.values():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._cached = 0

    def _opened(self, path: Path) -> int:
        if path not in self._files:
            if len(self._files) >= _OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[path] = open_file(path)
        self._files.move_to_end(path)
        return self._files[path]


def read_whole(tensor: LazyTensor) -> memoryview:
    """All bytes of a tensor, and every checksum compared; errors as of :meth:`TensorReader.read`."""
    with TensorReader() as reader:
        data = reader.read(tensor)
        reader.finish()
    return data


def load_whole(*tensors: LazyTensor) -> list[Tensor]:
    """Tensors of torch's, likewise."""
    with TensorReader() as reader:
        loaded = [reader.load(tensor) for tensor in tensors]
        reader.finish()
    return loaded


def computed(dtype: str, shape: tuple[int, ...], compute: Callable[..., Tensor], *parts: LazyTensor) -> LazyTensor:
    """A tensor that torch computes from others when it is needed: ``compute`` gets the parts as tensors of torch's."""
    return LazyTensor.made(dtype, shape, lambda: bytes_of(compute(*load_whole(*parts))))


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor of torch's, in C order."""
    import torch

    if not tensor.numel():
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def are_equal(left: LazyTensor, right: LazyTensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    size = min(left.nbytes, 2**20)
    buffers = memoryview(bytearray(size)), memoryview(bytearray(size))
    with TensorReader() as one, TensorReader() as other:
        streams = one.stream(left), other.stream(right)
        while count := streams[0].fill(buffers[0]):
            streams[1].fill(buffers[1])
            if buffers[0][:count] != buffers[1][:count]:
                return False
        one.finish()
        other.finish()
    return True


class TensorStream:
    """A tensor's bytes, read from front to back."""

    def __init__(self, reader: TensorReader, tensor: LazyTensor) -> None:
        self._reader, self._cursor = reader, Cursor(tensor.pieces)

    def fill(self, buffer: memoryview) -> int:
        """Read as many bytes as a buffer holds, fewer at the end, and return their number; errors as of ``read``."""
        done = 0
        for piece in self._cursor.take(len(buffer)):
            self._reader.fill(piece, buffer[done : done + piece.nbytes])
            done += piece.nbytes
        return done


class _Check:
    """Collects the checksums of the parts of a stored tensor, in whatever order they are read."""

    def __init__(self, source: StoredBytes) -> None:
        self._source = source
        self._end, self._checksum = 0, 0  # of what was read from the beginning without a gap
        self._later: dict[int, tuple[int, int]] = {}  # of parts behind a gap: where they end, and their checksum

    def add(self, start: int, data: memoryview) -> None:
        """Take a part, unless it was read before."""
        if start == self._end:
            self._checksum = crc32(data, self._checksum)
            self._end += len(data)
        elif start > self._end and self._later.get(start, (0, 0))[0] < start + len(data):
            self._later[start] = (start + len(data), crc32(data))
        while self._end in self._later:
            end, checksum = self._later.pop(self._end)
            self._checksum = crc32_combine(self._checksum, checksum, end - self._end)
            self._end = end
        if self._end == self._source.nbytes and self._checksum != self._source.checksum:
            raise self._source.error(
                f"{self._source.path} is damaged: the checksum of {self._source.name} is wrong; convert or fetch the "
                "model again; or, if another program changed the weights and kept the checksums of a safetensors file, "
                "save it without crc32 in its __metadata__"
            )

    def next_gap(self) -> tuple[int, int] | None:
        """Start and length of the first part that was not read; ``None`` without any."""
        if self._end == self._source.nbytes:
            return None
        # A part behind the gap may begin within what was read since: then the gap reaches to the end of that part.
        behind = [start for start in self._later if start > self._end]
        return self._end, min(behind, default=self._source.nbytes) - self._end
