"""What ``torch.save`` writes is read as ``torch.load`` reads it; what anybody else writes does no harm."""

import contextlib
import itertools
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.serialization import config

from slime_convert.errors import CheckpointError
from slime_convert.mapped import map_tensor
from slime_convert.plain_pickle import Inert
from slime_convert.torch_file import StoredTensor, TorchFile

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float8_e4m3fn]


def equal_bits(ours, theirs):
    return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and torch.equal(
        ours.contiguous().flatten().view(torch.uint8), theirs.contiguous().flatten().view(torch.uint8)
    )


@pytest.fixture
def bytes_read(monkeypatch):
    """Tells how many bytes this process's calls of read have given, and how many were mapped, so far."""
    mapped = []

    def counted(file, first, count, dtype):
        mapped.append(count * dtype.itemsize)
        return map_tensor(file, first, count, dtype)

    def told():
        reads = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"]
        return int(reads) + sum(mapped)

    monkeypatch.setattr("slime_convert.mapped.map_tensor", counted)
    return told


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_of_tensor_is_read(tmp_path, dtype):
    base = torch.arange(24).reshape(4, 6).to(dtype)
    tensors = {
        "whole": base,
        "rows": base[1:3],
        "transposed": base.t(),
        "columns": base[:, 2:4],
        "scalar": base[3, 5],
        "empty": base[:0],
        "parameter": torch.nn.Parameter(base.clone(), requires_grad=False),
    }
    torch.save(tensors, tmp_path / "file.pt")
    content = TorchFile(tmp_path / "file.pt").content()
    for name, tensor in tensors.items():
        assert isinstance(content[name], StoredTensor) and equal_bits(content[name].load(), tensor.data), name


def test_plain_values_are_read_and_foreign_ones_are_not(tmp_path):
    state = OrderedDict(number=1, text="a", path=Path("x"), list=[1, {2}], array=np.arange(3), state=random.getstate())
    torch.save(state, tmp_path / "file.pt")
    content = TorchFile(tmp_path / "file.pt").content()
    assert isinstance(content.pop("array"), Inert)
    assert content == {"number": 1, "text": "a", "path": Path("x"), "list": [1, {2}], "state": random.getstate()}


def test_only_what_is_asked_for_is_read(tmp_path, bytes_read):
    """A storage of 8 MiB that is not asked for; two halves of one storage, as Megatron's parameter buffers are."""
    buffer = torch.randn(2, 256, 256)
    state = {"first": buffer[0], "second": buffer[1], "small": torch.randn(100), "optimizer": torch.randn(2**21)}
    torch.save(state, tmp_path / "file.pt")
    start = bytes_read()
    content = TorchFile(tmp_path / "file.pt").content()
    opened = bytes_read()
    assert opened - start < 100_000
    assert torch.equal(content["small"].load(), state["small"])
    small = bytes_read()
    assert small - opened < 10_000
    assert torch.equal(content["first"].load(), buffer[0])
    first = bytes_read()
    assert buffer.nbytes * 1.5 <= first - small < buffer.nbytes * 1.5 + 10_000  # once for the checksum of the whole
    assert torch.equal(content["second"].load(), buffer[1])
    second = bytes_read()
    assert second - first < buffer.nbytes // 2 + 10_000
    assert torch.equal(content["optimizer"].load(), state["optimizer"])
    assert bytes_read() - second < state["optimizer"].nbytes + 10_000


def test_a_file_without_checksums_is_read(tmp_path):
    tensor = torch.randn(10, 3)
    with config.patch({"save.compute_crc32": False}):
        torch.save({"whole": tensor, "part": tensor[3:]}, tmp_path / "file.pt")
    content = TorchFile(tmp_path / "file.pt").content()
    assert torch.equal(content["whole"].load(), tensor) and torch.equal(content["part"].load(), tensor[3:])


@pytest.mark.parametrize("rows", [4, 3])
def test_a_flipped_byte_is_noticed(tmp_path, rows):
    path = tmp_path / "file.pt"
    tensor = torch.randn(4, 1000)
    torch.save({"tensor": tensor[:rows]}, path)
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"file\.pt is damaged \(the checksum of .* is wrong\); use another"):
        TorchFile(path).content()["tensor"].load()


def test_no_damage_is_told_by_anything_but_our_error(tmp_path):
    """Cut off, or with bytes replaced: the file is refused, or its tensor is what was saved."""
    path, rng = tmp_path / "file.pt", random.Random(0)
    tensor = torch.arange(12.0)
    torch.save({"tensor": tensor, "part": tensor[2:]}, path)
    data, refused = path.read_bytes(), 0
    for attempt in range(300):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 3 == 0 else data)
        for _ in range(4 if attempt % 3 else 0):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            content = TorchFile(path).content()
            assert torch.equal(content["tensor"].load(), tensor) and torch.equal(content["part"].load(), tensor[2:])
        except CheckpointError:
            refused += 1
    assert refused > 150


@pytest.mark.full
def test_every_cut_and_every_flipped_bit(tmp_path):
    """Each is told, or the tensors are what was saved: never others, and never a traceback."""
    path, tensor = tmp_path / "file.pt", torch.arange(12.0)
    torch.save({"tensor": tensor, "part": tensor[2:]}, path)
    data = path.read_bytes()
    flips = (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8))
    for damaged in itertools.chain((data[:length] for length in range(len(data))), flips):
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            content = TorchFile(path).content()
            assert torch.equal(content["tensor"].load(), tensor) and torch.equal(content["part"].load(), tensor[2:])


class Hostile:
    def __init__(self, call, *args):
        self._reduced = (call, args)

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize("wrap", [lambda h: h, lambda h: {"a": [h]}, lambda h: {h: 1}], ids=["all", "inside", "key"])
def test_a_hostile_pickle_runs_nothing(tmp_path, wrap):
    mark = tmp_path / "mark"
    for hostile in (
        Hostile(os.system, f"touch {mark}"),
        Hostile(eval, f"open({str(mark)!r}, 'w')"),
        Hostile(getattr, Hostile(__import__, "os"), "system"),
        Hostile(torch.load, str(mark)),
    ):
        torch.save(wrap(hostile), tmp_path / "file.pt")
        TorchFile(tmp_path / "file.pt").content()
        assert not mark.exists()


def rewrite(path, old, new, record="data.pkl"):
    """Bytes of one record of a file replaced."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data.replace(old, new) if name.endswith(record) else data)


def test_lies_about_a_tensor_are_refused(tmp_path):
    """A storage of another name, and more rows than there are bytes."""
    path = tmp_path / "file.pt"
    torch.save({"tensor": torch.zeros(7, 3)}, path)
    rewrite(path, b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00/")
    with pytest.raises(CheckpointError, match="it lacks bytes of storage /"):
        TorchFile(path).content()["tensor"].load()
    torch.save({"tensor": torch.zeros(7, 3)}, path)
    rewrite(path, b"K\x07K\x03\x86", b"K\x67K\x03\x86")
    with pytest.raises(CheckpointError, match="it lacks bytes of storage 0"):
        TorchFile(path).content()["tensor"].load()
    torch.save({"tensor": torch.zeros(1).expand(2**40)}, path)
    assert isinstance(TorchFile(path).content()["tensor"], Inert)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"tensor": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.pt.*torch\.save in its zip format, use another"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "text")
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.pt"):
        TorchFile(path)
    with pytest.raises(CheckpointError, match="No such file"):
        TorchFile(tmp_path / "none.pt")
    torch.save({"tensor": torch.zeros(3)}, path)
    rewrite(path, b"little", b"big", "byteorder")
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchFile(path).content()
