"""What torch has saved is read to the bit, into any tensor, and what is damaged is named."""

import argparse
import io
import pickle
import random
import re
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from slime_convert.errors import CheckpointError
from slime_megatron.checkpoints.reader import DirectReader, reading_directly

TENSORS = {
    "float32": torch.arange(15.0).reshape(3, 5),
    "transposed": torch.arange(28.0).reshape(7, 4).t(),
    "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3, dtype=torch.float16),
    "int64": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "float8": torch.arange(16.0).reshape(4, 4).to(torch.float8_e4m3fn),
}


class Marked(StreamTransformExtension):
    """Stands for compression: a byte before everything."""

    @staticmethod
    def registry_name():
        return "stream.marked"

    @classmethod
    def from_descriptor(cls, version):
        return cls()

    def get_descriptor(self):
        return "stream.marked/1"

    def transform_to(self, output):
        output.write(b"!")
        return output

    def transform_from(self, source):
        assert source.read(1) == b"!"
        return io.BytesIO(source.read())


@pytest.fixture
def saved(tmp_path):
    save(TENSORS | {"object": "of any kind"}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def read(directory, targets, reader=DirectReader):
    load(targets, storage_reader=reader(directory), no_dist=True)
    return targets


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("order", ["as saved", "reversed"])
@pytest.mark.parametrize("name", TENSORS)
def test_what_torch_has_saved(saved, name, order):
    """Into a tensor that lies as in the file, and into one that does not."""
    value = TENSORS[name]
    target = torch.zeros_like(value, memory_format=torch.contiguous_format)
    if order == "reversed" and value.dim() == 2:
        target = torch.zeros(value.shape[::-1], dtype=value.dtype).mT
    load({name: target}, storage_reader=DirectReader(saved), no_dist=True)
    assert torch.equal(bits(target), bits(value))
    target.untyped_storage().resize_(0)  # as while a trainer sleeps


class Foreign:
    """An object that says when it was unpickled."""

    unpickled = False

    def __reduce__(self):
        return _unpickle, ()


def _unpickle():
    Foreign.unpickled = True
    return "of any kind"


@pytest.mark.parametrize("reader", [DirectReader, FileSystemReader])
def test_no_object_is_run(tmp_path, reader):
    save({"object": Foreign(), "a": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    Foreign.unpickled = False
    found = {"a": torch.zeros(2)}
    with reading_directly({}):
        load(found, storage_reader=reader(tmp_path), no_dist=True)
        assert found["a"].tolist() == [1, 1]
        with pytest.raises(CheckpointException, match=r"object names \S+_unpickle, which may run code"):
            load({"object": ""}, storage_reader=reader(tmp_path), no_dist=True)
    assert not Foreign.unpickled
    load({"object": ""}, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert Foreign.unpickled  # what torch does


def test_an_object_that_megatron_core_saves(tmp_path):
    state = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
    state |= {"torch_rng_state": torch.get_rng_state(), "args": argparse.Namespace(a=1, b=[None, "x"])}
    save({"rng_state": (state,)}, storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    found = {"rng_state": None}
    with reading_directly({}):
        load(found, storage_reader=DirectReader(tmp_path), no_dist=True)
    [again] = found["rng_state"]
    assert again["random_rng_state"] == state["random_rng_state"] and again["args"] == state["args"]
    assert torch.equal(again["torch_rng_state"], state["torch_rng_state"])
    np.testing.assert_equal(again["np_rng_state"], state["np_rng_state"])


@pytest.mark.parametrize("place", ["../secret", "ABSOLUTE"])
def test_an_object_lies_in_the_checkpoint(saved, place):
    secret = saved.parent / f"{saved.name}-secret"
    secret.write_bytes((saved / "__0_0.distcp").read_bytes())
    place = place.replace("../secret", f"../{secret.name}").replace("ABSOLUTE", str(secret))
    path = saved / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_data[MetadataIndex("object")].relative_path = place
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="outside the checkpoint's directory"):
        load({"object": ""}, storage_reader=DirectReader(saved), no_dist=True)


def test_an_object(saved):
    state = {"object": ""}
    load(state, storage_reader=DirectReader(saved), no_dist=True)
    assert state == {"object": "of any kind"}


@pytest.mark.parametrize("name", ["float32", "int64"])
def test_another_type_is_converted_as_torch_does(saved, name):
    found, expected = (
        read(saved, {name: torch.zeros(TENSORS[name].shape, dtype=torch.bfloat16)}, reader)[name]
        for reader in (DirectReader, FileSystemReader)
    )
    assert torch.equal(found, expected) and found.dtype == torch.bfloat16


class Blocks:
    """Of a load planner what gives a reader the places of some blocks."""

    def __init__(self, blocks):
        self.targets = {block: torch.zeros([stop - start for start, stop in block]) for block in blocks}
        self.done = []

    def resolve_tensor(self, item):
        return self.targets[tuple((at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))]

    def commit_tensor(self, item, tensor):
        self.done.append(tensor)


SIDES = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted).map(tuple) for size in (3, 4, 5)]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.tuples(*SIDES)))
def test_blocks_of_a_tensor(blocks):
    """Rows are read alone, columns from the whole; several blocks of a tensor in one go."""
    value = torch.arange(60.0).reshape(3, 4, 5)
    with tempfile.TemporaryDirectory() as directory:
        save({"a": value}, storage_writer=FileSystemWriter(directory), no_dist=True)
        reader, planner, place = DirectReader(directory), Blocks(blocks), MetadataIndex("a", [0, 0, 0])
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
        items = [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=place,
                dest_offsets=torch.Size([0, 0, 0]),
                storage_index=place,
                storage_offsets=torch.Size([start for start, _ in block]),
                lengths=torch.Size([stop - start for start, stop in block]),
            )
            for block in planner.targets
        ]
        reader.read_data(LoadPlan(items), planner)
    assert len(planner.done) == len(items)
    for block, found in planner.targets.items():
        assert torch.equal(found, value[tuple(slice(*sides) for sides in block)])


def test_what_was_transformed_is_read_by_torch(tmp_path):
    known, value = ExtensionRegistry(), TENSORS["float32"]
    known.register(Marked)
    save({"a": value}, storage_writer=FileSystemWriter(tmp_path, _extensions=[Marked()]), no_dist=True)
    found = {"a": torch.zeros(3, 5)}
    load(found, storage_reader=DirectReader(tmp_path, _extension_registry=known), no_dist=True)
    assert torch.equal(found["a"], value)


def test_a_flipped_bit_is_named(saved):
    """torch's own reader takes it."""
    value = TENSORS["float32"]
    [file] = saved.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.find(value.numpy().tobytes()) + 7] ^= 1
    file.write_bytes(data)
    assert not torch.equal(read(saved, {"float32": torch.zeros(3, 5)}, FileSystemReader)["float32"], value)
    with pytest.raises(CheckpointException) as caught:
        read(saved, {"float32": torch.zeros(3, 5)})
    [(error, _)] = caught.value.failures.values()
    assert isinstance(error, CheckpointError)
    assert re.search(r"is damaged: the checksum of float32 is wrong", str(error))
