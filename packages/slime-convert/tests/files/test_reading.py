"""Checksums are compared in whatever order parts are read, and every byte that a result depends on counts."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_convert.errors import CheckpointError, HfConfigError
from slime_convert.files import reading
from slime_convert.files.reading import TensorReader
from slime_convert.files.tensors import ByteRange, LazyTensor, StoredBytes

SIZE = 500


@pytest.fixture
def place(tmp_path):
    data = bytes(i * 7 % 251 for i in range(SIZE))
    (tmp_path / "file").write_bytes(b"head" + data)
    return StoredBytes(tmp_path / "file", 4, SIZE, "x", zlib.crc32(data), HfConfigError)


def part(place, start, size):
    return LazyTensor("uint8", (size,), (ByteRange(place, start, size),))


def flip(place, byte):
    data = bytearray(place.path.read_bytes())
    data[4 + byte] ^= 1
    place.path.write_bytes(data)


@given(st.data())
def test_any_order_of_parts_that_cover_it(tmp_path_factory, data):
    """Overlapping and repeated ones, too."""
    path = tmp_path_factory.mktemp("file") / "file"
    content = bytes(i * 7 % 251 for i in range(SIZE))
    path.write_bytes(content)
    place = StoredBytes(path, 0, SIZE, "x", zlib.crc32(content))
    ranges = data.draw(st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)), max_size=8))
    flipped = data.draw(st.one_of(st.none(), st.integers(0, SIZE - 1)))
    if flipped is not None:
        flip(StoredBytes(path, -4, SIZE, "x"), flipped + 4)

    def read():
        with TensorReader() as reader:
            for start, size in ranges:
                size = min(size, SIZE - start)
                reader.read(part(place, start, size))
            reader.finish()

    if flipped is None or not ranges:
        read()
    else:
        with pytest.raises(CheckpointError, match="the checksum of x is wrong"):
            read()


@pytest.mark.parametrize("byte", [0, 250, SIZE - 1])
def test_a_flipped_byte_outside_of_the_part_that_was_read_counts_too(place, byte):
    """What lies there is damaged; the part may be, too, in a way that a checksum would show only of the whole."""
    flip(place, byte)
    with TensorReader() as reader:
        reader.read(part(place, 100, 50))
        with pytest.raises(HfConfigError, match=r"file is damaged: the checksum of x is wrong; convert or fetch"):
            reader.finish()


def test_nothing_is_read_of_what_nobody_asks_for(place, monkeypatch):
    flip(place, 3)
    with TensorReader() as reader:
        reader.read(LazyTensor.zeros("uint8", (5,)))
        reader.finish()


def test_a_file_that_is_cut_off_or_gone(place):
    place.path.write_bytes(b"short")
    with TensorReader() as reader, pytest.raises(HfConfigError, match=r"cannot read x from .*the file is cut off"):
        reader.read(part(place, 0, SIZE))
    place.path.unlink()
    with TensorReader() as reader, pytest.raises(HfConfigError, match=r"cannot read x from .*No such file"):
        reader.read(part(place, 0, SIZE))


def test_few_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_OPEN_FILES", 3)
    places = []
    for number in range(10):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        places.append(StoredBytes(tmp_path / str(number), 0, 1, str(number)))
    with TensorReader() as reader:
        for number, place in enumerate(places * 2):
            assert reader.read(part(place, 0, 1)).tolist() == [number % 10]
            assert len(reader._files) <= 3
