import json
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slime_convert.shards import SAFETENSORS_DTYPES, TensorSpec, write_shards


def spec_of(name, tensor):
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def write(directory, tensors, **kwargs):
    write_shards(directory, [spec_of(name, tensor) for name, tensor in tensors.items()], tensors.values(), **kwargs)


def every_type():
    """An odd number of elements of each type, so that nothing lies where its type wants it by chance."""
    bytes_ = torch.arange(24, dtype=torch.uint8)
    tensors = {name: bytes_[: 3 * dtype.itemsize].clone().view(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    tensors["BOOL"] = torch.tensor([True, False, True])
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "strided": torch.ones(3, 2).T}


def test_a_file_is_what_the_library_writes(tmp_path):
    tensors = every_type()
    write(tmp_path, tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape
        assert ours[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())


def test_shards_and_their_index(tmp_path):
    tensors = {f"w{number}": torch.full((size,), float(number)) for number, size in enumerate([10, 10, 10, 99, 1])}
    write(tmp_path, tensors, max_shard_bytes=80)
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 520}
    assert index["weight_map"] == dict(zip(tensors, [names[0], names[0], *names[1:]], strict=True))
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name].equal(tensors[name])


def test_one_tensor_is_held_at_a_time(tmp_path):
    specs = [TensorSpec(f"w{number}", torch.float32, (4,)) for number in range(5)]
    held = []

    def tensors():
        for number in range(5):
            assert all(reference() is None for reference in held)
            tensor = torch.full((4,), float(number))
            held.append(weakref.ref(tensor))
            yield tensor
            del tensor

    write_shards(tmp_path, specs, tensors())
    assert len(held) == 5


def test_a_tensor_that_is_not_as_announced_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a must be TensorSpec.*, not torch\.float32 \(2,\)"):
        write_shards(tmp_path, [TensorSpec("a", torch.float32, (3,))], [torch.zeros(2)])
    with pytest.raises(ValueError, match="more tensors than the 1 that were announced"):
        write_shards(tmp_path, [TensorSpec("a", torch.float32, (3,))], [torch.zeros(3), torch.zeros(3)])
