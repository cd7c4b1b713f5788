"""Writing tensors to their places in new files, and continuing where an earlier run was stopped.

The places are known before the first byte is written. After each tensor's bytes its seal is written: what the file
says of the tensor, its checksum included. So a file shows by itself which of its tensors are finished.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from isal.isal_zlib import crc32

from slime_convert.files.reading import CHUNK_BYTES, TensorReader
from slime_convert.files.tensors import LazyTensor, TensorInfo
from slime_convert.progress import OnProgress, no_progress

_FLUSH_BYTES = 64 * 2**20


class Segment(NamedTuple):
    """Bytes at a place in a file."""

    offset: int
    data: bytes


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written; ``load`` gives it when its turn comes."""

    info: TensorInfo
    load: Callable[[], LazyTensor]


def in_hand(name: str, tensor: LazyTensor) -> NewTensor:
    """A tensor to be written whose byte ranges are known already."""
    return NewTensor(tensor.info(name), lambda: tensor)


@dataclass(frozen=True)
class Placed:
    """A tensor and its place in a file; ``seal`` makes, from its CRC-32, what is written around it last."""

    tensor: NewTensor
    offset: int
    seal: Callable[[int], Sequence[Segment]]


@dataclass(frozen=True)
class TensorFile:
    """A file to be written: tensors, in the order in which they are best written, over what is ``fixed``.

    Seals of tensors replace ``fixed`` parts where they overlap.
    """

    path: Path
    nbytes: int
    fixed: Sequence[Segment]
    tensors: Sequence[Placed]

    def open(self) -> FileIO:
        """The file, which is created if it is missing."""
        # Neither through a link nor, see below, into a file with a second name: both would change what is not ours.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        return os.fdopen(descriptor, "r+b", buffering=0)

    def begin(self) -> set[str]:
        """Create the file, unless an earlier run did, and return the names of the tensors that it holds already."""
        with self.open() as file:
            descriptor = file.fileno()
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise FileExistsError(errno.EEXIST, "not a file of its own", str(self.path))
            if found.st_size == self.nbytes and self._has_fixed(descriptor):
                return {placed.tensor.info.name for placed in self.tensors if _is_sealed(descriptor, placed)}
            file.truncate(0)
            for offset, data in self.fixed:
                write_at(descriptor, memoryview(data), offset)
            file.truncate(self.nbytes)
        return set()

    def _has_fixed(self, descriptor: int) -> bool:
        """Whether the file has what it should have around the seals."""
        seals = sorted(segment for placed in self.tensors for segment in placed.seal(0))
        for offset, data in self.fixed:
            found, wanted = bytearray(os.pread(descriptor, len(data), offset)), bytearray(data)
            for place, seal in seals[bisect_left(seals, (offset,)) : bisect_right(seals, (offset + len(data),))]:
                within = slice(place - offset, place - offset + len(seal))
                found[within] = wanted[within] = seal
            if found != wanted:
                return False
        return True


def _is_sealed(descriptor: int, placed: Placed) -> bool:
    """Whether a file holds a whole tensor: its bytes have the checksum of its seal."""
    if not any(any(os.pread(descriptor, len(data), offset).strip()) for offset, data in placed.seal(0)):
        return False  # so that nothing is read of what was not written
    checksum, place, left = 0, placed.offset, placed.tensor.info.nbytes
    while left:
        block = os.pread(descriptor, min(left, CHUNK_BYTES), place)
        if not block:
            return False
        checksum, place, left = crc32(block, checksum), place + len(block), left - len(block)
    return all(os.pread(descriptor, len(data), offset) == data for offset, data in placed.seal(checksum))


def write_files(files: Sequence[TensorFile], on_progress: OnProgress = no_progress) -> None:
    """Write files into a directory that exists, one after another; those that an earlier run began are continued.

    While one block of bytes is written, a thread reads or computes the next. Progress is reported after each block.

    Raises:
        ConvertError: A tensor cannot be read, is damaged, or is not as announced.
        OSError: The disk is full, or cannot be written.
    """
    left: list[tuple[TensorFile, list[Placed]]] = []
    for file in files:
        finished = file.begin()
        if missing := [placed for placed in file.tensors if placed.tensor.info.name not in finished]:
            left.append((file, missing))
    pending = [placed for _, tensors in left for placed in tensors]
    total = sum(placed.tensor.info.nbytes for file in files for placed in file.tensors)
    done = total - sum(placed.tensor.info.nbytes for placed in pending)
    on_progress(done, total)
    with TensorReader() as reader, closing(_read_ahead(reader, pending)) as blocks, _background_flushing() as flush:
        for file, tensors in left:
            with file.open() as output:
                for placed in tensors:
                    checksum, offset, end = 0, placed.offset, placed.offset + placed.tensor.info.nbytes
                    while offset < end:
                        block = next(blocks)
                        checksum = crc32(block, checksum)
                        write_at(output.fileno(), block, offset)
                        offset += len(block)
                        done += len(block)
                        flush(output.fileno(), len(block))
                        on_progress(done, total)
                    for segment in placed.seal(checksum):
                        write_at(output.fileno(), memoryview(segment.data), segment.offset)
        reader.finish()


def _read_ahead(reader: TensorReader, tensors: Iterable[Placed]) -> Generator[memoryview, None, None]:
    """The tensors' bytes in blocks, each of one tensor and valid until the next. A thread fills the next meanwhile."""
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
    filled = _blocks(reader, tensors, buffers)
    with ThreadPoolExecutor(1, thread_name_prefix="read_ahead") as beside:
        ahead: Future[memoryview | None] = beside.submit(next, filled, None)
        while (block := ahead.result()) is not None:
            ahead = beside.submit(next, filled, None)
            yield block


def _blocks(reader: TensorReader, tensors: Iterable[Placed], buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    number = 0
    for placed in tensors:
        info, tensor = placed.tensor.info, placed.tensor.load()
        if (tensor.dtype, tensor.shape) != (info.dtype, info.shape):
            raise ValueError(f"{info.name} must be {info.dtype} {info.shape}, not {tensor.dtype} {tensor.shape}")
        stream, left = reader.stream(tensor), info.nbytes
        while left:
            number += 1
            buffer = buffers[number % len(buffers)][: min(left, CHUNK_BYTES)]
            left -= stream.fill(buffer)
            yield buffer


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all bytes: one system call writes 2 GiB at most, and less on a disk that is nearly full."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextmanager
def _background_flushing() -> Iterator[Callable[[int, int], None]]:
    """A function to be called with a file's descriptor and the bytes written to it: now and then it starts a flush.

    Everything is flushed at the end anyway; begun early, the flush takes no extra time.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="flush") as beside:
        running: Future[None] | None = None
        unflushed = 0

        def flush(descriptor: int, nbytes: int) -> None:
            nonlocal unflushed, running
            unflushed += nbytes
            if unflushed >= _FLUSH_BYTES and (running is None or running.done()):
                running, unflushed = beside.submit(_flush, os.dup(descriptor)), 0

        yield flush


def _flush(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # as after reading
    finally:
        os.close(descriptor)
