import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert import ModelShape, hf_to_torch_dist, torch_dist_to_hf, verify
from slime_convert.errors import ToleranceError, WeightError
from slime_convert.files.reading import TensorReader
from slime_convert.formats.torch_dist import TorchDistWeights
from slime_convert.mapping import WeightMap
from support.family_models import CONFIGS, weights_of, write_model

QUERY = "model.layers.1.self_attn.q_proj.weight"


def write_hf(path, weights, origin):
    """A directory in one file with another one's config."""
    return write_model(path, weights, origin / "config.json")


@pytest.fixture(scope="module")
def td(one_converted):
    """The ``torch_dist`` checkpoint of ``one_origin``. Not to be changed."""
    return one_converted


@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(name, marks=[] if name in ("qwen2-tied", "deepseek", "gpt-oss") else pytest.mark.full)
        for name in CONFIGS
    ],
    indirect=True,
)
def test_a_conversion_is_equal_both_ways(origin, converted, tmp_path):
    torch_dist_to_hf(converted, tmp_path / "back", origin, max_shard_bytes=10_000)
    total = sum(tensor.nbytes for tensor in weights_of(origin).values())
    for left, right in [(origin, converted), (converted, origin), (origin, tmp_path / "back")]:
        found = verify(left, right)
        assert found.equal and found.naming == "huggingface" and not found.notes
        assert found.num_equal == len(weights_of(origin)) and found.nbytes == 2 * total
    assert verify(converted, converted / "release").equal


@settings(max_examples=25)
@given(data=st.data())
def test_one_bit_is_found_and_named(one_origin, td, tmp_path_factory, data):
    weights = weights_of(one_origin)
    name = data.draw(st.sampled_from(sorted(weights)))
    flat = weights[name].view(-1).view(torch.int16)
    index, bit = data.draw(st.integers(0, len(flat) - 1)), data.draw(st.integers(0, 15))
    before = float(weights[name].view(-1)[index])
    flat[index] ^= torch.tensor(1 << bit).to(torch.int16)
    after = float(weights[name].view(-1)[index])
    changed = write_hf(tmp_path_factory.mktemp("changed"), weights, one_origin)
    for other in (one_origin, td):
        found = verify(other, changed)
        (difference,) = found.differences
        assert (difference.name, difference.kind, difference.num_differing) == (name, "values", 1)
        assert difference.max_abs_diff == (abs(before - after) if math.isfinite(after) else math.inf)
        assert found.num_equal == len(weights) - 1
        assert verify(changed, other, tolerance=difference.max_abs_diff).equal


@settings(max_examples=15)
@given(data=st.data())
def test_missing_and_extra_weights_are_named(one_origin, td, tmp_path_factory, data):
    weights = weights_of(one_origin)
    gone = data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=1, max_size=3))
    smaller = {name: tensor for name, tensor in weights.items() if name not in gone}
    path = write_hf(tmp_path_factory.mktemp("smaller"), smaller, one_origin)
    for other in (one_origin, td):
        missing = verify(other, path, tolerance=1e30).differences
        assert [(d.name, d.kind, d.right) for d in missing] == [(name, "missing", None) for name in sorted(gone)]
        extra = verify(path, other).differences
        assert [(d.name, d.kind, d.left) for d in extra] == [(name, "extra", None) for name in sorted(gone)]


def test_types_are_told_apart_and_measured(one_origin, td, tmp_path):
    """Against a loop over Python's floats."""
    weights = weights_of(one_origin)
    wide = {name: tensor.float() for name, tensor in weights.items()}
    wide[QUERY] = wide[QUERY] + torch.linspace(0, 1e-3, wide[QUERY].numel()).view(wide[QUERY].shape)
    path = write_hf(tmp_path / "wide", wide, one_origin)
    pairs = zip(weights[QUERY].view(-1).tolist(), wide[QUERY].view(-1).tolist(), strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    for other in (one_origin, td):
        found = verify(other, path)
        assert [d.kind for d in found.differences] == ["values", *["dtype"] * (len(weights) - 1)]
        assert (found.differences[0].name, found.differences[0].max_abs_diff) == (QUERY, worst)
        assert all(d.max_abs_diff == 0 and d.num_differing == 0 for d in found.differences[1:])
        assert [d.name for d in verify(other, path, tolerance=0).differences] == [QUERY]
        within = verify(other, path, tolerance=worst)
        assert within.equal and (within.num_equal, within.num_within) == (0, len(weights))


def test_the_same_nan_is_no_difference(one_origin, tmp_path):
    weights = weights_of(one_origin)
    weights[QUERY][0, :2] = torch.nan
    first = write_hf(tmp_path / "first", weights, one_origin)
    hf_to_torch_dist(first, tmp_path / "td")
    assert verify(first, tmp_path / "td").equal
    weights[QUERY][0, 0] = 1.0
    found = verify(tmp_path / "td", write_hf(tmp_path / "second", weights, one_origin), tolerance=1e9)
    assert [(d.name, d.num_differing, d.max_abs_diff) for d in found.differences] == [(QUERY, 1, math.inf)]
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["differences"][0]["max_abs_diff"] == "inf"


def test_a_trainers_iteration_is_equal(one_origin, td, tmp_path):
    """Layers apart, gate and up apart, more padding, and optimizer state, which is not compared."""
    checkpoint = TorchDistWeights(td / "release")
    state = {"optimizer.state.exp_avg.embedding.word_embeddings.weight": torch.ones(7, 4)}
    for name in WeightMap(ModelShape.from_hf_config(one_origin)).megatron_names():
        with TensorReader() as reader:
            whole = reader.load(checkpoint.tensor(name))
        if name.endswith("linear_fc1.weight"):
            state[name + "_w"], state[name + "_v"] = whole.chunk(2)
        elif whole.shape[0] == 128:
            state[name] = torch.cat([whole, torch.ones_like(whole)])
        else:
            state[name] = whole
    path = tmp_path / "iter_0000002"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": SimpleNamespace(**checkpoint.arguments)}, path / "common.pt")
    for other in (one_origin, td):
        found = verify(path, other)
        assert found.equal and found.num_equal == 36


def test_arguments_that_contradict_the_config_are_noted(one_origin, td, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(one_origin, other)
    config = json.loads((other / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5e5
    config["model_type"] = "llama"
    (other / "config.json").write_text(json.dumps(config))
    found = verify(td, other)
    assert not found.equal and len(found.notes) == 1
    told = (
        "hf_model_type qwen3 (config: llama); rotary_base 10000.0 (config: 500000.0); qk_layernorm True (config: False)"
    )
    assert told in found.to_text()


def test_more_layers_than_the_config_says_are_extra(one_origin, td, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(one_origin, other)
    config = json.loads((other / "config.json").read_text())
    fewer = {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (other / "config.json").write_text(json.dumps(config | fewer))
    kinds = {(d.kind, d.name.split(".")[0]) for d in verify(other, td).differences}
    assert kinds == {("missing", "model"), ("extra", "decoder")}


def test_progress_ends_with_everything_done(one_origin, td):
    calls = []
    found = verify(one_origin, td, on_progress=lambda *call: calls.append(call))
    assert calls[0] == (0, found.nbytes) and calls == sorted(calls) and calls[-1] == (found.nbytes, found.nbytes)
    assert len(calls) == found.num_equal + 1


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_tolerance_that_is_none_is_refused(one_origin, tolerance):
    with pytest.raises(ToleranceError, match="must be 0 or more"):
        verify(one_origin, one_origin, tolerance=tolerance)


def test_a_type_that_torch_does_not_have_is_refused(tmp_path):
    header = json.dumps({"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(WeightError, match=r"x of .* has type F6_E2M3, which cannot be read"):
        verify(tmp_path, tmp_path)
