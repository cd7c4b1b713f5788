"""The safetensors format: headers read and checked, files laid out for writing.

A file is 8 bytes of length (little endian), that many bytes of JSON, then the tensors; the JSON has type, shape and
offsets from its end of each, and texts in ``__metadata__`` (safetensors documentation, "Format"). Files written here
have ``crc32`` there: tensors' CRC-32 in the order in which they lie, 8 hexadecimal digits each, blanks until written.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slime_convert.errors import HfConfigError, WeightError
from slime_convert.files import file_inside, open_file, read_json, refuse_missing
from slime_convert.files.tensors import ITEM_BYTES, LazyTensor, StoredBytes, TensorInfo
from slime_convert.files.writing import NewTensor, Placed, Segment, TensorFile

INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model"
"""How names of PEFT's files of an adapter begin."""

DEFAULT_SHARD_BYTES = 5 * 2**30
CHECKSUMS = "crc32"
_DIGITS = 8
_BLANK = " " * _DIGITS
_SLOTS = f'"{CHECKSUMS}":"'.encode()
_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library
TORCH_NAMES = {
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool", "C64": "complex64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
}
"""Torch's names of the element types that the safetensors format has."""
_NAMES = {name: kind for kind, name in TORCH_NAMES.items()}


class Entry(NamedTuple):
    """A tensor in a file, where its bytes lie there, and their CRC-32 if the file has it."""

    info: TensorInfo
    path: Path
    offset: int
    checksum: int | None = None

    def tensor(self) -> LazyTensor:
        """The tensor, to be read."""
        place = StoredBytes(self.path, self.offset, self.info.nbytes, self.info.name, self.checksum, HfConfigError)
        return LazyTensor.stored(self.info.dtype, self.info.shape, place)


def read_directory(directory: Path) -> dict[str, Entry]:
    """The tensors of a Hugging Face directory, by name, file after file.

    Raises:
        HfConfigError: The files are missing, cut off, damaged or outside the directory, or two hold one weight.
    """
    if not (directory / INDEX).exists():
        files = sorted(path.name for path in directory.glob("*.safetensors"))
        # The directory of a model may also hold a LoRA adapter for it.
        files = [name for name in files if not name.startswith(ADAPTER)] or files
        if not files:
            raise HfConfigError(f"{directory} has no *.safetensors; give a Hugging Face directory with such weights")
        return _joined(read_header(directory, file) for file in files)
    listed = _read_index(directory)
    files = sorted(set(listed.values()))
    refuse_missing(directory, files, INDEX, HfConfigError)
    # Of a weight that lies in several files, the one that the index names is used.
    entries = _joined(
        {name: entry for name, entry in read_header(directory, file).items() if listed.get(name, file) == file}
        for file in files
    )
    if lost := sorted(listed.keys() - entries.keys()):
        what = f"which does not hold it ({len(lost)} such weights); fetch the model again"
        raise HfConfigError(f"{directory / INDEX} names {lost[0]} in {listed[lost[0]]}, {what}")
    return entries


def _read_index(directory: Path) -> dict[str, str]:
    listed = read_json(directory, INDEX, HfConfigError, "fetch the model again").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise HfConfigError(f"cannot read {directory / INDEX} (its weight_map must name files); fetch the model again")
    return listed


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


def read_header(directory: Path, name: str) -> dict[str, Entry]:
    """The tensors of one safetensors file of a directory, in the order in which they lie there.

    A :class:`HfConfigError` if it cannot be read, is cut off, lies elsewhere, or is not a safetensors file.
    """
    shown, path = directory / name, file_inside(directory, name, HfConfigError)
    try:
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length), object_pairs_hook=_compact)
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        metadata = header.pop("__metadata__", None)
        entries = [_entry(shown, 8 + length, *item) for item in header.items()]
        entries.sort(key=lambda entry: (entry.offset, entry.info.nbytes))
        _check_places(entries, 8 + length, size)
    except (OSError, ValueError, struct.error, TypeError, RecursionError) as error:
        raise HfConfigError(f"cannot read {shown} ({error}); fetch the model again") from error
    return {entry.info.name: entry for entry in _with_checksums(shown, entries, metadata)}


def _check_places(entries: Sequence[Entry], begin: int, size: int) -> None:
    """Refuse a file whose tensors, in the order in which they lie there, leave gaps, overlap or do not fill it."""
    needed = max((entry.offset + entry.info.nbytes for entry in entries), default=begin)
    if size < needed:
        raise ValueError(f"it is cut off: it has {size} of {needed} bytes")
    for entry in entries:
        if entry.offset != begin:
            raise ValueError(f"{entry.info.name} overlaps another, or follows a gap")
        begin += entry.info.nbytes
    if size > begin:
        raise ValueError(f"{size - begin} bytes follow its tensors")


def _compact(pairs: list[tuple[str, Any]]) -> Any:
    """A JSON object; one that describes a tensor as a tuple, so that a header takes little more than its bytes."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice in its header")
    if found.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = found["dtype"], found["shape"], found["data_offsets"]
        if isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2:
            return TORCH_NAMES.get(dtype, dtype), tuple(shape), *offsets
    return found


def _entry(path: Path, start: int, name: str, item: Any) -> Entry:
    if not isinstance(item, tuple):
        raise ValueError(f"{name} is not described by dtype, shape and two data_offsets")
    dtype, shape, first, end = item
    if not all(type(number) is int and 0 <= number < 2**60 for number in (*shape, first, end)) or end < first:
        raise ValueError(f"{name} has shape {shape} and offsets {first} to {end}")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - first:
        raise ValueError(f"{name} of type {dtype} and shape {shape} has {end - first} bytes")
    return Entry(TensorInfo(name, dtype, shape, end - first), path, start + first)


def _with_checksums(path: Path, entries: Sequence[Entry], metadata: Any) -> Iterator[Entry]:
    """The entries of a file, in the order in which they lie there, with the checksums in its metadata."""
    found = metadata.get(CHECKSUMS) if isinstance(metadata, dict) else None
    if not isinstance(found, str) or not re.fullmatch(rf"([0-9a-f]{{8}}|{_BLANK}){{{len(entries)}}}", found):
        yield from entries  # another program's
        return
    texts = [found[first : first + _DIGITS] for first in range(0, len(found), _DIGITS)]
    if missing := texts.count(_BLANK):
        what = f"{missing} of its {len(texts)} weights are not written; run the interrupted conversion again"
        raise HfConfigError(f"{path} is unfinished: {what}")
    for entry, text in zip(entries, texts, strict=True):
        yield entry._replace(checksum=int(text, 16))


def shard_files(
    directory: Path, tensors: Sequence[NewTensor], max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> tuple[list[TensorFile], str | None]:
    """Weights, in the order in which they are best written, as ``model.safetensors`` or as numbered shards.

    A file has ``max_shard_bytes`` of tensors at most, or a single larger one. The text is the index of several files.
    """
    for info in (tensor.info for tensor in tensors):
        if info.dtype not in _NAMES:
            allowed = f"allowed: {', '.join(_NAMES)}; use a model without it"
            raise WeightError(f"{info.name} has type {info.dtype}, which cannot be written; {allowed}")
    shards: list[list[NewTensor]] = [[]]
    room = max_shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.info.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.info.nbytes
    if len(shards) == 1:
        return [_new_file(directory / "model.safetensors", tensors)], None
    named = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    file_of = {tensor.info.name: name for name, shard in named.items() for tensor in shard}
    total = sum(tensor.info.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    files = [_new_file(directory / name, shard) for name, shard in named.items()]
    return files, json.dumps(index, indent=2, sort_keys=True)


def _new_file(path: Path, tensors: Sequence[NewTensor]) -> TensorFile:
    # Larger elements first, as the library does it: then every tensor lies where its type may be read from memory.
    in_file = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.info.dtype])
    header = _header([tensor.info for tensor in in_file])
    slot, end = header.index(_SLOTS) + len(_SLOTS), len(header)
    placed: dict[str, Placed] = {}
    for tensor in in_file:
        placed[tensor.info.name] = Placed(tensor, end, partial(_seal, slot))
        slot, end = slot + _DIGITS, end + tensor.info.nbytes
    return TensorFile(path, end, [Segment(0, header)], [placed[tensor.info.name] for tensor in tensors])


def _seal(slot: int, checksum: int) -> list[Segment]:
    return [Segment(slot, b"%08x" % checksum)]


def _header(infos: Sequence[TensorInfo]) -> bytes:
    """Length and JSON of a file with some tensors, in the order in which they lie there; checksums blank."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", CHECKSUMS: _BLANK * len(infos)}}
    end = 0
    for info in infos:
        first, end = end, end + info.nbytes
        header[info.name] = {"dtype": _NAMES[info.dtype], "shape": info.shape, "data_offsets": (first, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
