"""A file that is one JSON array, read element by element in bounded memory, from any element on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO

from slime_core.errors import DataError

BOM = b"\xef\xbb\xbf"
_AT_ONCE = 1 << 16  # bytes that are read at once
# Whole strings, so that brackets in them do not count; a quote alone begins a string that goes on behind what was read.
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{},]', re.DOTALL)


def is_array(stream: IO[bytes], *, most: int) -> bool:
    """Whether the first character of a stream, after a byte order mark and white space, opens an array.

    It is looked for in the first ``most`` bytes.
    """
    read = stream.read(_AT_ONCE)
    first = read.removeprefix(BOM).lstrip()
    while read and not first and stream.tell() < most:
        read = stream.read(_AT_ONCE)
        first = read.lstrip()
    return first.startswith(b"[")


def array_items(
    stream: IO[bytes], *, offset: int, row: int, longest: int, name: str
) -> Iterator[tuple[int, int, bytes]]:
    """The elements behind an offset: number from 1, the offset behind the element and its comma, its text.

    Args:
        offset: Bytes before the first element to give; 0 for the first of all.
        row: Elements before it.
        longest: Bytes of an element at most.
        name: The file's, for messages.

    Raises:
        DataError: An element is too long, the array has no end, or something follows it. What an element holds is not
            looked at.
    """
    stream.seek(offset)
    held, at = b"", 0  # what was read from the offset on, and where in it the next element begins

    def read_more() -> None:
        nonlocal held, offset, at
        read = stream.read(max(_AT_ONCE, len(held) - at))  # ever more: the element is scanned again from its beginning
        if not read:
            raise DataError(f"{name} is damaged or cut off: its JSON array has no end; write it again")
        held, offset, at = held[at:] + read, offset + at, 0

    if offset == 0:
        while b"[" not in held:
            read_more()
        at = held.index(b"[") + 1
    while True:
        while (end := _element_end(held, at)) is None:
            if len(held) - at > longest:
                raise DataError(f"{name}, row {row + 1}: over {longest >> 20} MiB long; is this an array of rows?")
            read_more()
        item, closes = held[at:end].strip(), held[end] == ord("]")
        at = end if closes else end + 1
        if item or not closes:  # nothing before the end: an empty array, or behind its last element
            row += 1
            yield row, offset + at, item
        if closes:
            if (held[end + 1 :] + stream.read(_AT_ONCE)).strip():
                raise DataError(f"{name}: something follows its JSON array; write one array, or one object a line")
            return


def _element_end(text: bytes, start: int) -> int | None:
    """Where the comma or bracket behind the element that begins at ``start`` is; None if that was not read yet."""
    depth = 0
    for match in _TOKEN.finditer(text, start):
        token = match[0]
        if token == b'"':
            return None
        if token in (b"[", b"{"):
            depth += 1
        elif depth and token in (b"]", b"}"):
            depth -= 1
        elif not depth and token in (b",", b"]"):
            return match.start()
    return None
