import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DamagedError, DataError, FormatVersionError
from slime_core.frame import check_plain, pack_frame, unpack_frame

# Lone surrogates too: a tokenizer's text may hold them.
TEXT = st.text(st.characters(exclude_categories=[]))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**60), 10**60) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FRAME = pack_frame(b"TEST", 2, {"a": [1, "ü"]}, b"body")


@given(st.dictionaries(TEXT, PLAIN, max_size=4), st.binary(max_size=20))
def test_round_trip_is_lossless(head, body):
    unpacked, found = unpack_frame(pack_frame(b"TEST", 1, head, body), b"TEST", 1, "a test")
    assert repr(unpacked) == repr(head)  # unlike ==, this tells -0.0 from 0.0 and True from 1, and NaN is NaN
    assert bytes(found) == body


def test_two_lone_surrogates_stay_two():
    head = {"text": "\ud83d\ude00"}
    assert len(unpack_frame(pack_frame(b"TEST", 1, head, b""), b"TEST", 1, "")[0]["text"]) == 2


@pytest.mark.parametrize("place", range(len(FRAME)))
def test_a_changed_byte_anywhere_is_told(place):
    for flip in (1, 0x80):
        damaged = bytearray(FRAME)
        damaged[place] ^= flip
        with pytest.raises((DamagedError, FormatVersionError)):
            unpack_frame(damaged, b"TEST", 2, "a test")


@pytest.mark.parametrize("length", range(len(FRAME)))
def test_bytes_that_were_cut_off_are_told(length):
    with pytest.raises(DamagedError, match="get the bytes again"):
        unpack_frame(FRAME[:length], b"TEST", 2, "a test")


def test_errors_say_what_is_wrong():
    with pytest.raises(DamagedError, match="a test: 47 bytes, its head says 46"):
        unpack_frame(FRAME + b"x", b"TEST", 2, "a test")
    with pytest.raises(FormatVersionError, match="a test: format version 2; this slime reads 1 to 1"):
        unpack_frame(FRAME, b"TEST", 1, "a test")
    with pytest.raises(FormatVersionError, match="a test: format version 0; this slime reads 1 to 2"):
        unpack_frame(pack_frame(b"TEST", 0, {}, b""), b"TEST", 2, "a test")
    with pytest.raises(DamagedError, match="starts with b'TEST' instead of b'OTHR'"):
        unpack_frame(FRAME, b"OTHR", 1, "a test")


def test_newer_bytes_are_called_newer_even_with_another_layout():
    newer = FRAME[:4] + struct.pack("<H", 9) + b"\xff" * 40
    with pytest.raises(FormatVersionError, match="format version 9"):
        unpack_frame(newer, b"TEST", 2, "a test")


@pytest.mark.parametrize("text", [b"[1]", b"{", b"[" * 100_000, b"\xff", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_head_that_is_no_object_is_told(text):
    with pytest.raises(DamagedError, match="a test: its head is"):
        unpack_frame(_frame_with_head(text), b"TEST", 2, "a test")


def _frame_with_head(text):
    """A frame with a right checksum around any head."""
    import zlib

    start = struct.pack("<4sHHQQ", b"TEST", 2, 0, len(text), 0)
    return start + struct.pack("<I", zlib.crc32(text, zlib.crc32(start))) + text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, (1, 2)]}, r"meta\.a\[1\] is a tuple; allowed: None, bool"),
        ({"a": {1: 2}}, r"meta\.a has the key 1 of type int; keys must be strings"),
        ({"a": b"x"}, r"meta\.a is a bytes"),
        ({"a": {1, 2}}, r"meta\.a is a set"),
        ({"a": object}, r"meta\.a is a type"),
    ],
)
def test_what_would_not_come_back_is_refused(value, message):
    with pytest.raises(DataError, match=message):
        check_plain(value, "meta")


@pytest.mark.parametrize("levels", range(97, 102))
def test_what_is_not_too_deep_to_write_is_not_too_deep_to_read(levels):
    def stack(depth):
        return [] if depth == 1 else [stack(depth - 1), 0]

    head = {"a": stack(levels)}
    if levels < 100:  # the head is a level too
        assert unpack_frame(pack_frame(b"TEST", 1, head, b""), b"TEST", 1, "")[0] == head
    else:
        with pytest.raises(DataError, match="nested too deeply"):
            pack_frame(b"TEST", 1, head, b"")


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(DataError, match=r"is nested too deeply \(over 100 levels\), or holds itself"):
        check_plain(loop, "x")
    with pytest.raises(DataError, match="does not fit JSON"):
        pack_frame(b"TEST", 1, {"n": 10**5000}, b"")
    assert json.loads(json.dumps(10**4000)) == 10**4000  # so the limit is Python's own, far off
