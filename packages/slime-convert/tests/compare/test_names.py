import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from slime_convert import hf_to_torch_dist, verify
from slime_convert.errors import HfConfigError, UnsupportedModelError
from slime_convert.families import FAMILIES
from support.releases import write_release

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def td(one_converted):
    """The ``torch_dist`` checkpoint of ``one_origin``. Not to be changed."""
    return one_converted


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


UNKNOWN = {
    "embedding.word_embeddings.weight": torch.arange(24.0).view(8, 3),
    "decoder.layers.0.mixer.in_proj.weight": torch.ones(2, 3),
    "decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 3) * 2,
}


class TestMegatron:
    """Two checkpoints of a model that no table here describes."""

    def test_they_are_compared_under_megatrons_names(self, tmp_path):
        left = write_release(tmp_path / "left", UNKNOWN, {})
        changed = dict(UNKNOWN) | {"decoder.layers.1.mixer.in_proj.weight": torch.ones(2, 3) * 5}
        right = write_release(tmp_path / "right", changed, {})
        assert verify(left, left).naming == "megatron" and verify(left, left).num_equal == 3
        (difference,) = verify(left, right).differences
        assert (difference.name, difference.max_abs_diff) == ("decoder.layers.1.mixer.in_proj.weight", 3.0)

    @pytest.mark.parametrize("args", [{}, {"vocab_size": 7}])
    def test_padding_does_not_count(self, tmp_path, args):
        embedding = "embedding.word_embeddings.weight"
        left = write_release(tmp_path / "left", UNKNOWN, args)
        padded = torch.cat([UNKNOWN[embedding], torch.full((4, 3), 9.0)])
        if args:
            padded[7] = -1
        right = write_release(tmp_path / "right", dict(UNKNOWN) | {embedding: padded}, args)
        assert verify(left, right).equal and verify(right, left).equal
        padded[6] = 0
        more = write_release(tmp_path / "more", dict(UNKNOWN) | {embedding: padded}, args)
        assert [d.name for d in verify(left, more).differences] == [embedding]

    def test_an_embedding_that_is_none_is_compared_too(self, tmp_path):
        """A single number has no rows to cut off."""
        odd = write_release(
            tmp_path / "odd", {"embedding.word_embeddings.weight": torch.tensor(3.0)}, {"vocab_size": 7}
        )
        assert verify(odd, odd).num_equal == 1

    def test_hugging_face_needs_a_shape(self, one_origin, tmp_path):
        left = write_release(tmp_path / "left", UNKNOWN, {})
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
