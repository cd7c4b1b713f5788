"""Checksums (CRC-32) of what is written and read. No torch here."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK_BYTES = 2**24
_LARGE_BYTES = 2**22


def write_checked(data: memoryview, write: Callable[[memoryview], Any], checksum: int = 0) -> int:
    """Write bytes; the checksum of a large block is computed meanwhile, so that it takes no time of its own.

    Args:
        data: The bytes.
        write: Writes all of them.
        checksum: Of what was written before.

    Returns:
        The checksum of what was written so far.
    """
    if data.nbytes < _LARGE_BYTES:
        write(data)
        return zlib.crc32(data, checksum)
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(zlib.crc32, data, checksum)
        write(data)
    return found.result()


def file_checksum(path: Path) -> int:
    """The checksum of a whole file.

    Raises:
        OSError: It cannot be read.
    """
    checksum, buffer = 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum
