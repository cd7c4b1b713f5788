"""Checkpoints as megatron-core and torch load them."""

import io
import json
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime_convert.errors import WeightError
from support.releases import EMBEDDING, FC1, FC1_KEY, NORM, load
from support.releases import write_release as write


def test_files_and_keys_are_those_that_megatron_core_asks_for(written):
    assert {path.name for path in written.iterdir()} == {".metadata", "__0_0.distcp", "common.pt", "metadata.json"}
    assert json.loads((written / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = torch.load(written / "common.pt", weights_only=True)
    assert common == {"args": {"num_layers": 3}, "checkpoint_version": 3.0, "iteration": 0}
    records = dcp.FileSystemReader(written).read_metadata().state_dict_metadata
    assert records["decoder.layers.self_attention.linear_qkv.layer_norm_weight"].size == (3, 4)
    assert records[FC1_KEY].size == (3, 6, 4)
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_2_3" in records


@pytest.mark.parametrize("part_bytes", [None, 200])
def test_torch_loads_the_stacked_tensors(tmp_path, weights, part_bytes):
    written = write(tmp_path / "release", weights, part_bytes=part_bytes)
    assert len(list(written.glob("*.distcp"))) == (3 if part_bytes else 1)
    loaded = {
        EMBEDDING: torch.zeros(7, 4),
        FC1_KEY: torch.zeros(3, 6, 4),
        "decoder.layers.mlp.linear_fc1._extra_state/shard_0_3": io.BytesIO(),
    }
    dcp.load(loaded, checkpoint_id=written, no_dist=True)
    assert torch.equal(loaded[EMBEDDING], weights[EMBEDDING])
    for layer, tensor in enumerate(loaded[FC1_KEY]):
        assert torch.equal(tensor, weights[FC1.format(layer)])
    assert loaded["decoder.layers.mlp.linear_fc1._extra_state/shard_0_3"] == [None]


def test_layers_that_differ_have_keys_of_their_own(tmp_path, weights):
    weights[FC1.format(1)] = torch.ones(2, 4)
    written = write(tmp_path / "release", weights, stack_layers=False)
    assert torch.equal(load(written, FC1.format(1)), weights[FC1.format(1)])
    loaded = {FC1.format(1): torch.zeros(2, 4)}
    dcp.load(loaded, checkpoint_id=written, no_dist=True)
    assert loaded[FC1.format(1)].all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({FC1.format(1): torch.ones(2, 4)}, r"have float32 \(2, 4\), float32 \(6, 4\), but Megatron keeps them in one"),
        ({FC1.format(1): torch.ones(6, 4).double()}, r"have float32 .*, float64 .*save the model with one type"),
        ({FC1.format(1): None}, r"linear_fc1\.weight is there for \[\(0,\), \(2,\)\], not for all of \(3,\) layers"),
    ],
)
def test_layers_that_cannot_be_stacked_are_refused(tmp_path, weights, changes, words):
    weights = {name: tensor for name, tensor in (weights | changes).items() if tensor is not None}
    with pytest.raises(WeightError, match=words):
        write(tmp_path / "release", weights)


class Foreign:
    unpickled = False

    def __reduce__(self):
        return (_unpickle, ())


def _unpickle():
    Foreign.unpickled = True
    return Foreign()


@pytest.fixture
def iteration(tmp_path, weights):
    """An iteration as a trainer leaves it: layers apart, gate and up apart, optimizer state, foreign types."""
    path = tmp_path / "iter_0000012"
    gate_up = weights[FC1.format(0)].chunk(2)
    state = {
        EMBEDDING: weights[EMBEDDING],
        NORM.format(0): weights[NORM.format(0)],
        FC1.format(0) + "_w": gate_up[0],
        FC1.format(0) + "_v": gate_up[1],
        f"optimizer.state.exp_avg.{EMBEDDING}": torch.ones(7, 4),
        "chained_0.optimizer.state.param.x": torch.ones(2),
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    args = types.SimpleNamespace(num_layers=1, lr=0.5, path=["a", 1], none=None, tensor=torch.ones(3), f=Foreign())
    torch.save({"args": args, "iteration": 12}, path / "common.pt")
    return path
