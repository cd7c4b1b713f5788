"""Files of ``torch.save`` are read as ``torch.load`` reads them, and the other way round; hostile files do no harm."""

import contextlib
import itertools
import os
import random
import struct
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

from slime_convert.errors import CheckpointError
from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import ITEM_BYTES, StoredBytes
from slime_convert.formats.pickles import Obj
from slime_convert.formats.torch_file import TorchFile, object_archive, tensor_archive
from support.family_models import same_bits

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def load(file, value, name="x"):
    """The tensor that a value of a file's content stands for."""
    tensor = file.tensor(value, name)
    if tensor is None:
        return None
    with TensorReader() as reader:
        found = reader.load(tensor)
        reader.finish()
    return found


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
    file = TorchFile(tmp_path, "file.pt")
    content = file.content()
    for name, tensor in tensors.items():
        assert same_bits(load(file, content[name]), tensor.data), name


def test_a_tensor_in_order_is_read_from_the_file_as_it_lies(tmp_path):
    """Not gathered in memory first: a part of it reads its own bytes alone."""
    base = torch.arange(24.0).reshape(4, 6)
    torch.save({"whole": base, "rows": base[1:3], "transposed": base.t()}, tmp_path / "file.pt")
    file = TorchFile(tmp_path, "file.pt")
    content = file.content()
    lies = {
        name: all(isinstance(piece.source, StoredBytes) for piece in file.tensor(value, name).pieces)
        for name, value in content.items()
    }
    assert lies == {"whole": True, "rows": True, "transposed": False}


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.permutations(range(4)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=4),
)
def test_views_of_any_strides(tmp_path_factory, shape, order, steps):
    view = torch.arange(int(np.prod(shape)) if shape else 1).reshape(shape)
    view = view.permute([axis for axis in order if axis < len(shape)])
    for axis, (start, step) in enumerate(steps[: view.dim()]):
        view = view[(slice(None),) * axis + (slice(start, None, step),)]
    root = tmp_path_factory.mktemp("views")
    torch.save(view, root / "file.pt")
    file = TorchFile(root, "file.pt")
    assert same_bits(load(file, file.content()), view)


def test_plain_values_are_read_and_others_described(tmp_path):
    state = OrderedDict(number=1, text="a", path=Path("x"), list=[1, 2], array=np.arange(3))
    torch.save(state, tmp_path / "file.pt")
    content = dict(TorchFile(tmp_path, "file.pt").content().items)
    assert isinstance(content.pop("array"), Obj) and content.pop("path").name.startswith("pathlib")
    assert content == {"number": 1, "text": "a", "list": [1, 2]}


def test_a_tensor_of_another_kind_of_number_is_not_one_here(tmp_path):
    torch.save(torch.zeros(3, dtype=torch.complex128), tmp_path / "file.pt")
    file = TorchFile(tmp_path, "file.pt")
    assert file.tensor(file.content(), "x") is None


def test_a_part_of_a_larger_file(tmp_path):
    tensor = torch.arange(10.0)
    torch.save(tensor, tmp_path / "part")
    data = (tmp_path / "part").read_bytes()
    (tmp_path / "file").write_bytes(b"before" + data + b"behind")
    file = TorchFile(tmp_path, "file", (6, len(data)))
    assert same_bits(load(file, file.content()), tensor)
    with pytest.raises(CheckpointError, match="the file is cut off"):
        TorchFile(tmp_path, "file", (6, len(data) + 7))


def test_only_what_is_asked_for_is_read(tmp_path):
    """A storage of 8 MiB that is not asked for; two halves of one storage, as Megatron's parameter buffers are."""
    buffer = torch.randn(2, 256, 256)
    state = {"first": buffer[0], "second": buffer[1], "small": torch.randn(100), "optimizer": torch.randn(2**21)}
    torch.save(state, tmp_path / "file.pt")

    def bytes_read():
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])

    start = bytes_read()
    file = TorchFile(tmp_path, "file.pt")
    content = file.content()
    opened = bytes_read()
    assert opened - start < 100_000
    assert torch.equal(load(file, content["small"]), state["small"])
    small = bytes_read()
    assert small - opened < 10_000
    assert torch.equal(load(file, content["first"]), buffer[0])
    # All of it, for the checksum is that of the whole.
    assert buffer.nbytes <= bytes_read() - small < buffer.nbytes + 10_000


def test_a_file_without_checksums_is_read(tmp_path):
    tensor = torch.randn(10, 3)
    with config.patch({"save.compute_crc32": False}):
        torch.save({"whole": tensor, "part": tensor[3:]}, tmp_path / "file.pt")
    file = TorchFile(tmp_path, "file.pt")
    content = file.content()
    assert torch.equal(load(file, content["whole"]), tensor) and torch.equal(load(file, content["part"]), tensor[3:])


@pytest.mark.parametrize("rows", [4, 3])
def test_a_flipped_byte_is_noticed(tmp_path, rows):
    path = tmp_path / "file.pt"
    tensor = torch.randn(4, 1000)
    torch.save({"tensor": tensor[:rows]}, path)
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + 5000] ^= 1
    path.write_bytes(data)
    file = TorchFile(tmp_path, "file.pt")
    with pytest.raises(CheckpointError, match=r"file\.pt is damaged: the checksum of x is wrong"):
        load(file, file.content()["tensor"])


def read_or_refuse(root, tensor):
    """The tensors are what was saved, or a :class:`CheckpointError` is raised."""
    file = TorchFile(root, "file.pt")
    content = file.content()
    whole, part = load(file, content["tensor"]), load(file, content["part"])
    if whole is None or part is None:
        raise CheckpointError("not plain tensors")
    assert torch.equal(whole, tensor) and torch.equal(part, tensor[2:])


def test_damage_raises_nothing_but_our_error(tmp_path):
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
            read_or_refuse(tmp_path, tensor)
        except (CheckpointError, KeyError, TypeError) as error:
            assert isinstance(error, CheckpointError) or "tensor" in str(error) or "part" in str(error)
            refused += 1
    assert refused > 150


@pytest.mark.full
def test_every_cut_and_every_flipped_bit(tmp_path):
    """Each is refused, or the tensors are what was saved: never others, and never a traceback."""
    path, tensor = tmp_path / "file.pt", torch.arange(12.0)
    torch.save({"tensor": tensor, "part": tensor[2:]}, path)
    data = path.read_bytes()
    flips = (data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8))
    for damaged in itertools.chain((data[:length] for length in range(len(data))), flips):
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            read_or_refuse(tmp_path, tensor)


class Hostile:
    def __init__(self, call, *args):
        self._reduced = (call, args)

    def __reduce__(self):
        return self._reduced


@pytest.mark.parametrize("wrap", [lambda h: h, lambda h: {"a": [h]}], ids=["all", "inside"])
def test_a_hostile_pickle_runs_nothing(tmp_path, wrap):
    mark = tmp_path / "mark"
    for hostile in (
        Hostile(os.system, f"touch {mark}"),
        Hostile(eval, f"open({str(mark)!r}, 'w')"),
        Hostile(getattr, Hostile(__import__, "os"), "system"),
        Hostile(torch.load, str(mark)),
    ):
        torch.save(wrap(hostile), tmp_path / "file.pt")
        TorchFile(tmp_path, "file.pt").content()
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
    for old, new, words in (
        (b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00/", "lacks storage / of x"),
        (b"K\x07K\x03\x86", b"K\x67K\x03\x86", r"lacks bytes of x: it has 84 of 1236;"),
    ):
        torch.save({"tensor": torch.zeros(7, 3)}, path)
        rewrite(path, old, new)
        file = TorchFile(tmp_path, "file.pt")
        with pytest.raises(CheckpointError, match=words):
            load(file, file.content()["tensor"])


@pytest.mark.timeout(20)
def test_a_tensor_larger_than_its_bytes_is_not_one(tmp_path):
    """A stride of zero made terabytes of one number."""
    torch.save({"tensor": torch.zeros(1).expand(2**40)}, tmp_path / "file.pt")
    file = TorchFile(tmp_path, "file.pt")
    assert file.tensor(file.content()["tensor"], "x") is None


@pytest.mark.timeout(20)
def test_compressed_records_are_refused(tmp_path):
    """Torch stores records as they are; a thousand times smaller they would fill the memory."""
    with zipfile.ZipFile(tmp_path / "file.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"N0" * 2**22 + b"N.")
    with pytest.raises(CheckpointError, match="is compressed, which torch does not do"):
        TorchFile(tmp_path, "file.pt")


def test_records_that_lie_about_their_place_are_refused(tmp_path):
    torch.save(torch.zeros(5), tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    at = data.index(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 2**31, 2**31)
    (tmp_path / "file.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="lies outside the file"):
        TorchFile(tmp_path, "file.pt")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"tensor": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.pt.*torch\.save in its zip format, use another"):
        TorchFile(tmp_path, "file.pt")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "text")
    with pytest.raises(CheckpointError, match=r"cannot read .*file\.pt"):
        TorchFile(tmp_path, "file.pt")
    with pytest.raises(CheckpointError, match="No such file"):
        TorchFile(tmp_path, "none.pt")
    torch.save({"tensor": torch.zeros(3)}, path)
    rewrite(path, b"little", b"big", "byteorder")
    with pytest.raises(CheckpointError, match="big-endian"):
        TorchFile(tmp_path, "file.pt")


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_torch_loads_what_is_laid_out_here(tmp_path, name):
    dtype = getattr(torch, name)
    tensor = torch.arange(12, dtype=torch.uint8).repeat(dtype.itemsize).view(torch.uint8)
    tensor = (tensor % 2).view(torch.uint8) if name == "bool" else tensor
    tensor = tensor.view(dtype).reshape(3, 4)
    data = bytes(bytes_of(tensor))
    archive = tensor_archive(name, (3, 4), len(data))
    head, tail = archive.seal(zlib.crc32(data))
    assert archive.offset % 64 == 0 and archive.nbytes == len(head + data + tail)
    (tmp_path / "file.pt").write_bytes(head + data + tail)
    assert same_bits(torch.load(tmp_path / "file.pt", weights_only=True), tensor)
    assert zipfile.ZipFile(tmp_path / "file.pt").testzip() is None
    file = TorchFile(tmp_path, "file.pt")
    assert same_bits(load(file, file.content()), tensor)


def test_torch_loads_plain_objects(tmp_path):
    value = {"args": {"a": 1, "b": [1.5, None, True], "c": "ü"}, "iteration": 0}
    (tmp_path / "file.pt").write_bytes(object_archive(value))
    assert torch.load(tmp_path / "file.pt", weights_only=True) == value
    assert TorchFile(tmp_path, "file.pt").content() == value


BEFORE = tensor_archive("uint8", (2**31,), 2**31).offset
"""Bytes before the tensor's, if they are below 4 GiB."""


@pytest.mark.parametrize("nbytes", [2**32 - 1 - BEFORE, 2**32 - 1, 2**32 + 2**20])
def test_a_tensor_about_4_gib_and_beyond(tmp_path, nbytes):
    """Its sizes, and the directory's place, take the longer fields of a zip archive from 2**32 - 1 on, which says in a
    shorter one that there is a longer. The file is a hole.
    """
    archive = tensor_archive("uint8", (nbytes,), nbytes)
    head, tail = archive.seal(0)
    assert len(head) + nbytes + tail.index(b"PK\x01\x02") >= 2**32 - 1 and b"PK\x06\x07" in tail
    with (tmp_path / "file.pt").open("wb") as file:
        file.write(head)
        file.seek(archive.offset + nbytes)
        file.write(tail)
    with zipfile.ZipFile(tmp_path / "file.pt") as opened:
        assert opened.getinfo("archive/data/0").file_size == nbytes
    loaded = torch.load(tmp_path / "file.pt", mmap=True, weights_only=True)
    assert loaded.shape == (nbytes,) and not loaded[-10:].any()
    file = TorchFile(tmp_path, "file.pt")
    assert file.tensor(file.content(), "x").shape == (nbytes,)
