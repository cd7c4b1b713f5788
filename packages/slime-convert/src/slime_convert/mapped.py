"""Bytes of files as tensors, mapped into memory: what is only passed on or checked is never copied.

Filling new memory costs more than copying does, since the system has to clear each page of it first.
"""

from __future__ import annotations

import mmap
import os
from typing import BinaryIO

import torch
from torch import Tensor


def map_tensor(file: BinaryIO, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """A tensor of one axis that lies in a file. What is written into it does not reach the file.

    The pages that were looked at count as this process's until the tensor is gone. The file must not become shorter
    meanwhile: the system ends a process that looks at a page which is no more (SIGBUS).

    Args:
        file: It may be closed afterwards.
        first: Where the tensor begins, in bytes from the file's beginning.
        count: Elements.
        dtype: Their type.

    Raises:
        ValueError: The file ends before.
        OSError: It cannot be mapped.
    """
    if not count:
        return torch.empty(0, dtype=dtype)
    if first % dtype.itemsize:
        # Compiled code may rely on elements lying at multiples of their size; not every program's files have them so.
        read = torch.empty(count, dtype=dtype)
        _fill(file.fileno(), first, read.view(torch.uint8).numpy().data)
        return read
    skipped = first % mmap.ALLOCATIONGRANULARITY
    length = skipped + count * dtype.itemsize
    pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=first - skipped)
    pages.madvise(mmap.MADV_WILLNEED)  # read ahead further than the system would by itself
    return torch.frombuffer(pages, dtype=dtype, offset=skipped)


def _fill(descriptor: int, first: int, target: memoryview) -> None:
    """One call of the system reads 2 GiB at most."""
    while target:
        count = os.preadv(descriptor, [target], first)
        if not count:
            raise ValueError("the file is cut off")
        target, first = target[count:], first + count
