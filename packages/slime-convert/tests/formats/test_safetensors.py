"""Files are what the safetensors library reads and writes; damaged ones are refused, and bounded by their bytes."""

import json
import os
import random
import shutil
import zlib

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from slime_convert.errors import HfConfigError, WeightError
from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import LazyTensor
from slime_convert.files.writing import in_hand, write_files
from slime_convert.formats.hf import HfWeights
from slime_convert.formats.safetensors import INDEX, TORCH_NAMES, read_directory, read_header, shard_files
from support.family_models import same_bits, weights_of


def lazy(tensor):
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LazyTensor.made(dtype, tuple(tensor.shape), lambda: bytes_of(tensor))


def write(directory, tensors, **options):
    new = [in_hand(name, lazy(tensor)) for name, tensor in tensors.items()]
    files, index = shard_files(directory, new, **options)
    write_files(files)
    if index is not None:
        (directory / INDEX).write_text(index)


def load(directory, name):
    with TensorReader() as reader:
        tensor = reader.load(HfWeights(directory).tensor(name))
        reader.finish()
    return tensor


def every_type():
    """An odd number of elements of each type, so that nothing lies where its type wants it by chance."""
    bytes_ = torch.arange(24, dtype=torch.uint8)
    types = {name: getattr(torch, kind) for name, kind in TORCH_NAMES.items()}
    tensors = {name: bytes_[: 3 * dtype.itemsize].clone().view(dtype) for name, dtype in types.items()}
    tensors["BOOL"] = torch.tensor([True, False, True])
    return tensors | {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}


def test_a_file_is_what_the_library_writes(tmp_path):
    tensors = every_type()
    write(tmp_path, tensors)
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    ours, theirs = load_file(tmp_path / "model.safetensors"), weights_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == tensors.keys()
    assert all(same_bits(ours[name], tensor) for name, tensor in theirs.items())
    assert all(same_bits(load(tmp_path, name), tensor) for name, tensor in tensors.items())
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
    checksums = [zlib.crc32(bytes_of(tensors[name])) for name in in_file]
    assert metadata == {"crc32": "".join(f"{checksum:08x}" for checksum in checksums)}


def test_shards_and_their_index(tmp_path):
    tensors = {f"w{number}": torch.full((size,), float(number)) for number, size in enumerate([10, 10, 10, 99, 1])}
    write(tmp_path, tensors, max_shard_bytes=80)
    names = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 520}
    assert index["weight_map"] == dict(zip(tensors, [names[0], names[0], *names[1:]], strict=True))
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name].equal(tensors[name])


def test_every_flipped_byte_of_a_tensor_is_noticed(tmp_path):
    tensors = every_type()
    write(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    right = path.read_bytes()
    first = 8 + int.from_bytes(right[:8], "little")
    header = json.loads(right[8:first])
    for name, tensor in tensors.items():
        if tensor.numel():
            wrong = bytearray(right)
            wrong[first + header[name]["data_offsets"][1] - 1] ^= 4
            path.write_bytes(wrong)
            with pytest.raises(HfConfigError, match=rf"model\.safetensors is damaged: the checksum of {name} is wrong"):
                load(tmp_path, name)


def test_an_unfinished_file_is_not_a_model(tmp_path):
    tensors = [in_hand(name, lazy(torch.ones(2))) for name in "ab"]
    files, _ = shard_files(tmp_path, tensors)
    files[0].begin()
    with pytest.raises(
        HfConfigError, match=r"is unfinished: 2 of its 2 weights are not written; run the interrupted conversion again"
    ):
        HfWeights(tmp_path)


def test_checksums_that_another_program_kept_are_wrong_and_can_be_left_out(tmp_path):
    write(tmp_path, {"a": torch.ones(2)})
    path = tmp_path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({"a": torch.zeros(2)}, path, metadata=metadata)
    with pytest.raises(HfConfigError, match=r"another program .* kept the checksums .* save it without crc32"):
        load(tmp_path, "a")
    metadata.pop("crc32")
    save_file({"a": torch.zeros(2)}, path, metadata=metadata)
    assert load(tmp_path, "a").equal(torch.zeros(2))


@pytest.mark.parametrize("text", ["", "00", "x" * 8, "0" * 16])
def test_a_text_of_another_program_is_not_a_checksum(tmp_path, text):
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"crc32": text})
    assert load(tmp_path, "a").equal(torch.ones(2))


def test_headers_are_what_the_library_reads(one_origin):
    entries = read_directory(one_origin)
    files = sorted(one_origin.glob("*.safetensors"))
    assert len(files) > 1 and {entry.path for entry in entries.values()} == set(files)
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {name for name, entry in entries.items() if entry.path == path}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor, entry = file.get_tensor(name), entries[name]
                raw = path.read_bytes()[entry.offset : entry.offset + entry.info.nbytes]
                assert (entry.info.dtype, entry.info.shape) == ("bfloat16", tuple(tensor.shape))
                assert raw == bytes(bytes_of(tensor))


@pytest.fixture
def model(one_origin, tmp_path):
    return shutil.copytree(one_origin, tmp_path / "model")


def last_shard(model):
    return sorted(model.glob("*.safetensors"))[-1]


@pytest.mark.parametrize("keep", [-1, 5, 0, 50])
def test_a_shard_that_is_cut_off(model, keep):
    path = last_shard(model)
    path.write_bytes(path.read_bytes()[:keep])
    words = r"is cut off: it has \d+ of \d+ bytes" if keep == -1 else "cannot read"
    with pytest.raises(HfConfigError, match=rf"{words}.*fetch the model again"):
        read_directory(model)


def test_a_missing_shard(model):
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


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": {"a": 3, "b": "c"}}', '{"weight_map": []}']
)
def test_a_damaged_index(model, text):
    (model / INDEX).write_text(text)
    with pytest.raises(HfConfigError, match=r"(cannot read|is not valid JSON|holds a JSON).*"):
        read_directory(model)


@pytest.mark.parametrize("place", ["../secret.safetensors", "ABSOLUTE", "below/../../secret.safetensors"])
def test_an_index_leads_nowhere_else(model, place):
    """An index could name any file that the user may read."""
    secret = model.parent / "secret.safetensors"
    save_file({"model.norm.weight": torch.ones(24)}, secret)
    (model / "below").mkdir()
    place = str(secret) if place == "ABSOLUTE" else place
    (model / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    with pytest.raises(HfConfigError, match=r"outside the checkpoint's directory"):
        read_directory(model)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        read_directory(tmp_path)


def write_header(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "a of type float32 and shape .* has 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}, "a has shape .* and offsets 0 to -4"),
        ({"a": {"dtype": "I8", "shape": [-2, -2], "data_offsets": [0, 4]}}, r"a has shape \(-2, -2\) and offsets"),
        ({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, r"a has shape \(1\.0,\) and offsets"),
        ({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, "a of type float32"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "a is not described by dtype, shape"),
        ({"a": {"shape": [1], "data_offsets": [0, 4]}}, "a is not described by dtype, shape"),
        ({"a": None}, "a is not described by dtype, shape"),
        ([], "its header is not an object"),
        (b'{"a": {"dtype": "F32"}, "a": 1}', "a key occurs twice"),
        (b"[" * 10**5, "maximum recursion"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(tmp_path, header, words):
    write_header(tmp_path / "a.safetensors", header, bytes(4))
    with pytest.raises(HfConfigError, match=rf"cannot read .*a\.safetensors \(.*{words}"):
        read_header(tmp_path, "a.safetensors")


def test_a_weight_that_a_file_names_twice_is_refused(tmp_path):
    """The second of the two was taken silently, as JSON's readers do."""
    entry = b'"a":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    write_header(tmp_path / "a.safetensors", b"{" + entry % (0, 4) + b"," + entry % (4, 8) + b"}", bytes(8))
    with pytest.raises(HfConfigError, match="a key occurs twice"):
        read_header(tmp_path, "a.safetensors")


def test_a_header_longer_than_any_is_not_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((10**8 + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * 10**8)  # without taking up space
    with pytest.raises(HfConfigError, match=r"a header of 100000001 bytes in a file of 200000000"):
        read_header(tmp_path, path.name)


def test_damage_raises_nothing_but_our_error(tmp_path):
    path, rng = tmp_path / "a.safetensors", random.Random(0)
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.int8)}, path)
    data, refused = path.read_bytes(), 0
    for attempt in range(300):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 2 else data)
        for _ in range(0 if attempt % 2 else 3):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_header(tmp_path, path.name)
        except HfConfigError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("offsets", "size", "words"),
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
def test_tensors_lie_one_behind_another_as_the_library_asks(tmp_path, offsets, size, words):
    path = tmp_path / "a.safetensors"
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": place} for name, place in zip("ab", offsets, strict=True)
    }
    write_header(path, entries, bytes(size))
    if words is None:
        first = path.stat().st_size - size
        assert {name: entry.offset - first for name, entry in read_header(tmp_path, path.name).items()} == {
            name: place[0] for name, place in zip("ab", offsets, strict=True)
        }
        safe_open(path, framework="pt")
        return
    with pytest.raises(HfConfigError, match=rf"cannot read .* \({words}\); fetch the model again"):
        read_header(tmp_path, path.name)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="pt")


def test_empty_tensors_share_their_place_with_the_next(tmp_path):
    tensors = {"z": torch.empty(0), "a": torch.ones(2), "b": torch.empty(0, 3), "c": torch.ones(1)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert {name: entry.info.shape for name, entry in read_header(tmp_path, "a.safetensors").items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    entries = {name: {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]} for name, n in (("a", 1), ("z", 0))}
    write_header(tmp_path / "b.safetensors", entries, bytes(4))
    assert list(read_header(tmp_path, "b.safetensors")) == ["z", "a"]
    safe_open(tmp_path / "b.safetensors", framework="pt")


def test_a_weight_in_two_files(tmp_path):
    """Of an older conversion, say: without an index nobody can tell which one counts."""
    for number in (1, 2):
        save_file(
            {"a": torch.full((2,), float(number)), f"b{number}": torch.ones(1)}, tmp_path / f"{number}.safetensors"
        )
    with pytest.raises(HfConfigError, match=r"^a is in .*/1\.safetensors and in .*/2\.safetensors \(1 such weights\)"):
        read_directory(tmp_path)
    index = {"weight_map": {"a": "1.safetensors", "b1": "1.safetensors", "b2": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert set(read_directory(tmp_path)) == {"a", "b1", "b2"}
    assert load(tmp_path, "a").tolist() == [1, 1]


def test_a_type_that_torch_does_not_have(tmp_path):
    entry = {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    write_header(tmp_path / "model.safetensors", entry, b"abc")
    with pytest.raises(WeightError, match=r"x of .* has type F6_E2M3, which cannot be read"):
        load(tmp_path, "x")


def test_an_adapter_beside_a_model_is_not_part_of_its_weights(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"base_model.a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert set(read_directory(tmp_path)) == {"a"}
