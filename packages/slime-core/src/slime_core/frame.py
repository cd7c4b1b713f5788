"""Bytes that say what they are: a magic, a format version, a JSON head, a binary body, and a checksum over all of it.

Layout, little-endian: magic (4 bytes), version (u16), zero (u16), length of the head (u64), length of the body (u64),
CRC-32 (u32) over what precedes it and over head and body, then the head as UTF-8 JSON, then the body. Reading builds
numbers, strings, lists and dictionaries and nothing else, whatever the bytes are.
"""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

from slime_core.errors import DamagedError, DataError, FormatVersionError

_HEADER = struct.Struct("<4sHHQQ")
_CRC = struct.Struct("<I")
_START = _HEADER.size + _CRC.size
_SCALARS = {str, int, float, bool, type(None)}
# Python's own limit for JSON is near 1000 and depends on the caller; what was written must be readable anywhere.
_MOST_LEVELS = 100


def pack_frame(magic: bytes, version: int, head: dict[str, Any], body: bytes) -> bytes:
    """Put a frame together.

    Args:
        magic: Four bytes that name the kind of content.
        version: Version of the content's format, 0 to 65,535.
        head: Plain values, as :func:`check_plain` wants them.
        body: Anything.

    Raises:
        DataError: The head is not plain, so it would not come back as it is.
    """
    check_plain(head, "head")
    try:
        # Surrogates pass as they are: JSON's own escapes would join two lone ones into one character.
        text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except ValueError as error:  # an integer of more digits than Python prints
        raise DataError(
            f"a value does not fit JSON ({error}); keep it out of the metadata, or store it as text"
        ) from None
    start = _HEADER.pack(magic, version, 0, len(text), len(body))
    return b"".join((start, _CRC.pack(_checksum(start, text, body)), text, body))


def unpack_frame(data: bytes | memoryview, magic: bytes, version: int, what: str) -> tuple[dict[str, Any], memoryview]:
    """Take a frame apart after checking it.

    Args:
        data: What :func:`pack_frame` gave.
        magic: As given to :func:`pack_frame`.
        version: The newest version that the caller reads; it reads all older ones, from 1.
        what: Name of the content, for errors.

    Returns:
        The head and the body.

    Raises:
        FormatVersionError: The format version is none that the caller reads.
        DamagedError: Anything else is wrong with the bytes.
    """
    view = memoryview(data).cast("B")
    if len(view) < _START:
        raise DamagedError(f"{what}: {len(view)} bytes, but its head alone has {_START}; get the bytes again")
    found, made, _, head_size, body_size = _HEADER.unpack_from(view)
    if found != magic:
        raise DamagedError(f"{what}: starts with {found!r} instead of {magic!r}; these bytes are something else")
    if not 1 <= made <= version:
        raise FormatVersionError(f"{what}: format version {made}; this slime reads 1 to {version}; update the reader")
    if len(view) != _START + head_size + body_size:
        raise DamagedError(
            f"{what}: {len(view)} bytes, its head says {_START + head_size + body_size}; get the bytes again"
        )
    text, body = view[_START : _START + head_size], view[_START + head_size :]
    if _CRC.unpack_from(view, _HEADER.size)[0] != _checksum(view[: _HEADER.size], text, body):
        raise DamagedError(f"{what}: its checksum does not match, so bytes were altered; get them again")
    try:
        head = json.loads(bytes(text).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{what}: its head is not JSON ({error}); get the bytes again") from None
    if not isinstance(head, dict):
        raise DamagedError(f"{what}: its head is a {type(head).__name__} instead of an object; get the bytes again")
    return head, body


def check_plain(value: Any, path: str) -> None:
    """Check that a value survives JSON: ``None``, booleans, numbers, strings, lists, and dictionaries with string keys.

    Args:
        value: What to check, through all levels.
        path: Name of the value, for errors: ``metadata`` gives ``metadata.tools[2]``.

    Raises:
        DataError: Naming the place and the type, for a tuple too, which JSON would turn into a list; or the value has
            more than 100 levels, as one that holds itself has.
    """
    _check_plain(value, path, _MOST_LEVELS)


def _check_plain(value: Any, path: str, levels: int) -> None:
    if value is None or isinstance(value, str | int | float):
        return
    if not levels:
        raise DataError(f"{path} is nested too deeply (over {_MOST_LEVELS} levels), or holds itself; make it flatter")
    if isinstance(value, list):
        if set(map(type, value)) <= _SCALARS:  # long lists of numbers, such as token ids
            return
        for place, item in enumerate(value):
            _check_plain(item, f"{path}[{place}]", levels - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"{path} has the key {key!r} of type {type(key).__name__}; keys must be strings")
            _check_plain(item, f"{path}.{key}", levels - 1)
    else:
        raise DataError(
            f"{path} is a {type(value).__name__}; allowed: None, bool, int, float, str, list, dict with string keys"
        )


def _checksum(*parts: bytes | memoryview) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc
