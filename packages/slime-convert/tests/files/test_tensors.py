"""Tensors as byte ranges, compared with torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert.files.reading import TensorReader, are_equal, computed
from slime_convert.files.tensors import (
    ITEM_BYTES,
    ByteRange,
    LazyTensor,
    MadeBytes,
    StoredBytes,
    concat,
    narrow,
    split,
    tensor_info,
)

DTYPES = ["uint8", "bfloat16", "float32", "int64"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("tensors") / "file"
    path.write_bytes(bytes(range(256)) * 64)
    return path


def loaded(tensor):
    with TensorReader() as reader:
        return reader.load(tensor)


def stored(path, offset, shape, dtype):
    """A lazy tensor, and the same in torch."""
    info = tensor_info("x", dtype, tuple(shape))
    data = bytearray(path.read_bytes()[offset : offset + info.nbytes])
    theirs = torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(shape) if data else None
    if theirs is None:
        theirs = torch.empty(shape, dtype=getattr(torch, dtype))
    return LazyTensor.stored(dtype, tuple(shape), StoredBytes(path, offset, info.nbytes, "x")), theirs


def bits(tensor):
    return (tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=3)


@settings(max_examples=150)
@given(SHAPES, st.sampled_from(DTYPES), st.data())
def test_cutting_and_joining_again(place, shape, dtype, data):
    lazy, theirs = stored(place, data.draw(st.integers(0, 50)), shape, dtype)
    for _ in range(data.draw(st.integers(1, 4))):
        axis = data.draw(st.integers(0, len(shape) - 1))
        cuts = sorted(data.draw(st.lists(st.integers(0, lazy.shape[axis]), max_size=3)))
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, lazy.shape[axis]], strict=True)]
        parts, their_parts = split(lazy, lengths, axis), theirs.split(lengths, axis)
        assert [bits(loaded(part)) for part in parts] == [bits(part) for part in their_parts]
        order = data.draw(st.permutations(range(len(parts))))
        lazy, theirs = concat([parts[i] for i in order], axis), torch.cat([their_parts[i] for i in order], axis)
        assert (lazy.shape, lazy.nbytes) == (tuple(theirs.shape), theirs.nbytes)
        assert bits(loaded(lazy)) == bits(theirs)


@settings(max_examples=60)
@given(SHAPES, st.data())
def test_narrow_and_reshape(place, shape, data):
    lazy, theirs = stored(place, 3, shape, "int64")
    axis = data.draw(st.integers(0, len(shape) - 1))
    start = data.draw(st.integers(0, shape[axis]))
    length = data.draw(st.integers(0, shape[axis] - start))
    assert bits(loaded(narrow(lazy, axis, start, length))) == bits(theirs.narrow(axis, start, length))
    assert bits(loaded(lazy.reshape(1, -1) if theirs.numel() else lazy)) == bits(
        theirs.reshape(1, -1) if theirs.numel() else theirs
    )


def test_neighbouring_ranges_are_joined(place):
    whole, _ = stored(place, 0, (6, 4), "uint8")
    assert concat(split(whole, [1, 2, 3])).pieces == whole.pieces
    assert concat([LazyTensor.zeros("uint8", (2, 4))] * 3).pieces == (ByteRange(None, 0, 24),)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: concat([a, b]),
        lambda a, b: concat([a, a.reshape(3, 8)]),
        lambda a, b: concat([a], 2),
        lambda a, b: split(a, [5, 2]),
        lambda a, b: split(a, [-1, 7]),
        lambda a, b: narrow(a, 0, 5, 2),
        lambda a, b: narrow(a, 2, 0, 1),
        lambda a, b: a.reshape(5, -1),
        lambda a, b: a.reshape(5, 5),
        lambda a, b: a.reshape(-1, -1),
        lambda a, b: tensor_info("x", "complex128", (1,)),
        lambda a, b: tensor_info("x", "uint8", (-1,)),
        lambda a, b: tensor_info("x", "uint8", (2**31, 2**31)),
    ],
)
def test_what_does_not_fit_is_a_value_error(place, wrong):
    with pytest.raises(ValueError, match=r".+"):
        wrong(LazyTensor.zeros("uint8", (6, 4)), LazyTensor.zeros("int8", (6, 4)))


def test_item_sizes_are_torchs():
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == dict(ITEM_BYTES)


def test_what_is_made_is_made_once_for_neighbouring_parts(place):
    made = []

    def make():
        made.append(True)
        return memoryview(bytes(range(12)))

    source = MadeBytes(12, make)
    whole = LazyTensor("uint8", (3, 4), (ByteRange(source, 0, 12),))
    with TensorReader() as reader:
        for row, part in enumerate(split(whole, [1, 1, 1])):
            assert reader.read(part).tolist() == list(range(4 * row, 4 * row + 4))
        assert len(made) == 1
        reader.read(LazyTensor.zeros("uint8", (1,)))
        reader.read(whole)
    assert len(made) == 2


def test_computed_tensors_are_computed_when_they_are_read(place):
    lazy, theirs = stored(place, 0, (3, 5), "uint8")
    twice = computed("int64", (5, 3), lambda a, b: (a.long() + b.long()).T, lazy, lazy)
    assert bits(loaded(twice)) == bits((2 * theirs.long()).T)


def test_equal_tensors(place):
    one, _ = stored(place, 0, (100, 8), "int64")
    assert are_equal(one, concat(split(one, [40, 60])))
    other = concat([split(one, [40, 60])[0], LazyTensor.zeros("int64", (60, 8))])
    assert not are_equal(one, other) and not are_equal(one, one.reshape(8, 100))
    assert not are_equal(LazyTensor.zeros("int8", (4,)), LazyTensor.zeros("uint8", (4,)))
