"""The difference between two versions of a tensor, byte by byte, made and applied without loss.

A delta is a frame of :mod:`slime_core.frame` with the magic ``SLMD``. Its head holds dtype, shape, the checksums of
both versions and the number of elements per stretch. Its body holds, stretch after stretch, a 0 where nothing changed
or a 1 and the stretch's byte planes (see :mod:`slime_core.integrity.planes`). Since a stretch is coded for itself,
memory stays small, and no delta is larger than the tensor by more than its head and some bytes per stretch.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from slime_core.errors import DamagedError, DataError, IntegrityError, WrongBaseError
from slime_core.frame import pack_frame, unpack_frame
from slime_core.integrity.bits import as_integers, dtype_name, flat, flat_chunks
from slime_core.integrity.checksum import CHECKSUM_ALGORITHM, tensor_checksum
from slime_core.integrity.planes import Reader, apply_plane, encode_plane, split_planes

FORMAT_VERSION = 1
MAGIC = b"SLMD"
_STRETCH = 2**20
_WHAT = "a delta"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaInfo:
    """What a delta says of itself.

    Attributes:
        dtype: Of both versions, such as ``bfloat16``.
        shape: Of both versions.
        base: Checksum of the version that it was made from.
        result: Checksum of the version that it leads to.
    """

    dtype: str
    shape: tuple[int, ...]
    base: str
    result: str


def encode_delta(base: Tensor, new: Tensor, *, compression_level: int = 1) -> bytes:
    """The bytes that changed between two versions of a tensor.

    Args:
        base: The version that the receiver has; any dtype and memory layout.
        new: The version that it shall have; of the same dtype and shape, on the same device.
        compression_level: zlib's, 0 (none) to 9. Places and differences are deflated one by one where it saves space.

    Returns:
        Bytes for :func:`apply_delta`. Beside them it takes less than 48 MiB of memory on a CPU, however
        large these are, and a copy of one that is not contiguous.

    Raises:
        DataError: The two don't match in dtype, shape or device, or hold no data; or there is no such level.
    """
    if not 0 <= compression_level <= 9:
        raise DataError(f"compression_level {compression_level} is not between 0 and 9")
    if (base.dtype, base.shape, base.device) != (new.dtype, new.shape, new.device):
        raise DataError(f"a delta needs two versions of one tensor, got {_describe(base)} and {_describe(new)}")
    base_N, new_N = (flat(as_integers(tensor)) for tensor in (base, new))
    head = {
        "dtype": dtype_name(base.dtype),
        "shape": list(base.shape),
        "checksum": CHECKSUM_ALGORITHM,
        "base": tensor_checksum(base),
        "result": tensor_checksum(new),
        "stretch": _STRETCH,
    }
    body = []
    for old, fresh in zip(flat_chunks(base_N, _STRETCH), flat_chunks(new_N, _STRETCH), strict=True):
        if torch.equal(old, fresh):
            body.append(b"\0")
        else:
            planes = split_planes(old, fresh)
            body += [b"\1", *(encode_plane(*plane, old.numel(), compression_level) for plane in planes)]
    return pack_frame(MAGIC, FORMAT_VERSION, head, b"".join(body))


def delta_info(delta: bytes | memoryview) -> DeltaInfo:
    """What a delta says of itself, once its own checksum is found right.

    Raises:
        FormatVersionError: It is of a format version that this slime does not know.
        DamagedError: It was cut off or altered, or is something else.
    """
    return _open(delta)[0]


def apply_delta(base: Tensor, delta: bytes | memoryview) -> Tensor:
    """The new version as a new, contiguous tensor.

    Args:
        base: The version that the delta was made from.
        delta: From :func:`encode_delta`.

    Raises:
        WrongBaseError: ``base`` is another version, or another tensor.
        FormatVersionError: The delta is of a format version that this slime does not know.
        DamagedError: The delta was cut off or altered, or is something else.
        IntegrityError: The result is not what the sender had.
    """
    info, stretch, body = _open(delta)
    present = _checked(base, info)
    result = base.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if present != info.result:
        _apply(result, info, stretch, body)
    return result


def apply_delta_(base: Tensor, delta: bytes | memoryview) -> Tensor:
    """Turn a tensor into the new version, in place.

    A tensor that is the new version already stays as it is, so that an update which was interrupted can be repeated.

    Args:
        base: The version that the delta was made from. It may require gradients; none are recorded. If it is not
            contiguous, a contiguous copy is made for the time being.
        delta: From :func:`encode_delta`.

    Returns:
        ``base``.

    Raises:
        WrongBaseError: ``base`` is another version, or another tensor. It is left as it was.
        FormatVersionError: The delta is of a format version that this slime does not know. ``base`` is as it was.
        DamagedError: The delta was cut off or altered (``base`` is as it was), or was forged with a right checksum
            (``base`` is spoilt: the message says so).
        IntegrityError: The result is not what the sender had; ``base`` is spoilt.
        DataError: ``base`` is a view that can't be changed in place: its elements share memory, or are another
            tensor's negated.
    """
    info, stretch, body = _open(delta)
    if any(step == 0 and size > 1 for step, size in zip(base.stride(), base.shape, strict=True)):
        raise DataError(f"elements of {_describe(base)} share memory (strides {base.stride()}); use apply_delta")
    if base.is_conj() or base.is_neg():
        raise DataError(f"{_describe(base)} is a view that negates another tensor; use apply_delta")
    if _checked(base, info) != info.result:
        _apply(base, info, stretch, body)
    return base


def _open(delta: bytes | memoryview) -> tuple[DeltaInfo, int, memoryview]:
    head, body = unpack_frame(delta, MAGIC, FORMAT_VERSION, _WHAT)
    if head.get("checksum") != CHECKSUM_ALGORITHM:
        raise DamagedError(f"{_WHAT}: checksums by {head.get('checksum')!r}, but this slime has {CHECKSUM_ALGORITHM!r}")
    dtype, shape, base, result, stretch = (head.get(name) for name in ("dtype", "shape", "base", "result", "stretch"))
    if (
        not (isinstance(dtype, str) and isinstance(base, str) and isinstance(result, str))
        or not (isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape))
        or not (type(stretch) is int and 0 < stretch < 2**31)
    ):
        raise DamagedError(f"{_WHAT}: its head lacks dtype, shape, base, result or stretch; make the delta again")
    return DeltaInfo(dtype=dtype, shape=tuple(shape), base=base, result=result), stretch, body


def _checked(base: Tensor, info: DeltaInfo) -> str:
    """The tensor's checksum, if the delta is for it."""
    if (dtype_name(base.dtype), tuple(base.shape)) != (info.dtype, info.shape):
        raise WrongBaseError(f"a delta for {info.dtype} {list(info.shape)} does not fit {_describe(base)}")
    present = tensor_checksum(base)
    if present not in (info.base, info.result):
        raise WrongBaseError(
            f"the tensor has the checksum {present}, but the delta leads from {info.base} to {info.result}; "
            "apply the deltas in order, or send the whole tensor"
        )
    return present


def _apply(tensor: Tensor, info: DeltaInfo, stretch: int, body: memoryview) -> None:
    integers = as_integers(tensor)
    elements = flat(integers)
    reader = Reader(body)
    try:
        for part in flat_chunks(elements, stretch):
            if reader.take(1)[0]:
                for plane in part.view(torch.uint8).view(part.numel(), -1).unbind(1):
                    apply_plane(plane, reader)
        if reader.data:
            raise DamagedError(f"{_WHAT}: {len(reader.data)} bytes too many; make the delta again")
    except DamagedError as error:
        raise DamagedError(f"{error} (the tensor was changed in part: send it whole)") from None
    if elements.data_ptr() != integers.data_ptr():
        integers.copy_(elements.view(integers.shape))
    if (found := tensor_checksum(tensor)) != info.result:
        raise IntegrityError(f"the delta led to {found} instead of {info.result}; send the whole tensor")


def _describe(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
