import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from safetensors.torch import load_file

from slime_core.errors import DamagedError, DataError, FormatVersionError, IntegrityError
from slime_rollout.weights import verify_checkpoint
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    NewDirectory,
    combined_checksum,
    tensor_bytes,
    tensor_checksum,
    verify_checksums,
    version_name,
)
from support.random_tensors import DTYPES, LAYOUTS, bits, random_tensor, relaid, tensors

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from slime_rollout.weights.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]) / "weight_v000007", Path(sys.argv[2]), 7)
writer.add([("w", torch.ones(9))])
os.kill(os.getpid(), signal.SIGKILL)
"""


@given(tensors())
def test_bytes_are_in_row_major_order_whatever_the_strides(tensor):
    assert list(tensor_bytes(tensor)) == bits(tensor)


def test_a_contiguous_tensor_is_not_copied():
    tensor = torch.zeros(3, 5, dtype=torch.bfloat16)
    tensor_bytes(tensor)[0] = 7
    assert tensor.view(torch.uint8)[0, 0] == 7


def test_a_checksum_never_changes():
    # Both ends may run different releases: these are part of the format.
    assert tensor_checksum(torch.empty(0)) == "80f2440afbea78c4448c8db646be1f7e"
    assert tensor_checksum(torch.arange(100_000)) == "417ad858b452f60e13bbadcc52fad7c1"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_memory_layout_makes_no_difference(dtype, layout):
    tensor = random_tensor(dtype, (30, 7, 13), 0)
    other = relaid(tensor, layout)
    assert other.stride() != tensor.stride() or layout in ("contiguous", "offset")
    assert tensor_checksum(other) == tensor_checksum(tensor)
    assert tensor_checksum(torch.nn.Parameter(tensor)) == tensor_checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_changes_the_checksum(dtype):
    tensor = random_tensor(dtype, (3,), 0)
    seen = {tensor_checksum(tensor)}
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(1 if dtype == torch.bool else 8):
            raw[place] ^= 1 << bit
            seen.add(tensor_checksum(tensor))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + raw.numel() * (1 if dtype == torch.bool else 8)


def test_dtype_and_shape_count():
    zeros = [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(5),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(()),
        torch.zeros(1),
    ]
    assert len({tensor_checksum(tensor) for tensor in zeros}) == len(zeros)


def test_many_tensors_have_one_checksum():
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"})
    others = [{"a": "2", "b": "1"}, {"a": "1"}, {}, {"a": "1", "b": "2", "c": "3"}]
    assert combined_checksum({"a": "1", "b": "2"}) not in [combined_checksum(other) for other in others]


def test_a_receiver_that_differs_is_told_where():
    sent = {f"w{i}": str(i) for i in range(9)}
    verify_checksums(dict(sent), sent)
    with pytest.raises(IntegrityError, match="of 9 tensors, 1 differ: w3; 1 are missing: w4; 1 were not sent: x; send"):
        verify_checksums({name: value for name, value in sent.items() if name != "w4"} | {"w3": "?", "x": "1"}, sent)
    with pytest.raises(IntegrityError, match="9 are missing: w0, w1, w2, w3, w4 …; send the weights again"):
        verify_checksums({}, sent)


def write(directory, hf_checkpoint, weights, version=7):
    writer = CheckpointWriter(directory / version_name(version), hf_checkpoint, version)
    named = list(weights.items())
    writer.add(named[:2])
    writer.add(named[2:])
    return writer.finish()


def test_a_version_is_a_whole_hugging_face_checkpoint(tmp_path, hf_checkpoint, first):
    views = {**first, "tied": first["model.embed_tokens.weight"], "part": first["model.embed_tokens.weight"][3:5, ::2]}
    path = write(tmp_path / "out", hf_checkpoint, views)
    assert path == tmp_path / "out" / "weight_v000007"
    assert {entry.name for entry in path.iterdir()} == {
        "config.json", "tokenizer.json", "slime_weights.json", "model.safetensors.index.json",
        "model-00001.safetensors", "model-00002.safetensors",
    }  # fmt: skip
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for name, tensor in views.items():
        assert load_file(path / index["weight_map"][name])[name].equal(tensor)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in views.values())
    assert verify_checkpoint(path).keys() == views.keys()
    assert [entry.name for entry in path.parent.iterdir()] == ["weight_v000007"]


def test_a_version_that_is_there_is_replaced(tmp_path, hf_checkpoint, first, step):
    write(tmp_path, hf_checkpoint, first)
    changed = step(first, 1)
    path = write(tmp_path, hf_checkpoint, changed)
    assert CheckpointReader(path).read("model.norm.weight").equal(changed["model.norm.weight"])
    assert "model.frozen" not in CheckpointReader(path).names
    assert not list(tmp_path.glob(".*"))


def test_a_writer_that_is_killed_leaves_no_version_and_the_next_removes_the_rest(tmp_path, hf_checkpoint, first):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(hf_checkpoint)], timeout=240, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("weight_v*")) and len(list(tmp_path.glob(".weight_v*"))) == 1
    write(tmp_path, hf_checkpoint, first, version=8)
    assert [path.name for path in tmp_path.glob("*weight_v*")] == ["weight_v000008"]


def test_a_tensor_that_comes_twice_is_an_error(tmp_path, hf_checkpoint):
    writer = CheckpointWriter(tmp_path / "weight_v000001", hf_checkpoint, 1)
    writer.add([("w", torch.ones(1))])
    with pytest.raises(DataError, match="w was sent twice in one update"):
        writer.add([("w", torch.ones(1))])
    writer.discard()
    assert not list(tmp_path.glob("*weight_v*"))


def test_a_flipped_byte_is_found(tmp_path, hf_checkpoint, first):
    path = write(tmp_path, hf_checkpoint, first)
    file = path / "model-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(IntegrityError, match="of 6 tensors, 1 differ"):
        verify_checkpoint(path)
    file.write_bytes(content[:40])
    with pytest.raises(DamagedError, match=r"model-00002.safetensors cannot be read"):
        verify_checkpoint(path)


def test_a_version_with_checksums_of_another_kind_is_refused_in_one_line(tmp_path, hf_checkpoint, first):
    path = write(tmp_path / "out", hf_checkpoint, first)
    about = path / "slime_weights.json"
    about.write_text(about.read_text().replace('"format_version": 2', '"format_version": 1'))
    with pytest.raises(FormatVersionError, match=r"slime_weights.json has format version 1, and this slime reads 2"):
        verify_checkpoint(path)


def test_a_directory_without_safetensors_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        CheckpointReader(tmp_path)


def test_what_is_published_is_on_disk_first(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    directory = NewDirectory(tmp_path / "weight_v000001")
    (directory.path / "file").write_text("x")
    hidden = directory.path.name
    directory.publish()
    assert synced == ["file", hidden, tmp_path.name]
