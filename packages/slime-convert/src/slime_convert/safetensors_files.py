"""Headers of safetensors files and the shards of a Hugging Face directory, checked for completeness. No torch here.

The format: 8 bytes of length (little endian), that many bytes of JSON, then the tensors; the JSON gives type, shape and
offsets, counted from the JSON's end, of each (safetensors documentation, "Format"). Its ``__metadata__`` holds any
texts; files that are written here have there ``crc32``: the CRC-32 of each tensor's bytes in the order in which they
lie, as 8 hexadecimal digits, or 8 blanks for a tensor that is not written yet.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_convert.checkpoint import ITEM_BYTES
from slime_convert.errors import HfConfigError

INDEX = "model.safetensors.index.json"
CHECKSUMS = "crc32"
CHECKSUM_DIGITS = 8
BLANK = " " * CHECKSUM_DIGITS
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""Torch's names of the element types that the safetensors format has."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        path: The file.
        offset: Of its first byte in the file.
        dtype: Torch's name of the element type.
        shape: Its shape.
        nbytes: Bytes of its elements.
        checksum: CRC-32 of these bytes, if the file has it.
    """

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    checksum: int | None = None

    def check(self, name: str, data: memoryview) -> None:
        """Compare the tensor's bytes with its checksum, if it has one.

        Raises:
            HfConfigError: They are not those that were written.
        """
        if self.checksum is not None and zlib.crc32(data) != self.checksum:
            raise HfConfigError(
                f"{self.path} is damaged: the checksum of {name} is wrong; convert or fetch the model again; or, if "
                f"another program changed the weights and kept the __metadata__, save it without {CHECKSUMS} there"
            )


def read_directory(directory: str | Path) -> dict[str, Entry]:
    """The tensors of a Hugging Face directory, by name, file after file.

    Raises:
        HfConfigError: There are no safetensors files, or one is missing, cut off or damaged, or two hold one weight.
    """
    root = Path(directory)
    listed = _read_index(root / INDEX) if (root / INDEX).is_file() else None
    if listed is None:
        paths = sorted(root.glob("*.safetensors"))
        if not paths:
            raise HfConfigError(f"{root} has no *.safetensors; give a Hugging Face directory with safetensors weights")
        return _joined(read_header(path) for path in paths)
    files = sorted(set(listed.values()))
    gone = [file for file in files if not (root / file).is_file()]
    if gone:
        raise HfConfigError(
            f"{len(gone)} of the {len(files)} files that {root / INDEX} names are missing, such as {gone[0]}; "
            "fetch the model again"
        )
    # Of a weight that lies in several files, the one that the index names counts.
    entries = _joined(
        {name: entry for name, entry in read_header(root / file).items() if listed.get(name, file) == file}
        for file in files
    )
    lost = sorted(set(listed) - set(entries))
    if lost:
        raise HfConfigError(
            f"{root / INDEX} names {lost[0]} in {listed[lost[0]]}, which does not hold it ({len(lost)} such weights); "
            "fetch the model again"
        )
    return entries


def _joined(files: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        if twice := entries.keys() & file.keys():
            name = min(twice)
            raise HfConfigError(
                f"{name} is in {entries[name].path} and in {file[name].path} ({len(twice)} such weights); "
                f"keep the files of one model, or the {INDEX} that names them"
            )
        entries |= file
    return entries


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, in the order in which they lie there.

    Raises:
        HfConfigError: The file cannot be read, is cut off, or is no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        start = 8 + length
        entries = {name: _entry(path, start, name, item) for name, item in header.items() if name != "__metadata__"}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HfConfigError(f"cannot read {path} ({error}); fetch the model again") from error
    needed = max((entry.offset + entry.nbytes for entry in entries.values()), default=start)
    if size < needed:
        raise HfConfigError(f"{path} is cut off: it has {size} of {needed} bytes; fetch the model again")
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    for name, entry in ordered.items():
        if entry.offset != start:  # where the one before ended
            raise HfConfigError(
                f"cannot read {path} ({name} overlaps another, or follows a gap); fetch the model again"
            )
        start += entry.nbytes
    if size > start:
        raise HfConfigError(f"cannot read {path} ({size - start} bytes follow its tensors); fetch the model again")
    return _with_checksums(path, ordered, header.get("__metadata__"))


def _with_checksums(path: Path, entries: Mapping[str, Entry], metadata: Any) -> dict[str, Entry]:
    """The entries of a file, given in the order in which they lie there, with the checksums of its metadata."""
    found = metadata.get(CHECKSUMS) if isinstance(metadata, dict) else None
    if not isinstance(found, str) or not re.fullmatch(rf"([0-9a-f]{{8}}|{BLANK}){{{len(entries)}}}", found):
        return dict(entries)  # another program's
    texts = [found[first : first + CHECKSUM_DIGITS] for first in range(0, len(found), CHECKSUM_DIGITS)]
    if BLANK in texts:
        raise HfConfigError(
            f"{path} is unfinished: {texts.count(BLANK)} of its {len(texts)} weights are not written; "
            "run the conversion that was interrupted again"
        )
    return {
        name: replace(entry, checksum=int(text, 16)) for (name, entry), text in zip(entries.items(), texts, strict=True)
    }


def _entry(path: Path, start: int, name: str, item: Any) -> Entry:
    shape = tuple(item["shape"])
    first, end = item["data_offsets"]
    dtype = TORCH_NAMES.get(item["dtype"], str(item["dtype"]))
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, end - first)):
        raise ValueError(f"{name} has shape {shape} and offsets {first} to {end}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - first:
        raise ValueError(f"{name} of type {item['dtype']} and shape {shape} has {end - first} bytes")
    return Entry(path, start + first, dtype, shape, end - first)


def _read_index(path: Path) -> dict[str, str]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(file, str) for file in listed.values()):
            raise ValueError("weight_map must name files")
        return dict(listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HfConfigError(f"cannot read {path} ({error!r}); fetch the model again") from error
