"""Megatron checkpoints → Hugging Face: of one model and its config, with all of its weights."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape, WeightMap, hf_to_torch_dist, megatron_to_hf, torch_dist_to_hf
from slime_convert.errors import CheckpointError, OutputError, ShapeMismatchError, WeightError
from support.family_models import assert_same_weights, change_config, make_model, tree, weights_of


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "qwen3"}', None])
def test_a_config_that_changes_meanwhile_is_noticed(one_origin, one_converted, tmp_path, text):
    origin = shutil.copytree(one_origin, tmp_path / "origin")

    def change(*_):
        path = origin / "config.json"
        path.unlink(missing_ok=True) if text is None else path.write_text(text)

    with pytest.raises(CheckpointError, match=r"config.json was changed while it was read; run the command again"):
        torch_dist_to_hf(one_converted, tmp_path / "back", origin, on_progress=change)
    assert [path.name for path in tmp_path.iterdir()] == ["origin"]


def test_copies_can_be_written_over_by_the_next_run(origin_of, tmp_path):
    """Though the originals are read-only, as in some caches."""
    directory = origin_of("llama-tied")
    templates = directory / "additional_chat_templates"
    templates.mkdir()
    for path in (templates / "tools.jinja", directory / "notes.txt"):
        path.write_text("text")
        path.chmod(0o444)
    templates.chmod(0o555)
    hf_to_torch_dist(directory, tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", directory)
    copies = [tmp_path / "back" / "additional_chat_templates" / "tools.jinja", tmp_path / "back" / "notes.txt"]
    assert all(path.read_text() == "text" for path in copies)
    assert all(path.stat().st_mode & 0o200 for path in (*copies, copies[0].parent))


@pytest.mark.parametrize("where", ["release", "."])
def test_shards_have_an_index_and_a_size(one_origin, one_converted, tmp_path, where):
    torch_dist_to_hf(one_converted / where, tmp_path / "back", one_origin, max_shard_bytes=10_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    back = weights_of(tmp_path / "back")
    assert_same_weights(back, weights_of(one_origin))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in back.values())
    assert all(sum(t.nbytes for t in load_file(tmp_path / "back" / name).values()) <= 10_000 for name in files)


@pytest.mark.parametrize(("name", "setting"), [("qwen2-tied", "add_qkv_bias"), ("qwen3-untied", "qk_layernorm")])
def test_an_origin_of_another_family_is_refused(origin_of, tmp_path, name, setting):
    directory = origin_of(name)
    hf_to_torch_dist(directory, tmp_path / "td")
    change_config(directory, model_type="llama")
    match = rf"hf_model_type \w+ \(config: llama\).*{setting} True \(config: False\)"
    for convert in (torch_dist_to_hf, megatron_to_hf):
        with pytest.raises(ShapeMismatchError, match=match):
            convert(tmp_path / "td", tmp_path / "back", directory)
    assert not (tmp_path / "back").exists()


def test_one_model_under_two_names_of_its_family_is_accepted(origin_of, tmp_path):
    """Kimi-K2 is often called ``deepseek_v3`` in an edited config."""
    directory = origin_of("deepseek")
    hf_to_torch_dist(directory, tmp_path / "td")
    change_config(directory, model_type="kimi_k2")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", directory)
    assert_same_weights(tmp_path / "back", directory)


def test_weights_of_another_type_are_named_in_the_config(one_origin, tmp_path):
    wide = tmp_path / "wide"
    AutoModelForCausalLM.from_pretrained(one_origin, dtype=torch.float32).save_pretrained(wide)
    hf_to_torch_dist(wide, tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", one_origin)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float32


def test_a_checkpoint_of_another_model_is_refused(one_origin, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    other = shutil.copytree(one_origin, tmp_path / "other")
    change_config(other, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    with pytest.raises(ShapeMismatchError, match=r"num_layers 3 \(config: 4\)"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", other)
    # A checkpoint that records no arguments is checked by its weights.
    torch.save({"iteration": 0}, tmp_path / "td" / "release" / "common.pt")
    with pytest.raises(CheckpointError, match=r"has no weight decoder\.layers\.3\..* \(8 such weights\)"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", other)
    shutil.copy(one_origin / "config.json", other)
    change_config(other, intermediate_size=41)
    with pytest.raises(WeightError, match=r"linear_fc1\.weight has shape \(\d+, 24\), but the model's config says"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", other)
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_without_arguments_is_noted(one_origin, tmp_path):
    """Nothing says then that the model is the config's."""
    hf_to_torch_dist(one_origin, tmp_path / "td")
    torch.save({"iteration": 0}, tmp_path / "td" / "release" / "common.pt")
    (note,) = torch_dist_to_hf(tmp_path / "td", tmp_path / "back", one_origin).notes
    assert "common.pt records no arguments" in note
    assert_same_weights(tmp_path / "back", one_origin)


def test_inputs_are_never_replaced(one_origin, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    before = tree(tmp_path)
    for output in (one_origin, one_origin / "new"):
        with pytest.raises(OutputError, match="the input"):
            torch_dist_to_hf(tmp_path / "td", output, one_origin, force=True)
    with pytest.raises(OutputError, match="is or holds the input"):
        torch_dist_to_hf(tmp_path / "td" / "release", tmp_path / "td", one_origin, force=True)
    assert tree(tmp_path) == before


def saved_one_by_one(directory, origin):
    """The checkpoint that megatron-core writes under ``singleton_local_shards``, of Transformer Engine's layers.

    Nothing is stacked: each layer and each expert has keys of its own, and gate and up projections lie apart.
    """
    weight_map, weights, state = WeightMap(ModelShape.from_hf_config(origin)), weights_of(origin), {}
    for name in weight_map.megatron_names():
        tensor = weight_map.from_hf(name, weights.__getitem__)
        key = weight_map.te_name(name)
        if weight_map.expert(name) is not None:
            key = name.replace("local_experts", "experts")
        if key.endswith("linear_fc1.weight"):
            state[f"{key}_w"], state[f"{key}_v"] = tensor.chunk(2)
        else:
            state[key] = tensor
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({}, directory / "common.pt")


@pytest.mark.parametrize("name", ["qwen3-moe", "glm4-moe", "llama-tied", "module"])
def test_layers_and_experts_that_lie_one_by_one_are_read(made, with_prediction_module, tmp_path, name):
    origin = with_prediction_module if name == "module" else made(name)
    saved_one_by_one(tmp_path / "td", origin)
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)
    assert_same_weights(tmp_path / "back", origin)


@pytest.mark.parametrize(
    ("name", "lacking", "told"),
    [
        ("gpt-oss", "mlp.experts.local_experts.3.linear_fc1.weight", "decoder.layers.0.mlp.experts.local_experts.3."),
        ("qwen3-next", "self_attention.in_proj.weight", r"decoder\.layers\.0\.self_attention\.in_proj\.weight"),
    ],
)
def test_a_weight_that_a_checkpoint_holds_in_part_is_not_copied(made, tmp_path, name, lacking, told):
    """Trained experts would be lost among those of the origin, where all of a layer are one tensor."""
    origin = made(name)
    weight_map, weights = WeightMap(ModelShape.from_hf_config(origin)), weights_of(origin)
    names = [name for name in weight_map.megatron_names() if not name.startswith("mtp.")]
    model = {name: weight_map.from_hf(name, weights.__getitem__) for name in names}
    place = tmp_path / "legacy" / "mp_rank_00"
    place.mkdir(parents=True)
    torch.save({"model": model}, place / "model_optim_rng.pt")
    assert megatron_to_hf(place.parent, tmp_path / "hf", origin, add_missing_from_origin_hf=True).copied == ()
    del model[f"decoder.layers.0.{lacking}"]
    torch.save({"model": model}, place / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match=rf"holds model\.layers\.0\..* only in part: it lacks {told}"):
        megatron_to_hf(place.parent, tmp_path / "part", origin, add_missing_from_origin_hf=True)
    assert not (tmp_path / "part").exists()


def test_a_header_that_could_not_be_read_back_is_refused(one_origin, one_converted, tmp_path, monkeypatch):
    monkeypatch.setattr("slime_convert.formats.hf._MAX_HEADER_BYTES", 1500)
    with pytest.raises(WeightError, match=r"a header of \d+ bytes, .* allowed: 1500; write smaller files"):
        torch_dist_to_hf(one_converted, tmp_path / "out" / "hf", one_origin)
    assert not list(tmp_path.iterdir())
    torch_dist_to_hf(one_converted, tmp_path / "hf", one_origin, max_shard_bytes=10_000)


def test_other_layers_than_the_config_says(origin_of, tmp_path):
    origin = make_model("qwen3-next", tmp_path / "origin")
    hf_to_torch_dist(origin, tmp_path / "td")
    change_config(origin, layer_types=["full_attention", *["linear_attention"] * 4])
    with pytest.raises(ShapeMismatchError, match="linear_attention_freq"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)


def test_a_sparse_indexer_in_the_order_of_a_later_megatron_is_refused(made, tmp_path):
    """Its rows' shapes fit, and their order is another."""
    hf_to_torch_dist(made("glm5"), tmp_path / "td")
    common = torch.load(tmp_path / "td" / "release" / "common.pt")
    common["args"]["dsa_indexer_topk_freq"] = 1
    torch.save(common, tmp_path / "td" / "release" / "common.pt")
    with pytest.raises(ShapeMismatchError, match="dsa_indexer_topk_freq 1, which gives weights another meaning"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", made("glm5"))
