"""Tensors that lie in files."""

from pathlib import Path

import pytest
import torch

from slime_convert.mapped import map_tensor


def mapped_bytes(path):
    """Of a file, in this process."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.fixture
def path(tmp_path):
    """A file of 3 pages and 100 bytes; byte i is i modulo 251."""
    (tmp_path / "file").write_bytes(bytes(i % 251 for i in range(3 * 4096 + 100)))
    return tmp_path / "file"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.int32, torch.float64])
@pytest.mark.parametrize("first", [0, 8, 4096, 4099, 12_000])
def test_it_is_what_the_file_holds(path, first, dtype):
    with path.open("rb") as file:
        tensor = map_tensor(file, first, 12, dtype)
    data = path.read_bytes()[first : first + 12 * dtype.itemsize]
    assert tensor.dtype == dtype and tensor.view(torch.uint8).tolist() == list(data)
    assert tensor.data_ptr() % dtype.itemsize == 0
    tensor.zero_()
    assert path.read_bytes()[first : first + len(data)] == data


def test_it_is_mapped_as_long_as_it_is_held_and_no_more_of_the_file(path):
    with path.open("rb") as file:
        tensor = map_tensor(file, 4096 + 64, 10, torch.float32)[2:4]
        assert mapped_bytes(path) == 4096
        del tensor
        assert mapped_bytes(path) == 0


@pytest.mark.parametrize(("first", "dtype"), [(12_287, torch.uint8), (12_388, torch.uint8), (12_287, torch.int16)])
def test_what_lies_beyond_the_end_is_refused(path, first, dtype):
    with path.open("rb") as file, pytest.raises(ValueError, match=r"length|offset|cut off"):
        map_tensor(file, first, 102, dtype)


def test_nothing_needs_no_file(path):
    path.write_bytes(b"")
    with path.open("rb") as file:
        assert map_tensor(file, 0, 0, torch.int8).tolist() == []
