"""Headers that are read without torch, against torch's own reader."""

import io
import json
import pickle
import random
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert.checkpoint import ITEM_BYTES
from slime_convert.errors import CheckpointError
from slime_convert.torch_dist import WeightSource, write_release
from slime_convert.torch_dist.headers import read_headers
from slime_convert.torch_dist.layout import Place, layers_under, places

DTYPES = [getattr(torch, name) for name in ITEM_BYTES]


def write(path, state, common):
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save(common, path / "common.pt")
    return path


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3)),
        max_size=4,
    )
)
def test_tensors_are_those_that_torch_reads(tmp_path_factory, kinds):
    state = {f"x{name}": torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in kinds.items()}
    state["bytes"] = io.BytesIO(b"no tensor")
    path = write(tmp_path_factory.mktemp("any") / "iter_0000003", state, {"iteration": 3})
    headers = read_headers(path)
    assert set(headers.tensors) == set(state) - {"bytes"} and headers.iteration == 3
    for name, info in headers.tensors.items():
        tensor = state[name]
        found = (info.name, f"torch.{info.dtype}", info.shape, info.nbytes)
        assert found == (name, str(tensor.dtype), tuple(tensor.shape), tensor.nbytes)
    assert headers.files == {file.name: file.stat().st_size for file in path.glob("*.distcp")}


class Foreign:
    unpickled = False

    def __reduce__(self):
        return (_unpickle, ())


def _unpickle():
    Foreign.unpickled = True
    return Foreign()


@pytest.fixture
def iteration(tmp_path):
    args = types.SimpleNamespace(
        num_layers=2, lr=0.5, path=["a", 1], none=None, tensor=torch.ones(3), foreign=Foreign()
    )
    return write(tmp_path / "iter_0000012", {"a": torch.ones(3), "b": torch.zeros(2, 2)}, {"args": args})


def test_arguments_are_read_and_foreign_code_is_not_run(iteration):
    assert read_headers(iteration).arguments == {"num_layers": 2, "lr": 0.5, "path": ["a", 1]}
    (iteration / ".metadata").write_bytes(pickle.dumps(Foreign()))
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata.*damaged, use another"):
        read_headers(iteration)
    assert not Foreign.unpickled


def test_enums_that_python_3_11_0_pickled_through_getattr_are_read(iteration):
    """Python 3.11.0 to 3.11.3 pickle an enum's member as ``getattr(its class, its name)``."""
    path = iteration / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if type(value).__name__ == "_MEM_FORMAT_ENCODING":
                return getattr, (type(value), value.name)
            return NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(metadata)
    path.write_bytes(buffer.getvalue())
    assert set(read_headers(iteration).tensors) == {"a", "b"}


def test_files_that_are_cut_off_or_gone_are_told(iteration):
    (path,) = iteration.glob("*.distcp")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=rf"is cut off: it has {len(data) - 1} of {len(data)} bytes; copy"):
        read_headers(iteration)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"1 of the 1 files that .*\.metadata names are missing, such as __0_0"):
        read_headers(iteration)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_no_damage_is_told_by_anything_but_our_error(iteration, name):
    path, rng = iteration / name, random.Random(0)
    data, refused = path.read_bytes(), 0
    for attempt in range(300):
        damaged = bytearray(data[: rng.randrange(len(data))] if attempt % 2 else data)
        for _ in range(0 if attempt % 2 else 4):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            read_headers(iteration)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_layers_of_a_stack_are_found_back():
    key, shape = "decoder.layers.mlp.linear_fc2.weight", (3, 5, 4)
    layers = dict(layers_under(key, shape))
    assert set(layers.values()) == {(5, 4)} and len(layers) == 3
    for number, name in enumerate(layers):
        assert Place((key,), number) in places(name)
    for alone in ("decoder.layers.2.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"):
        assert list(layers_under(alone, (5,))) == [(alone, (5,))]


def test_a_release_is_read(tmp_path):
    tensor = torch.ones(4, 2, dtype=torch.bfloat16)
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in range(3)]
    write_release(tmp_path, [WeightSource(name, (4, 2), tensor.dtype, lambda: tensor) for name in names], {"a": 1})
    headers = read_headers(tmp_path / "release")
    (info,) = headers.tensors.values()
    assert (info.shape, info.dtype, info.nbytes, headers.arguments) == ((3, 4, 2), "bfloat16", 48, {"a": 1})
    assert [name for name, _ in layers_under(info.name, info.shape)] == names
    assert json.loads((tmp_path / "release" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
