import base64
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_tensors import DTYPES, LAYOUTS, SHAPES, bits, peak_bytes, random_tensor, relaid

from slime_core.errors import DamagedError, DataError, FormatVersionError, IntegrityError, WrongBaseError
from slime_core.frame import pack_frame, unpack_frame
from slime_core.integrity import apply_delta, apply_delta_, delta_info, encode_delta, tensor_checksum


def changed(base, share, seed, step=None):
    """A contiguous tensor with about that share of its bytes changed."""
    generator = torch.Generator().manual_seed(seed)
    raw = base.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    places = torch.rand(raw.shape, generator=generator) < share
    if base.dtype == torch.bool:
        raw ^= places.to(torch.uint8)
    else:
        new = torch.randint(256, raw.shape, dtype=torch.uint8, generator=generator) if step is None else raw + step
        raw[places] = new[places]
    return raw.view(base.dtype).view(base.shape)


@st.composite
def versions(draw):
    dtype, shape, seed = draw(st.sampled_from(DTYPES)), draw(SHAPES), draw(st.integers(0, 2**32))
    base = random_tensor(dtype, shape, seed)
    new = changed(base, draw(st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0])), seed + 1)
    layouts = st.sampled_from(LAYOUTS)
    return relaid(base, draw(layouts)), relaid(new, draw(layouts))


@given(versions(), st.sampled_from([0, 1, 9]))
def test_the_new_version_comes_out(versions, level):
    base, new = versions
    before = bits(base)
    delta = encode_delta(base, new, compression_level=level)
    result = apply_delta(base, delta)
    assert (result.dtype, result.shape) == (new.dtype, new.shape)
    assert bits(result) == bits(new) and bits(base) == before
    assert bits(apply_delta(result, delta)) == bits(new)  # the new version already
    assert apply_delta_(base, delta) is base
    assert bits(base) == bits(new)
    assert apply_delta_(base, delta) is base  # once more changes nothing
    assert bits(base) == bits(new)


# 2^20 elements are a stretch. Shares that lead to each way of writing places, and to two ways in one tensor.
@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4, 2e-3, 0.05, 0.3, 0.95, 1.0])
def test_large_tensors_of_every_density(share):
    base = random_tensor(torch.bfloat16, (2**20 + 12_345,), 0)
    new = changed(base, share, 1, step=1)
    for level in (0, 1):
        delta = encode_delta(base, new, compression_level=level)
        assert torch.equal(apply_delta(base, delta).view(torch.int16), new.view(torch.int16))


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 510, 65_534, 65_535, 65_536, 200_000])
def test_gaps_about_the_largest_codes(gap):
    base = torch.zeros(10 * gap + 3, dtype=torch.uint8)
    new = base.clone()
    new[gap::gap] = 7
    assert torch.equal(apply_delta(base, encode_delta(base, new, compression_level=0)), new)
    new[: gap // 2 + 1] = 1  # another way of writing may now be shorter
    assert torch.equal(apply_delta(base, encode_delta(base, new)), new)


def test_a_sparse_step_in_bf16_takes_two_bytes_a_change_and_one_when_deflated():
    base = (torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    neighbour = torch.rand(base.shape, generator=torch.Generator().manual_seed(1)) < 0.03
    new = (base.view(torch.int16) + neighbour.to(torch.int16)).view(torch.bfloat16)
    changes = int(neighbour.sum())
    assert len(encode_delta(base, new, compression_level=0)) < 2.05 * changes
    assert len(encode_delta(base, new)) < 1.05 * changes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_delta_is_never_much_larger_than_the_tensor(dtype, level):
    base, new = random_tensor(dtype, (100_000,), 0), random_tensor(dtype, (100_000,), 1)
    assert len(encode_delta(base, new, compression_level=level)) < base.numel() * dtype.itemsize + 400


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_memory_does_not_grow_with_the_tensor(dtype, share):
    """Three stretches, of 3 or 24 MiB in all. What is counted is torch's memory; the delta itself is Python's."""
    base = random_tensor(dtype, (3 * 2**20,), 0)
    new = changed(base, share, 1, step=1)
    deltas = []
    assert peak_bytes(lambda: deltas.append(encode_delta(base, new, compression_level=0))) < 48 * 2**20
    assert peak_bytes(lambda: apply_delta_(base, deltas[0])) < 4 * 2**20
    assert torch.equal(base.view(torch.uint8), new.view(torch.uint8))


def test_nothing_changed_takes_next_to_nothing():
    base = torch.randn(3 * 2**20)
    assert len(encode_delta(base, base.clone())) < 300
    assert len(encode_delta(torch.empty(0), torch.empty(0))) < 300


def test_nan_and_negative_zero_are_bits_like_any_other():
    base = torch.tensor([float("nan"), 0.0, 1.0])
    new = torch.tensor([float("nan"), -0.0, 1.0])
    new.view(torch.int32)[0] += 3  # another NaN
    assert bits(apply_delta(base, encode_delta(base, new))) == bits(new)


def test_a_parameter_is_changed_in_place_without_a_gradient():
    base = torch.nn.Parameter(torch.zeros(4))
    apply_delta_(base, encode_delta(base, torch.ones(4)))
    assert base.tolist() == [1.0] * 4 and base.requires_grad and base.is_leaf and base.grad_fn is None


def test_a_delta_tells_what_it_is():
    base, new = torch.zeros(2, 3), torch.ones(2, 3)
    info = delta_info(encode_delta(base, new))
    assert dataclasses.asdict(info) == {
        "dtype": "float32",
        "shape": (2, 3),
        "base": tensor_checksum(base),
        "result": tensor_checksum(new),
    }


def test_another_version_is_refused_and_left_as_it_was():
    first, second, third = torch.zeros(5), torch.ones(5), torch.full((5,), 2.0)
    delta = encode_delta(second, third)
    for apply in (apply_delta, apply_delta_):
        with pytest.raises(WrongBaseError, match=r"checksum \w{32}, but the delta leads from \w{32} to \w{32}; apply"):
            apply(first, delta)
        assert first.tolist() == [0.0] * 5
        with pytest.raises(WrongBaseError, match=r"a delta for float32 \[5\] does not fit float32 \[1, 5\] on cpu"):
            apply(second.view(1, 5), delta)
        with pytest.raises(WrongBaseError, match="does not fit int32"):
            apply(second.view(torch.int32), delta)


BASE = torch.arange(40, dtype=torch.int16)
DELTA = encode_delta(BASE, torch.where(BASE % 7 == 0, BASE + 1, BASE))


@pytest.mark.parametrize("place", range(len(DELTA)))
def test_a_damaged_delta_is_refused_and_the_tensor_left_as_it_was(place):
    damaged = bytearray(DELTA)
    damaged[place] ^= 0x10
    base = BASE.clone()
    for data in (damaged, DELTA[:place]):
        with pytest.raises((DamagedError, FormatVersionError)):
            apply_delta_(base, data)
        assert torch.equal(base, BASE)


def forged(head=None, body=None):
    old_head, old_body = unpack_frame(DELTA, b"SLMD", 1, "")
    return pack_frame(b"SLMD", 1, old_head | (head or {}), bytes(old_body) if body is None else body)


@pytest.mark.parametrize(
    "head",
    [
        {"shape": None},
        {"shape": [-1]},
        {"shape": [4.0]},
        {"dtype": 3},
        {"base": None},
        {"result": []},
        {"stretch": 0},
        {"stretch": "1"},
        {"stretch": True},
        {"checksum": "crc32"},
    ],
)
def test_a_forged_head_is_refused(head):
    with pytest.raises(DamagedError, match="a delta: "):
        apply_delta(BASE, forged(head))


@given(st.data())
def test_a_forged_body_never_gets_past_the_checks(data):
    """With a right checksum around it. Whatever happens is a typed error, or what the delta promised."""
    body = bytearray(unpack_frame(DELTA, b"SLMD", 1, "")[1])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    body = body[: data.draw(st.integers(0, len(body)))] + data.draw(st.binary(max_size=4))
    try:
        result = apply_delta(BASE, forged(body=bytes(body)))
    except (DamagedError, IntegrityError):
        return
    assert torch.equal(result, apply_delta(BASE, DELTA))


def plane(mode, flags, count, places_size, places, differences):
    import struct

    return struct.pack("<BBIIII", mode, flags, count, places_size, len(places), len(differences)) + places + differences


@pytest.mark.parametrize(
    ("first_plane", "message"),
    [
        (plane(1, 0, 1, 1, b"\x28", b"\1"), "a change at 40 of 40 bytes"),
        (plane(1, 0, 1, 2, b"\xff\xfe", b"\1"), "a change at 509 of 40 bytes"),
        (plane(1, 0, 2, 1, b"\0", b"\1\1"), "1 places for 2 changes"),
        (plane(2, 0, 1, 1, b"\0", b"\1"), "1 bytes of places in mode GAPS_16"),
        (plane(3, 0, 1, 6, b"\0\0\0\0\0\1", b"\1"), "a change at 40 of 40 bytes"),
        (plane(3, 0, 1, 1, b"\0", b"\1"), "0 places for 1 changes"),
        (plane(4, 0, 40, 0, b"", b"\1" * 39), "a stream of 39 bytes, 40 expected"),
        (plane(0, 0, 1, 0, b"", b"\1"), "0 bytes of places in mode SAME"),
        (plane(9, 0, 1, 0, b"", b"\1"), "1 changes of mode 9 in 40 bytes"),
        (plane(1, 4, 1, 1, b"\0", b"\1"), "1 changes of mode 1 in 40 bytes"),
        (plane(1, 0, 41, 1, b"\0", b"\1"), "41 changes of mode 1 in 40 bytes"),
        (plane(1, 0, 1, 2**31, b"\0", b"\1"), "1 changes of mode 1 in 40 bytes"),
        (plane(1, 1, 1, 1, b"\xff\xff", b"\1"), "a delta: Error"),
        (plane(1, 0, 1, 1, b"\0", b"\1") + b"\0" * 30, "bytes too many"),
        (b"\1\0", "18 bytes expected, 2 left"),
    ],
)
def test_a_forged_plane_is_refused(first_plane, message):
    with pytest.raises(DamagedError, match=message):
        apply_delta(BASE, forged(body=b"\1" + first_plane))


def test_a_bomb_is_not_unpacked():
    import zlib

    deflater = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = deflater.compress(bytes(50_000_000)) + deflater.flush()
    with pytest.raises(DamagedError, match="a stream of 41 bytes, 40 expected"):
        apply_delta(BASE, forged(body=b"\1" + plane(4, 2, 40, 0, b"", bomb)))


def test_a_right_delta_to_something_else_is_told():
    with pytest.raises(IntegrityError, match=r"the delta led to \w{32} instead of \w{32}; send the whole tensor"):
        apply_delta(BASE, forged({"result": "0" * 32}))


WRITTEN_BY_VERSION_1 = (
    "U0xNRAEAAACrAAAAAAAAACkAAAAAAAAA1ui0IHsiZHR5cGUiOiJpbnQxNiIsInNoYXBlIjpbNl0sImNoZWNrc3VtIjoibXVsdGlsaW5lYXI2"
    "NC1ibGFrZTJiMTI4IiwiYmFzZSI6IjQwOTRhNWVlNmI4YTU5ZTlkMzdlZWJhNTE3OGQ2YTZkIiwicmVzdWx0IjoiNmExMDg1MDEyM2VlMWNh"
    "YTFhNDU2YWQ1OTc0NzNkMDAiLCJzdHJldGNoIjoxMDQ4NTc2fQEDAAEAAAABAAAAAQAAAAEAAAAg/wMAAQAAAAEAAAABAAAAAQAAAAQB"
)


def test_deltas_of_the_first_version_stay_readable():
    result = apply_delta(torch.arange(6, dtype=torch.int16), base64.b64decode(WRITTEN_BY_VERSION_1))
    assert result.tolist() == [0, 1, 258, 3, 4, 4]


def test_tensors_that_do_not_match_are_refused():
    with pytest.raises(
        DataError, match=r"two versions of one tensor, got float32 \[2\] on cpu and float32 \[3\] on cpu"
    ):
        encode_delta(torch.zeros(2), torch.zeros(3))
    with pytest.raises(DataError, match=r"got float32 .* and float64"):
        encode_delta(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(DataError, match=r"got float32 \[2\] on cpu and float32 \[2\] on meta"):
        encode_delta(torch.zeros(2), torch.zeros(2, device="meta"))
    with pytest.raises(DataError, match="compression_level 10 is not between 0 and 9"):
        encode_delta(torch.zeros(2), torch.zeros(2), compression_level=10)


def test_views_that_cannot_be_changed_in_place_are_refused():
    base = torch.zeros(1).expand(4)
    delta = encode_delta(base, torch.ones(4))
    with pytest.raises(DataError, match=r"share memory \(strides \(0,\)\); use apply_delta"):
        apply_delta_(base, delta)
    assert apply_delta(base, delta).tolist() == [1.0] * 4
    single = torch.zeros(4).as_strided((1, 4), (0, 1))  # a stride that is never taken
    assert apply_delta_(single, encode_delta(single, torch.ones(1, 4))).tolist() == [[1.0] * 4]
    negated = torch.zeros(4, dtype=torch.complex64).conj()
    delta = encode_delta(negated, torch.ones(4, dtype=torch.complex64))
    with pytest.raises(DataError, match="is a view that negates another tensor; use apply_delta"):
        apply_delta_(negated, delta)
    assert apply_delta(negated, delta).tolist() == [1.0] * 4
