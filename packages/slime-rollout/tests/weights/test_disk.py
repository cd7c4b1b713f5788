"""Whole checkpoints through files, with engines that only listen."""

import pickle

import pytest
import torch

from slime_core.errors import DataError
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.weights import DiskWeightChannel


@pytest.fixture
def channel(engines, tmp_path, hf_checkpoint):
    urls = tuple(engine.url for engine in engines)
    return DiskWeightChannel(urls, directory=str(tmp_path / "shared"), hf_checkpoint=str(hf_checkpoint))


def push(channel, weights, version):
    channel.begin(WeightUpdate(version=version))
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
    channel.begin(WeightUpdate(version=1))
    channel.send(list(first.items()))
    assert not engines[0].asked
    channel.end()
    assert engines[0].paths()[:3] == ["/pause_generation", "/update_weight_version", "/update_weights_from_disk"]


def test_an_error_before_engines_load_leaves_them_as_they_are(channel, engines, tmp_path, first):
    push(channel, first, 1)
    channel.begin(WeightUpdate(version=2))
    with pytest.raises(DataError, match="has shape"):
        channel.send([("model.norm.weight", torch.ones(9))])
    channel.begin(WeightUpdate(version=3))
    with pytest.raises(WeightSyncError, match="weight version 3: no tensor was sent"):
        channel.end()
    assert [engine.version for engine in engines] == ["1", "1"]
    assert versions(tmp_path) == ["weight_v000001"]


def test_a_directory_that_cannot_be_written_is_one_error(channel, tmp_path):
    (tmp_path / "shared").write_text("a file")
    with pytest.raises(WeightSyncError, match=r"weight version 1: .*File exists: .*shared"):
        channel.begin(WeightUpdate(version=1))


def test_a_version_that_an_engine_refuses_is_removed_and_the_one_before_stays(channel, engines, tmp_path, first):
    push(channel, first, 1)
    engines[1].refuse["/update_weights_from_disk"] = "cannot load"
    with pytest.raises(WeightSyncError, match="cannot load") as caught:
        push(channel, first, 2)
    assert caught.value.url == engines[1].url
    assert versions(tmp_path) == ["weight_v000001"]
    assert [engine.version for engine in engines] == ["incomplete", "incomplete"]
