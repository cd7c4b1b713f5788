import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime_convert import ModelShape, verify
from slime_convert.convert import hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import HfConfigError, ToleranceError, UnsupportedModelError, WeightError
from slime_convert.families import FAMILIES
from slime_convert.files.reading import TensorReader, bytes_of
from slime_convert.files.tensors import LazyTensor
from slime_convert.files.writing import in_hand, write_files
from slime_convert.formats.torch_dist import TorchDistWeights
from slime_convert.formats.torch_dist_writer import MegatronTensor, new_release
from slime_convert.mapping import WeightMap
from tiny_models import CONFIGS, weights_of, write_model

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
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


def test_another_shape_is_told_and_the_worst_comes_first(one_origin, td, tmp_path):
    weights = weights_of(one_origin)
    weights["model.norm.weight"] = weights["model.norm.weight"][:7]
    weights[QUERY] = weights[QUERY] + 1
    weights["model.layers.0.self_attn.o_proj.weight"] += 9
    changed = write_hf(tmp_path / "changed", weights, one_origin)
    for other in (one_origin, td):
        found = verify(other, changed)
        assert [(d.kind, d.name.split(".")[-2]) for d in found.differences] == [
            ("shape", "norm"),
            ("values", "o_proj"),
            ("values", "q_proj"),
        ]
        assert (found.differences[0].left.shape, found.differences[0].right.shape) == ((24,), (7,))
    lines = found.to_text().splitlines()
    assert lines[-1].startswith("different: 33 equal, 1 shape, 2 values (") and "bfloat16 24" in lines[4]


def test_kinds_of_differences_are_in_order_of_what_they_mean(tmp_path, one_origin):
    """From what no tolerance allows down to what changes no value; within a kind the larger difference first."""
    step = 2.0**-12
    left = {name: torch.ones(2) for name in ("a", "b", "c", "d", "e", "gone")}
    right = {
        "a": torch.ones(2, dtype=torch.bfloat16),
        "b": torch.tensor([1.0, 1.0 + 2**-40], dtype=torch.float64),
        "c": torch.full((2,), 1 + step),
        "d": torch.full((2,), 1 + 2 * step),
        "e": torch.ones(3),
        "new": torch.ones(2),
    }
    found = verify(write_hf(tmp_path / "left", left, one_origin), write_hf(tmp_path / "right", right, one_origin))
    kinds = ["shape e", "missing gone", "extra new", "values d", "values c", "rounding b", "dtype a"]
    assert [f"{one.kind} {one.name}" for one in found.differences] == kinds


def test_long_lists_are_cut_in_text_only(one_origin, tmp_path):
    weights = {name: tensor + 1 for name, tensor in weights_of(one_origin).items()}
    found = verify(one_origin, write_hf(tmp_path / "all", weights, one_origin))
    assert "and 16 more, which --json lists" in found.to_text() and len(found.to_json()["differences"]) == 36


class TestTiedOutput:
    @pytest.fixture
    def model(self, tmp_path):
        weights = {EMBEDDING: torch.arange(15.0).view(5, 3), "model.norm.weight": torch.ones(3)}

        def write(name, config, **more):
            path = tmp_path / name
            path.mkdir()
            save_file(weights | {key: value.clone() for key, value in more.items()}, path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(config))
            return path

        return weights, write

    @pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}])
    def test_it_may_be_stored_or_not(self, model, config):
        weights, write = model
        bare, full = write("bare", config), write("full", config, **{OUTPUT: weights[EMBEDDING]})
        assert verify(bare, full).equal and verify(full, bare).equal
        assert (verify(bare, full).num_equal, verify(bare, bare).num_equal) == (3, 2)

    def test_one_that_is_not_the_embedding_differs(self, model):
        weights, write = model
        bare, full = write("bare", {}), write("full", {}, **{OUTPUT: weights[EMBEDDING] + 2})
        assert [(d.name, d.kind, d.max_abs_diff) for d in verify(full, bare).differences] == [(OUTPUT, "values", 2.0)]

    def test_a_model_with_an_output_layer_of_its_own_needs_it(self, model):
        weights, write = model
        config = {"tie_word_embeddings": False}
        bare, full = write("bare", config), write("full", config, **{OUTPUT: weights[EMBEDDING]})
        assert [(d.name, d.kind) for d in verify(full, bare).differences] == [(OUTPUT, "missing")]


def release(path, tensors, args):
    """A ``torch_dist`` checkpoint of any tensors."""
    path.mkdir()
    lazy = {
        name: LazyTensor.made(str(t.dtype).removeprefix("torch."), tuple(t.shape), lambda t=t: bytes_of(t))
        for name, t in tensors.items()
    }
    found = new_release(path, [MegatronTensor(in_hand(*item)) for item in lazy.items()], args)
    write_files(found.tensors)
    for name, data in found.others.items():
        (path / name).write_bytes(data)
    return path


UNKNOWN = {
    "embedding.word_embeddings.weight": torch.arange(24.0).view(8, 3),
    "decoder.layers.0.mixer.in_proj.weight": torch.ones(2, 3),
    "decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 3) * 2,
}


class TestMegatron:
    """Two checkpoints of a model that no table here describes."""

    def test_they_are_compared_under_megatrons_names(self, tmp_path):
        left = release(tmp_path / "left", UNKNOWN, {})
        changed = dict(UNKNOWN) | {"decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 3) * 5}
        right = release(tmp_path / "right", changed, {})
        assert verify(left, left).naming == "megatron" and verify(left, left).num_equal == 3
        (difference,) = verify(left, right).differences
        assert (difference.name, difference.max_abs_diff) == ("decoder.layers.1.mixer.in_proj.weight", 3.0)

    @pytest.mark.parametrize("args", [{}, {"vocab_size": 7}])
    def test_padding_does_not_count(self, tmp_path, args):
        embedding = "embedding.word_embeddings.weight"
        left = release(tmp_path / "left", UNKNOWN, args)
        padded = torch.cat([UNKNOWN[embedding], torch.full((4, 3), 9.0)])
        if args:
            padded[7] = -1
        right = release(tmp_path / "right", dict(UNKNOWN) | {embedding: padded}, args)
        assert verify(left, right).equal and verify(right, left).equal
        padded[6] = 0
        more = release(tmp_path / "more", dict(UNKNOWN) | {embedding: padded}, args)
        assert [d.name for d in verify(left, more).differences] == [embedding]

    def test_an_embedding_that_is_none_is_compared_too(self, tmp_path):
        """A single number has no rows to cut off."""
        odd = release(tmp_path / "odd", {"embedding.word_embeddings.weight": torch.tensor(3.0)}, {"vocab_size": 7})
        assert verify(odd, odd).num_equal == 1

    def test_hugging_face_needs_a_shape(self, one_origin, tmp_path):
        left = release(tmp_path / "left", UNKNOWN, {})
        bare = tmp_path / "bare"
        shutil.copytree(one_origin, bare)
        (bare / "config.json").unlink()
        with pytest.raises(HfConfigError, match=r"neither .* tells the model's shape.*origin_hf_dir="):
            verify(left, bare)
        (bare / "config.json").write_text('{"model_type": "mamba"}')
        with pytest.raises(UnsupportedModelError, match=r"model_type 'mamba'"):
            verify(bare, left)
        found = verify(left, bare, origin_hf_dir=one_origin)
        assert [d.name for d in found.differences if d.kind == "shape"] == [EMBEDDING]
        unknown = [d.name for d in found.differences if d.kind == "missing"]
        assert [name.split(".")[-2] for name in unknown] == ["in_proj", "in_proj"]


def test_the_shape_may_come_from_recorded_arguments(one_origin, td, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(one_origin, bare)
    (bare / "config.json").unlink()
    assert verify(bare, td).equal


def renamed(part):
    return dataclasses.replace(part, name=part.name.replace("self_attn", "attention"))


def test_arguments_that_fit_several_families_tell_no_names(one_origin, td, tmp_path, monkeypatch):
    """Megatron's own arguments do not name the family; those of a converted checkpoint do."""
    stock = tmp_path / "stock"
    shutil.copytree(td, stock)
    common = torch.load(stock / "release" / "common.pt")
    assert common["args"].pop("hf_model_type") == "qwen3"
    torch.save(common, stock / "release" / "common.pt")
    family = FAMILIES["qwen3"]
    other = dataclasses.replace(
        family, layer=tuple(dataclasses.replace(rule, hf=tuple(map(renamed, rule.hf))) for rule in family.layer)
    )
    bare = tmp_path / "bare"
    shutil.copytree(one_origin, bare)
    (bare / "config.json").unlink()
    monkeypatch.setitem(FAMILIES, "llama", family)
    assert verify(stock, stock).naming == "huggingface" and verify(bare, stock).equal
    monkeypatch.setitem(FAMILIES, "llama", other)
    assert (verify(stock, stock).naming, verify(stock, stock).num_equal) == ("megatron", 27)
    with pytest.raises(HfConfigError, match="origin_hf_dir="):
        verify(bare, stock)
    assert verify(td, td).naming == "huggingface" and verify(bare, td).equal


def test_another_padding_does_not_count(one_origin, td, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "other", make_vocab_size_divisible_by=7)
    found = verify(td, tmp_path / "other")
    assert found.equal and found.num_equal == 36


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
