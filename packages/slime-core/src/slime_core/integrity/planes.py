"""One byte plane of a stretch of a tensor, as the bytes that changed in it.

Plane k of elements of w bytes are their k-th bytes. A small step of an optimizer moves a bf16 number to a neighbour:
its low byte changes by 1 or so, its high byte rarely at all. So planes are coded one by one, with the difference of new
and old byte modulo 256, which then is mostly 1 or 255 and packs well. The places of changed bytes are written in the
way that takes least space:

- ``GAPS_8``, ``GAPS_16``: numbers of unchanged bytes before each changed one, in 8 or 16 bits. The largest code, 255 or
  65,535, stands for that many unchanged bytes and no changed one.
- ``BITMAP``: a bit for each byte, the lowest bit first.
- ``DENSE``: none; there is a difference for every byte, mostly other than 0.

Layout of a plane: mode (u8), flags (u8: 1 if the places are deflated, 2 if the differences are), number of changed
bytes (u32), size of the places unpacked (u32), stored size of the places (u32), stored size of the differences (u32),
then places and differences; little-endian. N elements in a stretch, C changed bytes in a plane.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from slime_core.errors import DamagedError
from slime_core.integrity.bits import from_bytes, to_bytes

_HEADER = struct.Struct("<BBIIII")
_PLACES_DEFLATED, _DIFFERENCES_DEFLATED = 1, 2
_SAMPLE = 4096


class Mode(enum.IntEnum):
    """How the places of changed bytes are written."""

    SAME = 0
    GAPS_8 = 1
    GAPS_16 = 2
    BITMAP = 3
    DENSE = 4


_GAP_BYTES = {Mode.GAPS_8: 1, Mode.GAPS_16: 2}


class Reader:
    """Takes pieces off the front of some bytes.

    Args:
        data: The bytes.
    """

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def take(self, size: int) -> memoryview:
        """The next ``size`` bytes.

        Raises:
            DamagedError: There are fewer.
        """
        if size > len(self.data):
            raise DamagedError(f"a delta: {size} bytes expected, {len(self.data)} left; make the delta again")
        piece, self.data = self.data[:size], self.data[size:]
        return piece


def encode_plane(places_C: Tensor, differences_C: Tensor, size: int, level: int) -> bytes:
    """The changed bytes of a plane as bytes.

    Args:
        places_C: Positions of the changed bytes, ascending, int64.
        differences_C: New byte minus old byte, modulo 256; uint8, none 0.
        size: N.
        level: zlib's compression level, 0 to 9; 0 leaves the bytes as they are.
    """
    count = places_C.numel()
    mode, places = _encode_places(places_C, size)
    if mode == Mode.DENSE:
        differences_C = differences_C.new_zeros(size).index_copy_(0, places_C, differences_C)
    stored_places, places_flag = _deflate(places, level, _PLACES_DEFLATED)
    stored, flag = _deflate(to_bytes(differences_C), level, _DIFFERENCES_DEFLATED)
    head = _HEADER.pack(mode, places_flag | flag, count, len(places), len(stored_places), len(stored))
    return head + stored_places + stored


def apply_plane(plane_N: Tensor, reader: Reader) -> None:
    """Change a plane in place.

    Args:
        plane_N: The old bytes, uint8; any stride.
        reader: Stands before the plane; is moved behind it.

    Raises:
        DamagedError: The bytes are no plane of this size. The plane is then as it was.
    """
    size = plane_N.numel()
    mode, flags, count, places_size, stored_places, stored = _HEADER.unpack(reader.take(_HEADER.size))
    if count > size or places_size > 2 * size + 4 or flags & ~3 or mode not in list(Mode):
        raise DamagedError(f"a delta: {count} changes of mode {mode} in {size} bytes; make the delta again")
    places = _inflate(reader.take(stored_places), places_size, bool(flags & _PLACES_DEFLATED))
    expected = size if mode == Mode.DENSE else count
    differences = _inflate(reader.take(stored), expected, bool(flags & _DIFFERENCES_DEFLATED))
    differences_C = from_bytes(differences, plane_N.device)
    if mode == Mode.DENSE:
        plane_N += differences_C
    elif mode != Mode.SAME or count:
        places_C = _decode_places(Mode(mode), from_bytes(places, plane_N.device), size)
        if places_C.numel() != count:
            raise DamagedError(f"a delta: {places_C.numel()} places for {count} changes; make the delta again")
        plane_N[places_C] += differences_C


def _encode_places(places_C: Tensor, size: int) -> tuple[Mode, bytes]:
    """The shortest way to write them."""
    count = places_C.numel()
    if not count:
        return Mode.SAME, b""
    lengths = {Mode.DENSE: size - count, Mode.BITMAP: -(-size // 8)}  # DENSE has size - count more differences
    if count < size // 8:
        gaps_C = places_C.diff(prepend=places_C.new_full((1,), -1)) - 1
        for mode, width in _GAP_BYTES.items():
            lengths[mode] = width * (count + int((gaps_C // _top(width)).sum()))
    mode = min(lengths, key=lengths.__getitem__)
    if mode == Mode.DENSE:
        return mode, b""
    if mode == Mode.BITMAP:
        bits = torch.zeros(8 * lengths[mode], dtype=torch.uint8, device=places_C.device)
        return mode, to_bytes(
            (bits.index_fill_(0, places_C, 1).view(-1, 8) << _bit_numbers(bits)).sum(-1).to(torch.uint8)
        )
    return mode, to_bytes(_encode_gaps(gaps_C, _GAP_BYTES[mode]))


def _encode_gaps(gaps_C: Tensor, width: int) -> Tensor:
    """The gaps as uint8, with an escape for every ``top`` bytes in one."""
    top = _top(width)
    escapes_C = gaps_C // top
    ends_C = escapes_C.cumsum(0) + torch.arange(gaps_C.numel(), device=gaps_C.device)
    codes = torch.full((int(ends_C[-1]) + 1,), top, dtype=torch.int32, device=gaps_C.device)
    codes[ends_C] = (gaps_C - escapes_C * top).to(torch.int32)
    return codes.view(torch.uint8).view(-1, 4)[:, :width]


def _decode_places(mode: Mode, places: Tensor, size: int) -> Tensor:
    """Positions of the changed bytes.

    Raises:
        DamagedError: They lie outside the plane.
    """
    if mode == Mode.BITMAP:
        found = ((places.unsqueeze(1) >> _bit_numbers(places)) & 1).view(-1).nonzero().squeeze(1)
    elif mode in _GAP_BYTES and places.numel() % _GAP_BYTES[mode] == 0:
        width = _GAP_BYTES[mode]
        codes = torch.nn.functional.pad(places.view(-1, width), (0, 4 - width)).view(torch.int32).view(-1).long()
        changed = codes != _top(width)
        found = ((codes + changed).cumsum(0) - 1)[changed]
    else:
        raise DamagedError(f"a delta: {places.numel()} bytes of places in mode {mode.name}; make the delta again")
    if found.numel() and int(found[-1]) >= size:
        raise DamagedError(f"a delta: a change at {int(found[-1])} of {size} bytes; make the delta again")
    return found


def _top(width: int) -> int:
    return int(2 ** (8 * width) - 1)


def _bit_numbers(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _deflate(data: bytes, level: int, flag: int) -> tuple[bytes, int]:
    """The bytes, deflated and with ``flag`` if that pays for the first of them: to try all of them takes long."""
    if level == 0 or len(_raw_deflate(data[:_SAMPLE], level)) > 0.95 * min(len(data), _SAMPLE):
        return data, 0
    return _raw_deflate(data, level), flag


def _raw_deflate(data: bytes, level: int) -> bytes:
    # Runs and Huffman codes only: differences and gaps hold little else, and this is several times faster. Zstandard
    # makes them 4% to 8% larger (levels 1 to 9, Adam's steps of 1e-6 to 1e-4), and this is a sixth of the time at most.
    deflater = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    return deflater.compress(data) + deflater.flush()


def _inflate(data: memoryview, size: int, deflated: bool) -> bytes | memoryview:
    """The bytes as they were; never more than ``size`` of them, whatever the data holds."""
    result: bytes | memoryview = data
    if deflated:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            result = inflater.decompress(data, size + 1)
        except zlib.error as error:
            raise DamagedError(f"a delta: {error}; make the delta again") from None
    if len(result) != size:
        raise DamagedError(f"a delta: a stream of {len(result)} bytes, {size} expected; make the delta again")
    return result


def split_planes(old_N: Tensor, new_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Places and differences of each byte plane, one after the other, for :func:`encode_plane`.

    Args:
        old_N: Integers, contiguous.
        new_N: The same number of them, of the same type.
    """
    changed_C = (old_N != new_N).nonzero().squeeze(1)
    width = old_N.element_size()
    differences_CW = (new_N[changed_C].view(torch.uint8) - old_N[changed_C].view(torch.uint8)).view(-1, width)
    for plane in range(width):
        differences_C = differences_CW[:, plane]
        kept = differences_C != 0
        yield changed_C[kept], differences_C[kept]
