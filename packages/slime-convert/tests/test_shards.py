import json
import math
import weakref
import zlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime_convert.errors import HfConfigError
from slime_convert.hf import HfReader
from slime_convert.shard_file import SAFETENSORS_DTYPES, TensorSpec
from slime_convert.shards import Step, write_shards
from slime_convert.verify.hf_weights import HfWeights


def spec_of(name, tensor):
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def steps_of(tensors, made=None):
    """A step for each tensor; ``made`` gets the names of those that are taken."""

    def make(name):
        if made is not None:
            made.append(name)
        return [tensors[name]]

    return [Step((spec_of(name, tensor),), lambda name=name: make(name)) for name, tensor in tensors.items()]


def write(directory, tensors, made=None, **kwargs):
    write_shards(directory, steps_of(tensors, made), **kwargs)


def every_type():
    """An odd number of elements of each type, so that nothing lies where its type wants it by chance."""
    bytes_ = torch.arange(24, dtype=torch.uint8)
    tensors = {name: bytes_[: 3 * dtype.itemsize].clone().view(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    tensors["BOOL"] = torch.tensor([True, False, True])
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "strided": torch.ones(3, 2).T}


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_file_is_what_the_library_writes(tmp_path):
    tensors = every_type()
    write(tmp_path, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape
        assert bits(ours[name]).equal(bits(tensor))
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())


def test_the_header_has_the_checksum_of_every_tensor(tmp_path):
    tensors = every_type()
    write(tmp_path, tensors)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata.pop("format") == "pt"
    data = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    in_file = sorted(header, key=lambda name: header[name]["data_offsets"])
    checksums = [zlib.crc32(bytes(bits(tensors[name]).tolist())) for name in in_file]
    assert metadata == {"crc32": "".join(f"{checksum:08x}" for checksum in checksums)}


def test_shards_and_their_index(tmp_path):
    tensors = {f"w{number}": torch.full((size,), float(number)) for number, size in enumerate([10, 10, 10, 99, 1])}
    write(tmp_path, tensors, max_shard_bytes=80)
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 520}
    assert index["weight_map"] == dict(zip(tensors, [names[0], names[0], *names[1:]], strict=True))
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name].equal(tensors[name])


@pytest.mark.parametrize(("ahead_bytes", "alive"), [(32, 2), (31, 0)])
def test_the_next_step_is_made_beside_the_tensors_of_one_unless_it_is_large(tmp_path, monkeypatch, ahead_bytes, alive):
    monkeypatch.setattr("slime_convert.ahead.AHEAD_BYTES", ahead_bytes)
    held = []

    def make():
        assert sum(reference() is not None for reference in held) <= alive
        tensors = [torch.ones(4), torch.ones(4)]
        held.extend(map(weakref.ref, tensors))
        return tensors

    names = [(f"a{number}", f"b{number}") for number in range(5)]
    write_shards(tmp_path, [Step(tuple(TensorSpec(n, torch.float32, (4,)) for n in pair), make) for pair in names])
    assert len(held) == 10


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path):
    spec = TensorSpec("a", torch.float32, (3,))
    with pytest.raises(ValueError, match=r"a must be TensorSpec.*, not torch\.float32 \(2,\)"):
        write_shards(tmp_path, [Step((spec,), lambda: [torch.zeros(2)])])
    for number in (0, 2):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2"):
            write_shards(tmp_path, [Step((spec,), lambda number=number: [torch.zeros(3)] * number)])


class StopError(Exception):
    pass


def write_until(directory, tensors, number, **kwargs):
    """Stop before tensor ``number`` is made."""
    steps = steps_of(tensors)

    def stop():
        raise StopError

    steps[number] = Step(steps[number].specs, stop)
    with pytest.raises(StopError):
        write_shards(directory, steps, **kwargs)


@pytest.mark.parametrize("number", range(5))
def test_what_is_finished_is_not_made_again(tmp_path, number):
    tensors = {f"w{number}": torch.randn(size) for number, size in enumerate([10, 10, 10, 99, 1])}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    write(whole, tensors, max_shard_bytes=80)
    write_until(cut, tensors, number, max_shard_bytes=80)
    made, calls = [], []
    write(cut, tensors, made, max_shard_bytes=80, on_progress=lambda *call: calls.append(call))
    assert made == list(tensors)[number:]
    assert calls[0] == (sum(tensor.nbytes for tensor in list(tensors.values())[:number]), 520)
    assert calls == sorted(calls) and calls[-1] == (520, 520)
    assert {path.name: path.read_bytes() for path in cut.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    made.clear()
    write(cut, tensors, made, max_shard_bytes=80)
    assert made == []


def test_every_flipped_byte_of_a_kept_file_is_noticed(tmp_path):
    tensors = {"a": torch.randn(2), "b": torch.randn(3)}
    write(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    right = path.read_bytes()
    for place in range(len(right)):
        wrong = bytearray(right)
        wrong[place] ^= 1
        path.write_bytes(wrong)
        made = []
        write(tmp_path, tensors, made)
        assert made and path.read_bytes() == right, place


def test_bytes_at_the_end_of_a_kept_file_are_noticed(tmp_path):
    tensors = {"a": torch.randn(2), "b": torch.randn(3)}
    write(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    right = path.read_bytes()
    path.write_bytes(right + b"more")
    write(tmp_path, tensors)
    assert path.read_bytes() == right


def test_a_file_of_other_tensors_is_begun_anew(tmp_path):
    write(tmp_path, {"a": torch.zeros(3)})
    made, other = [], {"a": torch.zeros(4)}
    write(tmp_path, other, made)
    assert made == ["a"] and load_file(tmp_path / "model.safetensors")["a"].equal(other["a"])


def test_of_a_step_that_lies_in_two_files_only_the_missing_part_is_written(tmp_path):
    parts = [torch.full((4,), 1.0), torch.full((4,), 2.0)]
    specs = tuple(spec_of(name, part) for name, part in zip("ab", parts, strict=True))
    write_shards(tmp_path, [Step(specs, lambda: parts)], max_shard_bytes=16)
    second = tmp_path / "model-00002-of-00002.safetensors"
    right, before = second.read_bytes(), (tmp_path / "model-00001-of-00002.safetensors").stat().st_mtime_ns
    second.write_bytes(right[:-1])
    write_shards(tmp_path, [Step(specs, lambda: parts)], max_shard_bytes=16)
    assert second.read_bytes() == right
    assert (tmp_path / "model-00001-of-00002.safetensors").stat().st_mtime_ns == before


def load_with(reader_type, directory, name):
    with reader_type(directory) as reader:
        return reader.load(name)


@pytest.mark.parametrize("reader", [HfReader, HfWeights])
def test_a_flipped_byte_is_told_by_every_reader(tmp_path, reader):
    tensors = every_type()
    write(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    right = path.read_bytes()
    assert all(bits(load_with(reader, tmp_path, name)).equal(bits(tensor)) for name, tensor in tensors.items())
    first = 8 + int.from_bytes(right[:8], "little")
    header = json.loads(right[8:first])
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        wrong = bytearray(right)
        wrong[first + header[name]["data_offsets"][1] - 1] ^= 4
        path.write_bytes(wrong)
        with pytest.raises(HfConfigError, match=rf"model\.safetensors is damaged: the checksum of {name} is wrong"):
            load_with(reader, tmp_path, name)


@pytest.mark.parametrize("reader", [HfReader, HfWeights])
def test_an_unfinished_file_is_no_model(tmp_path, reader):
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    write_until(tmp_path, tensors, 1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(HfConfigError, match=r"is unfinished: 1 of its 2 weights are not written; run the conversion"):
        reader(tmp_path)


def test_checksums_that_another_program_kept_are_told_and_can_be_left_out(tmp_path):
    write(tmp_path, {"a": torch.ones(2)})
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"a": torch.zeros(2)}, path, metadata=metadata)
    with pytest.raises(HfConfigError, match=r"another program .* kept the __metadata__, save it without crc32"):
        load_with(HfReader, tmp_path, "a")
    metadata.pop("crc32")
    save_file({"a": torch.zeros(2)}, path, metadata=metadata)
    assert load_with(HfReader, tmp_path, "a").equal(torch.zeros(2))


@pytest.mark.parametrize("text", ["", "00", "x" * 8, "0" * 16])
def test_a_text_of_another_program_is_no_checksum(tmp_path, text):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"crc32": text})
    assert load_with(HfReader, tmp_path, "a").equal(torch.ones(2))


def test_large_blocks_have_the_same_checksum(tmp_path):
    tensor = torch.randn(3 * 2**20)  # large enough for the checksum to be computed beside the writing
    write(tmp_path, {"a": tensor})
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata()["crc32"] == f"{zlib.crc32(tensor.numpy().data):08x}"
    assert math.prod(load_file(tmp_path / "model.safetensors")["a"].shape) == 3 * 2**20
