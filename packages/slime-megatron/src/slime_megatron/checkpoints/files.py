"""The files that a rank writes of a ``torch_dist`` checkpoint: torch's format, straight from the tensors to the disk.

torch's own writer pickles every tensor into a buffer and goes by way of the page cache, where the kernel first clears a
page for each 4 KiB and then holds the writer back until older ones are written. Here blocks of some MiB are filled from
the tensors and written past that cache, several at a time, where the file system can.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from slime_convert.formats.torch_file import tensor_archive

BLOCK_BYTES = 8 * 2**20
_BLOCKS = 3
"""One is filled while two are written."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_ALIGNMENT = 4096
"""Alignment of writes past the page cache; no file system in use asks for more."""

Reading = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]


class DirectWriter(FileSystemWriter):
    """torch's writer of checkpoints, with another way to write the file of each rank.

    ``reading`` gives a tensor in host memory, which does not change while its block runs.
    """

    def __init__(self, directory: str | Path, reading: Reading) -> None:
        super().__init__(directory)
        self._reading = reading

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's file, and wait until it is on the disk."""
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        with NewFile(Path(self.path) / name) as file:
            results = [self._write(file, name, item, planner.resolve_data(item)) for item in plan.items]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def _write(self, file: NewFile, name: str, item: WriteItem, data: torch.Tensor | io.BytesIO) -> WriteResult:
        offset = file.nbytes
        if isinstance(data, torch.Tensor):
            with self._reading(data) as tensor:
                _write_tensor(file, tensor)
        else:
            file.write(np.frombuffer(data.getbuffer(), np.uint8))
        length = file.nbytes - offset
        return WriteResult(item.index, length, _StorageInfo(name, offset, length))


def _write_tensor(file: NewFile, tensor: torch.Tensor) -> None:
    """Write what ``torch.save`` makes of a tensor in host memory."""
    tensor = tensor.detach().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = memory_of(tensor)
    head, tail = tensor_archive(dtype, tuple(tensor.shape), tensor.nbytes).around(values.data)
    for part in (np.frombuffer(head, np.uint8), values, np.frombuffer(tail, np.uint8)):
        file.write(part)


def memory_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor's memory. ``Tensor.numpy`` would leave its storage one that cannot be emptied while a trainer sleeps."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), np.uint8)


class NewFile:
    """A new file that is written from its beginning to its end, and on the disk when the block is left.

    Raises:
        OSError: The disk is full, or cannot be written; from any call, for an earlier block too.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:  # what a file system says that cannot do it
                raise
            self._descriptor = os.open(path, flags, 0o666)
        self._memory = mmap.mmap(-1, _BLOCKS * BLOCK_BYTES)  # begins at a page
        whole = np.frombuffer(self._memory, np.uint8)
        self._blocks = [whole[start : start + BLOCK_BYTES] for start in range(0, len(whole), BLOCK_BYTES)]
        self._beside = ThreadPoolExecutor(_BLOCKS - 1, thread_name_prefix="write")
        self._pending: deque[Future[None]] = deque()
        self.nbytes = 0

    def write(self, data: NDArray[np.uint8]) -> None:
        """Add bytes, which may change once this has returned."""
        while len(data):
            place = self.nbytes % BLOCK_BYTES
            part, data = data[: BLOCK_BYTES - place], data[BLOCK_BYTES - place :]
            self._block[place : place + len(part)] = part
            self.nbytes += len(part)
            if self.nbytes % BLOCK_BYTES == 0:
                self._send(self._blocks[(self.nbytes // BLOCK_BYTES - 1) % _BLOCKS], self.nbytes - BLOCK_BYTES)

    @property
    def _block(self) -> NDArray[np.uint8]:
        """The one that is filled now."""
        return self._blocks[self.nbytes // BLOCK_BYTES % _BLOCKS]

    def _send(self, block: NDArray[np.uint8], offset: int) -> None:
        """Have a block written; the one that is filled next is free afterwards."""
        self._pending.append(self._beside.submit(self._write_at, block.data, offset))
        while len(self._pending) > _BLOCKS - 1:
            self._pending.popleft().result()

    def _write_at(self, block: memoryview, offset: int) -> None:
        is_refused = False
        while block:
            try:
                count = os.pwrite(self._descriptor, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or is_refused:
                    raise
                is_refused = True
                self._use_cache()
                continue
            block, offset = block[count:], offset + count

    def _use_cache(self) -> None:
        """Go by way of the page cache from now on: the file system opens files for the other way, and refuses it."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)

    def _finish(self) -> None:
        if rest := self.nbytes % BLOCK_BYTES:
            self._send(self._block[: rest + -rest % _ALIGNMENT], self.nbytes - rest)
        while self._pending:
            self._pending.popleft().result()
        os.ftruncate(self._descriptor, self.nbytes)
        os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            self._beside.shutdown()
            os.close(self._descriptor)
