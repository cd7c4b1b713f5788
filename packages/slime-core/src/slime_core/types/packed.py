"""Samples and batches as bytes, without pickle.

A frame of :mod:`slime_core.frame` with the magic ``SLMS`` (a sample) or ``SLMB`` (a batch). A sample's head holds
``fields``, which JSON carries, and ``arrays``, a list of [field, item type, number of items] in the order in which the
body holds their items, little-endian and without gaps. An item type is a letter (unsigned, integer, float) and a number
of bytes: ``u1``, ``i1``, ``u2``, ``i2``, ``u4``, ``i4``, ``i8``, ``f4``, ``f8``; it is the first of these that holds
every value to the last bit. A list with an integer beyond 64 bits stays in ``fields``. A batch's body is its samples'
frames one after the other; its head says how long each is.
"""

from __future__ import annotations

import array
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from slime_core.errors import DamagedError
from slime_core.frame import check_plain, pack_frame, unpack_frame
from slime_core.types.sample import Sample

if TYPE_CHECKING:
    from slime_core.types.rollout import RolloutBatch

FORMAT_VERSION = 1
SAMPLE_MAGIC = b"SLMS"
BATCH_MAGIC = b"SLMB"

_INTEGER_LISTS = ("tokens", "loss_mask", "weight_versions")
_NUMBER_LISTS = ("rollout_log_probs", "teacher_log_probs")
_TYPE_CODES = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "i8": "q", "f4": "f", "f8": "d"}
# Smallest first, as (type, least value, value past the largest). Tokens of no engine have the version -1.
_INTEGER_RANGES = tuple(
    (f"{sign}{size}", -(2 ** (8 * size - 1)) * (sign == "i"), 2 ** (8 * size - (sign == "i")))
    for size, sign in ((1, "u"), (1, "i"), (2, "u"), (2, "i"), (4, "u"), (4, "i"), (8, "i"))
)


def pack_sample(sample: Sample) -> bytes:
    """A sample as bytes.

    Raises:
        DataError: A field is invalid, or holds a value that would not come back as it is.
    """
    sample.validate()
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
    arrays, body = [], []
    for name in _INTEGER_LISTS + _NUMBER_LISTS:
        values = fields[name]
        kind = None if values is None else _number_kind(values) if name in _NUMBER_LISTS else _integer_kind(values)
        if kind is not None:
            arrays.append([name, kind, len(values)])
            body.append(_to_little_endian(array.array(_TYPE_CODES[kind], fields.pop(name))).tobytes())
    fields["status"] = sample.status.value
    for name in ("prompt", "metadata", "train_metadata"):
        check_plain(fields[name], f"sample {sample.index}: {name}")
    return pack_frame(SAMPLE_MAGIC, FORMAT_VERSION, {"fields": fields, "arrays": arrays}, b"".join(body))


def unpack_sample(data: bytes | memoryview) -> Sample:
    """The reverse of :func:`pack_sample`.

    Raises:
        FormatVersionError: The bytes are of another format version.
        DamagedError: They were cut off or altered, or are something else.
        DataError: A field is invalid.
    """
    head, body = unpack_frame(data, SAMPLE_MAGIC, FORMAT_VERSION, "a packed sample")
    fields, arrays = head.get("fields"), head.get("arrays")
    if not isinstance(fields, dict) or not isinstance(arrays, list):
        raise DamagedError("a packed sample: its head lacks fields or arrays; pack it again")
    for entry in arrays:
        name, values, body = _read_array(entry, body)
        fields[name] = values
    if body:
        raise DamagedError(f"a packed sample: {len(body)} bytes more than its arrays have; pack it again")
    return Sample.from_dict(fields)


def pack_batch(batch: RolloutBatch) -> bytes:
    """A batch as bytes.

    Raises:
        DataError: A field is invalid, or holds a value that would not come back as it is.
    """
    batch.validate()
    packed = [pack_sample(sample) for sample in batch.samples]
    head = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.name != "groups"}
    check_plain(head, "rollout")
    sizes = {"group_sizes": [len(group) for group in batch.groups], "sample_bytes": [len(sample) for sample in packed]}
    return pack_frame(BATCH_MAGIC, FORMAT_VERSION, {"fields": head, **sizes}, b"".join(packed))


def unpack_batch(data: bytes | memoryview) -> RolloutBatch:
    """The reverse of :func:`pack_batch`.

    Raises:
        FormatVersionError: The bytes are of another format version.
        DamagedError: They were cut off or altered, or are something else.
        DataError: A field is invalid.
    """
    from slime_core.types.rollout import RolloutBatch

    head, body = unpack_frame(data, BATCH_MAGIC, FORMAT_VERSION, "a packed rollout")
    fields, groups = head.get("fields"), _counts(head, "group_sizes")
    ends = _running_sum(_counts(head, "sample_bytes"))
    names = {field.name for field in dataclasses.fields(RolloutBatch)} - {"groups"}
    if not isinstance(fields, dict) or fields.keys() != names:
        raise DamagedError(f"a packed rollout: its head must have the fields {sorted(names)}; pack it again")
    if sum(groups) != len(ends) or (ends[-1] if ends else 0) != len(body):
        raise DamagedError(f"a packed rollout: {len(ends)} samples, its head says {sum(groups)}; pack it again")
    samples = iter([unpack_sample(body[start:end]) for start, end in zip([0, *ends], ends, strict=False)])
    return RolloutBatch(groups=[[next(samples) for _ in range(size)] for size in groups], **fields)


def _integer_kind(values: list[int]) -> str | None:
    low, high = (min(values), max(values)) if values else (0, 0)
    return next((kind for kind, least, end in _INTEGER_RANGES if least <= low and high < end), None)


def _number_kind(values: list[float]) -> str:
    # A NaN equals no NaN, so that a list with one keeps all its bits in 8 bytes.
    return "f4" if array.array("f", values).tolist() == values else "f8"


def _read_array(entry: Any, body: memoryview) -> tuple[str, list[Any], memoryview]:
    try:
        name, kind, count = entry
        values = array.array(_TYPE_CODES[kind])
        known = name in (_NUMBER_LISTS if kind in ("f4", "f8") else _INTEGER_LISTS)
    except (TypeError, ValueError, KeyError):
        known, count = False, None
    if not known or type(count) is not int or not 0 <= count * values.itemsize <= len(body):
        raise DamagedError(f"a packed sample: {entry!r} is no array of its {len(body)} bytes; pack it again")
    end = count * values.itemsize
    values.frombytes(body[:end])
    return name, _to_little_endian(values).tolist(), body[end:]


def _to_little_endian(values: array.array[Any]) -> array.array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _counts(head: dict[str, Any], name: str) -> list[int]:
    values = head.get(name)
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise DamagedError(f"a packed rollout: {name} of its head must be numbers of 0 or more; pack it again")
    return values


def _running_sum(values: list[int]) -> list[int]:
    total, sums = 0, []
    for value in values:
        total += value
        sums.append(total)
    return sums
