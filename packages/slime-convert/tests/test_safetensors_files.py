import json
import random
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime_convert.errors import HfConfigError
from slime_convert.safetensors_files import INDEX, read_directory, read_header


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


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_a_damaged_index_is_told(model, text):
    (model / INDEX).write_text(text)
    with pytest.raises(HfConfigError, match=r"cannot read .*index\.json"):
        read_directory(model)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"shape": [1], "data_offsets": [0, 4]}},
        {"a": None},
        [],
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path, header):
    data = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + b"\0" * 8)
    with pytest.raises(HfConfigError, match=r"cannot read .*a\.safetensors"):
        read_header(tmp_path / "a.safetensors")


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
