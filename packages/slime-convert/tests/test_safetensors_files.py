import json
import os
import random
import shutil

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_convert.errors import HfConfigError
from slime_convert.hf import HfReader
from slime_convert.safetensors_files import INDEX, read_directory, read_header
from slime_convert.verify.hf_weights import HfWeights


def test_headers_are_what_the_library_reads(one_origin):
    entries = read_directory(one_origin)
    files = sorted(one_origin.glob("*.safetensors"))
    assert len(files) > 1 and {entry.path for entry in entries.values()} == set(files)
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {name for name, entry in entries.items() if entry.path == path}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor, entry = file.get_tensor(name), entries[name]
                raw = path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
                assert (entry.dtype, entry.shape) == ("bfloat16", tuple(tensor.shape))
                assert raw == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.fixture
def model(one_origin, tmp_path):
    shutil.copytree(one_origin, tmp_path / "model")
    return tmp_path / "model"


def last_shard(model):
    return sorted(model.glob("*.safetensors"))[-1]


@pytest.mark.parametrize("keep", [-1, 5, 0, 50])
def test_a_shard_that_is_cut_off_is_told(model, keep):
    path = last_shard(model)
    path.write_bytes(path.read_bytes()[:keep])
    told = r"is cut off: it has \d+ of \d+ bytes" if keep == -1 else "cannot read"
    with pytest.raises(HfConfigError, match=rf"{told}.*fetch the model again"):
        read_directory(model)


def test_a_missing_shard_is_told(model):
    last_shard(model).unlink()
    with pytest.raises(
        HfConfigError, match=r"1 of the 3 files that .* names are missing, such as model-00003-of-00003"
    ):
        read_directory(model)


def test_a_weight_that_the_index_promises_is_looked_for(model):
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = last_shard(model).name
    (model / INDEX).write_text(json.dumps(index))
    with pytest.raises(HfConfigError, match=r"names model\.layers\.9.* which does not hold it \(1 such weights\)"):
        read_directory(model)


@pytest.mark.parametrize("read", [read_directory, HfReader])
@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": 3, "b": "c"}}', '{"weight_map": []}']
)
def test_a_damaged_index_is_told(model, text, read):
    (model / INDEX).write_text(text)
    with pytest.raises(HfConfigError, match=r"cannot read .*index\.json"):
        read(model)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a of type F32 and shape .* has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, "a has shape .* and offsets 0 to -4"),
        ({"a": {"dtype": "I8", "shape": [-2, -2], "data_offsets": [0, 4]}}, r"a has shape \(-2, -2\) and offsets"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, r"a has shape \(1\.0,\) and offsets"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "not enough values"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "'dtype'"),
        ({"a": None}, "NoneType"),
        ([], "'list' object"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path, header, told):
    write(tmp_path / "a.safetensors", header, bytes(4))
    with pytest.raises(HfConfigError, match=rf"cannot read .*a\.safetensors \(.*{told}"):
        read_header(tmp_path / "a.safetensors")


def test_a_header_longer_than_any_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((10**8 + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * 10**8)  # without taking up space
    with pytest.raises(HfConfigError, match=r"a header of 100000001 bytes in a file of 200000000"):
        read_header(path)


def test_no_damage_is_told_by_anything_but_our_error(tmp_path):
    path, rng = tmp_path / "a.safetensors", random.Random(0)
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int8)}, path)
    data, refused = path.read_bytes(), 0
    for attempt in range(300):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 2 else data)
        for _ in range(0 if attempt % 2 else 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_header(path)
        except HfConfigError:
            refused += 1
    assert refused > 200


def write(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("offsets", "size", "told"),
    [
        ([(0, 4), (4, 8)], 8, None),
        ([(4, 8), (0, 4)], 8, None),
        ([(0, 4), (0, 4)], 4, "b overlaps another, or follows a gap"),
        ([(0, 4), (2, 6)], 6, "b overlaps another, or follows a gap"),
        ([(0, 4), (5, 9)], 9, "b overlaps another, or follows a gap"),
        ([(4, 8), (8, 12)], 12, "a overlaps another, or follows a gap"),
        ([(0, 4), (4, 8)], 9, "1 bytes follow its tensors"),
    ],
)
def test_tensors_lie_one_behind_another_as_the_library_asks(tmp_path, offsets, size, told):
    path = tmp_path / "a.safetensors"
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": place} for name, place in zip("ab", offsets, strict=True)
    }
    write(path, entries, bytes(size))
    if told is None:
        assert [(name, e.offset) for name, e in read_header(path).items()] == sorted(
            ((name, path.stat().st_size - size + place[0]) for name, place in zip("ab", offsets, strict=True)),
            key=lambda pair: pair[1],
        )
        safe_open(path, framework="pt")
        return
    with pytest.raises(HfConfigError, match=rf"cannot read .* \({told}\); fetch the model again"):
        read_header(path)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt")


def test_empty_tensors_share_their_place_with_the_next(tmp_path):
    tensors = {"z": torch.empty(0), "a": torch.ones(2), "b": torch.empty(0, 3), "c": torch.ones(1)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert {name: entry.shape for name, entry in read_header(tmp_path / "a.safetensors").items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    entries = {name: {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]} for name, n in (("a", 1), ("z", 0))}
    write(tmp_path / "b.safetensors", entries, bytes(4))
    assert list(read_header(tmp_path / "b.safetensors")) == ["z", "a"]
    safe_open(tmp_path / "b.safetensors", framework="pt")


@pytest.mark.parametrize("read", [read_directory, lambda path: HfReader(path).names])
def test_a_weight_in_two_files(tmp_path, read):
    """Of an older conversion, say: without an index nobody can tell which one counts."""
    for number in (1, 2):
        save_file(
            {"a": torch.full((2,), float(number)), f"b{number}": torch.ones(1)}, tmp_path / f"{number}.safetensors"
        )
    with pytest.raises(HfConfigError, match=r"^a is in .*/1\.safetensors and in .*/2\.safetensors \(1 such weights\)"):
        read(tmp_path)
    index = {"weight_map": {"a": "1.safetensors", "b1": "1.safetensors", "b2": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(read(tmp_path)) == {"a", "b1", "b2"}
    with HfReader(tmp_path) as reader, HfWeights(tmp_path) as weights:
        assert reader.load("a").tolist() == weights.load("a").tolist() == [1, 1]
