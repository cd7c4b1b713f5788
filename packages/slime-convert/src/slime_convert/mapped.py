"""Bytes of files as tensors, mapped into memory: what is only passed on or checked is never copied.

Filling new memory costs more than copying does, since the system has to clear each page of it first.
"""

from __future__ import annotations

import mmap
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
    skipped = first % mmap.ALLOCATIONGRANULARITY
    length = skipped + count * dtype.itemsize
    pages = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=first - skipped)
    pages.madvise(mmap.MADV_WILLNEED)  # read ahead further than the system would by itself
    data = torch.frombuffer(pages, dtype=torch.uint8, offset=skipped)
    # Compiled code may rely on elements lying at multiples of their size; other programs' files need not have them so.
    return (data.clone() if first % dtype.itemsize else data).view(dtype)
