import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_core.errors import DamagedError, DataError, IntegrityError
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights import DiskWeightChannel, verify_checkpoint
from slime_rollout.weights.checkpoint import CheckpointReader, CheckpointWriter, NewDirectory, version_name

KILLED = """
import os, signal, sys, torch
from pathlib import Path
from slime_rollout.weights.checkpoint import CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]) / "weight_v000007", Path(sys.argv[2]), 7)
writer.add([("w", torch.ones(9))])
os.kill(os.getpid(), signal.SIGKILL)
"""


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
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(hf_checkpoint)], timeout=60, check=False)
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


def test_a_directory_without_safetensors_is_named(tmp_path):
    with pytest.raises(DataError, match=r"holds neither model.safetensors.index.json nor model.safetensors"):
        CheckpointReader(tmp_path)


def test_what_is_published_is_on_disk_first(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    directory = NewDirectory(tmp_path / "weight_v000001")
    (directory.path / "file").write_text("x")
    directory.publish()
    assert synced == ["file", directory.path.name, tmp_path.name]


@pytest.fixture
def channel(engines, tmp_path, hf_checkpoint):
    urls = tuple(engine.url for engine in engines)
    return DiskWeightChannel(urls, directory=str(tmp_path / "shared"), hf_checkpoint=str(hf_checkpoint))


def push(channel, weights, version):
    channel.begin(version)
    channel.send(list(weights.items())[:3])
    channel.send(list(weights.items())[3:])
    return channel.end()


def versions(tmp_path):
    return sorted(path.name for path in (tmp_path / "shared").glob("*weight_v*"))


def test_the_version_before_is_removed_once_the_next_is_confirmed(channel, engines, tmp_path, first):
    push(channel, first, 1)
    push(channel, first, 2)
    assert versions(tmp_path) == ["weight_v000002"]
    loads = [body["model_path"] for path, body in engines[0].asked if path == "/update_weights_from_disk"]
    assert loads == [str(tmp_path / "shared" / name) for name in ("weight_v000001", "weight_v000002")]
    channel.keep_files = True
    push(channel, first, 3)
    assert versions(tmp_path) == ["weight_v000002", "weight_v000003"]


def test_what_an_earlier_process_left_is_removed(channel, tmp_path, first):
    push(channel, first, 7)
    again = pickle.loads(pickle.dumps(channel))
    (tmp_path / "shared" / "weight_v000006").mkdir()  # nothing that was written by a channel
    push(again, first, 8)
    assert versions(tmp_path) == ["weight_v000006", "weight_v000008"]


def test_the_checkpoint_that_the_run_began_with_is_kept_wherever_it_is(channel, tmp_path, first):
    push(channel, first, 7)
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    channel.hf_checkpoint = str(tmp_path / "link" / "weight_v000007")
    again = pickle.loads(pickle.dumps(channel))
    push(again, first, 8)
    push(again, first, 9)
    assert versions(tmp_path) == ["weight_v000007", "weight_v000009"]


def test_engines_pause_only_to_load(channel, engines, first):
    channel.begin(1)
    channel.send(list(first.items()))
    assert not engines[0].asked
    channel.end()
    assert engines[0].paths()[:3] == ["/pause_generation", "/update_weight_version", "/update_weights_from_disk"]


def test_an_error_before_engines_load_leaves_them_as_they_are(channel, engines, tmp_path, first):
    push(channel, first, 1)
    channel.begin(2)
    with pytest.raises(DataError, match="has shape"):
        channel.send([("model.norm.weight", torch.ones(9))])
    channel.begin(3)
    with pytest.raises(WeightSyncError, match="weight version 3: no tensor was sent"):
        channel.end()
    assert [engine.version for engine in engines] == ["1", "1"]
    assert versions(tmp_path) == ["weight_v000001"]


def test_a_directory_that_cannot_be_written_is_one_error(channel, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(WeightSyncError, match=r"weight version 1: .*File exists: .*shared"):
        channel.begin(1)


def test_a_version_that_an_engine_refuses_is_removed_and_the_one_before_stays(channel, engines, tmp_path, first):
    push(channel, first, 1)
    engines[1].refuse["/update_weights_from_disk"] = "cannot load"
    with pytest.raises(WeightSyncError, match="cannot load") as caught:
        push(channel, first, 2)
    assert caught.value.url == engines[1].url
    assert versions(tmp_path) == ["weight_v000001"]
    assert [engine.version for engine in engines] == ["incomplete", "incomplete"]
