"""Hugging Face → torch_dist → Hugging Face."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape, WeightMap, hf_to_torch_dist, megatron_to_hf, torch_dist_to_hf, verify
from slime_convert.convert import check_args
from slime_convert.errors import (
    CheckpointError,
    ConvertError,
    HfConfigError,
    OutputError,
    ShapeMismatchError,
    WeightError,
)
from slime_convert.formats import open_checkpoint
from tiny_models import (
    add_prediction_module,
    assert_same_weights,
    change_config,
    make_model,
    tree,
    weights_of,
    write_model,
)


def logits_of(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_round_trip_is_bit_equal(origin, converted, tmp_path):
    done = torch_dist_to_hf(converted, tmp_path / "back", origin)
    assert_same_weights(tmp_path / "back", origin)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (origin / name).read_bytes()
    assert torch.equal(logits_of(tmp_path / "back"), logits_of(origin))
    weights = weights_of(origin).values()
    assert (done.num_weights, done.num_bytes) == (len(weights), sum(tensor.nbytes for tensor in weights))
    assert done.path == tmp_path / "back" and done.copied == () and done.seconds > 0
    for left, right in ((origin, converted), (converted, tmp_path / "back")):
        assert verify(left, right).equal


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


def test_checkpoint_records_the_models_arguments(origin, converted):
    shape = ModelShape.from_hf_config(origin)
    args = open_checkpoint(converted).arguments
    expected = shape.to_megatron_args() | {
        "padded_vocab_size": 128,
        "make_vocab_size_divisible_by": 128,
        "params_dtype": "bfloat16",
        "mtp_num_layers": 0,  # transformers saves no prediction modules, whatever a config says
    }
    assert {"mtp_num_layers": 0} | args == {name: value for name, value in expected.items() if value is not None}
    check_args(shape.to_megatron_args(), args, converted)
    with pytest.raises(ShapeMismatchError, match=r"num_layers \d \(config: 4\).*hidden_size 24 \(config: 48\)"):
        check_args(shape.to_megatron_args() | {"num_layers": 4, "hidden_size": 48}, args, converted)
    assert args["hf_model_type"] == shape.family


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


def test_progress_ends_with_everything_done(one_origin, one_converted, tmp_path):
    there, back = [], []
    torch_dist_to_hf(one_converted, tmp_path / "back", one_origin, on_progress=lambda *call: back.append(call))
    hf_to_torch_dist(one_origin, tmp_path / "td", on_progress=lambda *call: there.append(call))
    for calls in (there, back):
        assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


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


def test_weights_that_would_be_lost_are_refused(origin, tmp_path):
    extended = shutil.copytree(origin, tmp_path / "extended")
    (extended / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({"model.layers.0.self_attn.further.bias": torch.zeros(24)}, extended / "extra.safetensors")
    with pytest.raises(WeightError, match=r"1 weights that a \w+ model does not have, such as .*further\.bias"):
        hf_to_torch_dist(extended, tmp_path / "td")
    assert list(tmp_path.iterdir()) == [extended]


def test_an_incomplete_model_is_refused(one_origin, tmp_path):
    broken = shutil.copytree(one_origin, tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(HfConfigError, match=r"cannot read .*safetensors"):
        hf_to_torch_dist(broken, tmp_path / "td")
    shard.unlink()
    with pytest.raises(HfConfigError, match=rf"1 of the .* files that .* names are missing, such as {shard.name}"):
        hf_to_torch_dist(broken, tmp_path / "td")
    (broken / "model.safetensors.index.json").unlink()
    with pytest.raises(WeightError, match=r"has no weight .*, which its config\.json asks for"):
        hf_to_torch_dist(broken, tmp_path / "td")
    for path in broken.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(HfConfigError, match=r"has no \*\.safetensors"):
        hf_to_torch_dist(broken, tmp_path / "td")
    assert list(tmp_path.iterdir()) == [broken]


def test_flags_are_checked(one_origin, tmp_path):
    with pytest.raises(ShapeMismatchError, match="--num-layers 7"):
        hf_to_torch_dist(one_origin, tmp_path / "td", flags={"num_layers": 7, "hidden_size": 24})
    with pytest.raises(
        ShapeMismatchError, match="make_vocab_size_divisible_by 0 must be a whole number from 1 to 1048576"
    ):
        hf_to_torch_dist(one_origin, tmp_path / "td", make_vocab_size_divisible_by=0)
    assert not any(tmp_path.iterdir())


def test_existing_output_is_kept_unless_forced(one_origin, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"exists already.*with force=True$"):
        hf_to_torch_dist(one_origin, tmp_path / "td")
    assert tree(tmp_path) == before
    stamp = (tmp_path / "td" / "release" / ".metadata").stat().st_mtime_ns
    hf_to_torch_dist(one_origin, tmp_path / "td", force=True)
    assert (tmp_path / "td" / "release" / ".metadata").stat().st_mtime_ns > stamp and tree(tmp_path) == before


def test_inputs_are_never_replaced(one_origin, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    before = tree(tmp_path)
    for output in (one_origin, one_origin / "new"):
        with pytest.raises(OutputError, match="the input"):
            torch_dist_to_hf(tmp_path / "td", output, one_origin, force=True)
    with pytest.raises(OutputError, match="is or holds the input"):
        torch_dist_to_hf(tmp_path / "td" / "release", tmp_path / "td", one_origin, force=True)
    assert tree(tmp_path) == before


def test_a_full_disk_is_said_and_what_is_written_stays(one_origin, one_converted, tmp_path, full_disk):
    with full_disk(5000), pytest.raises(OutputError, match=r"cannot write .*/new .*File too large.*again to continue"):
        hf_to_torch_dist(one_origin, tmp_path / "new")
    with full_disk(5000), pytest.raises(OutputError, match=r"cannot write .*/hf .*File too large.*again to continue"):
        torch_dist_to_hf(one_converted, tmp_path / "hf", one_origin)
    assert {path.name for path in tmp_path.iterdir()} == {".new.partial", ".hf.partial"}
    hf_to_torch_dist(one_origin, tmp_path / "new")
    torch_dist_to_hf(tmp_path / "new", tmp_path / "hf", one_origin)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "hf"}
    assert_same_weights(tmp_path / "hf", one_origin)


class TestTiedOutputLayer:
    """A different output layer was dropped with exit code 0."""

    def test_one_that_is_the_embedding_is_accepted(self, origin_of, tmp_path):
        directory = origin_of("qwen3-tied")
        weights = weights_of(directory)
        head = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
        both = write_model(tmp_path / "both", head, directory / "config.json")
        hf_to_torch_dist(both, tmp_path / "td")
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", both)
        assert verify(both, tmp_path / "td").equal and verify(both, tmp_path / "back").equal

    def test_another_is_refused(self, origin_of, tmp_path):
        directory = origin_of("qwen3-tied")
        weights = weights_of(directory)
        head = weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
        both = write_model(tmp_path / "both", head, directory / "config.json")
        with pytest.raises(WeightError, match=r"lm_head\.weight .* differs from model\.embed.*tie_word_embeddings"):
            hf_to_torch_dist(both, tmp_path / "td")
        assert not (tmp_path / "td").exists()
        change_config(both, tie_word_embeddings=False)
        hf_to_torch_dist(both, tmp_path / "td")
        assert verify(both, tmp_path / "td").equal


class TestTypes:
    """Checkpoints were written that could not be read."""

    @pytest.mark.parametrize("name", ["qwen3-moe", "deepseek", "qwen3-untied"])
    def test_one_type_for_each_kind_of_weight(self, made, tmp_path, name):
        weights = {
            key: tensor.float() if "norm" in key or key.endswith("bias") else tensor
            for key, tensor in weights_of(made(name)).items()
        }
        mixed = write_model(tmp_path / "mixed", weights, made(name) / "config.json")
        hf_to_torch_dist(mixed, tmp_path / "td")
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", mixed)
        assert verify(mixed, tmp_path / "td").equal
        assert_same_weights(tmp_path / "back", weights)

    @pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"])
    def test_a_layer_of_another_type_is_refused(self, one_origin, tmp_path, name):
        weights = weights_of(one_origin)
        weights[name] = weights[name].float()
        mixed = write_model(tmp_path / "mixed", weights, one_origin / "config.json")
        with pytest.raises(WeightError, match=r"have bfloat16 .*, float32 .*Megatron keeps them in one tensor; save"):
            hf_to_torch_dist(mixed, tmp_path / "td")
        assert not (tmp_path / "td").exists()

    def test_parts_of_one_weight_in_two_types_are_refused(self, one_origin, tmp_path):
        weights = weights_of(one_origin)
        weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].float()
        mixed = write_model(tmp_path / "mixed", weights, one_origin / "config.json")
        with pytest.raises(WeightError, match=r"gate_proj.* and .*up_proj.* have types bfloat16, float32"):
            hf_to_torch_dist(mixed, tmp_path / "td")

    def test_float64_and_integers(self, one_origin, tmp_path):
        wide = {name: tensor.double() for name, tensor in weights_of(one_origin).items()}
        origin = write_model(tmp_path / "wide", wide, one_origin / "config.json")
        hf_to_torch_dist(origin, tmp_path / "td")
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)
        assert_same_weights(tmp_path / "back", wide)
        wide["model.norm.weight"] = torch.ones(24, dtype=torch.int32)
        with pytest.raises(WeightError, match=r"model\.norm\.weight of .* has type int32; allowed: bfloat16"):
            hf_to_torch_dist(write_model(origin, wide, one_origin / "config.json"), tmp_path / "new")


MODULES = {"deepseek": "kimi_k2", "glm4-moe": None, "qwen2-untied": "mimo", "qwen3-next": None, "glm5": None}


class TestPredictionModules:
    @pytest.mark.parametrize(
        ("name", "copies"),
        [
            pytest.param(name, copies, marks=[] if copies or name == "deepseek" else pytest.mark.full)
            for name in MODULES
            for copies in (True, False)
        ],
    )
    def test_they_come_along(self, origin_of, tmp_path, name, copies):
        """With and without the copies of embedding and output layer."""
        origin = add_prediction_module(origin_of(name), copies=copies, model_type=MODULES[name])
        hf_to_torch_dist(origin, tmp_path / "td")
        assert "mtp.layers.0.eh_proj.weight" in open_checkpoint(tmp_path / "td").tensors
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)
        assert_same_weights(tmp_path / "back", origin)
        assert verify(origin, tmp_path / "td").equal and verify(tmp_path / "td", tmp_path / "back").equal

    @pytest.mark.parametrize("name", ["deepseek", "glm4-moe"])
    def test_without_their_weights_a_model_is_converted_without(self, origin_of, tmp_path, name):
        """Such as transformers saves: it keeps the config's key and drops the module."""
        origin = origin_of(name)
        change_config(origin, num_nextn_predict_layers=1)
        (note,) = hf_to_torch_dist(origin, tmp_path / "td").notes
        assert "lacks the model's prediction modules (1)" in note
        (note,) = torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin).notes
        assert "lacks the model's prediction modules (1)" in note
        assert_same_weights(tmp_path / "back", origin)
        assert verify(origin, tmp_path / "td").equal

    def test_a_part_of_one_is_refused(self, with_prediction_module, tmp_path):
        weights = load_file(with_prediction_module / "module.safetensors")
        del weights["model.layers.3.eh_proj.weight"]
        save_file(weights, with_prediction_module / "module.safetensors")
        with pytest.raises(WeightError, match=r"has no weight model\.layers\.3\.eh_proj\.weight"):
            hf_to_torch_dist(with_prediction_module, tmp_path / "td")

    def test_they_are_left_out_if_a_flag_says_so(self, with_prediction_module, tmp_path):
        (note,) = hf_to_torch_dist(with_prediction_module, tmp_path / "td", flags={"mtp_num_layers": 0}).notes
        assert "weights of prediction modules, such as model.layers.3." in note and "are left out" in note
        assert not [name for name in open_checkpoint(tmp_path / "td").tensors if name.startswith("mtp.")]
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", with_prediction_module, flags={"mtp_num_layers": 0})
        plain = {
            name: tensor
            for name, tensor in weights_of(with_prediction_module).items()
            if not name.startswith("model.layers.3.")
        }
        assert_same_weights(tmp_path / "back", plain)
        with pytest.raises(
            CheckpointError, match=r"has no weight mtp\.layers\.0\..* with add_missing_from_origin_hf=True"
        ):
            torch_dist_to_hf(tmp_path / "td", tmp_path / "whole", with_prediction_module)
        torch_dist_to_hf(tmp_path / "td", tmp_path / "whole", with_prediction_module, add_missing_from_origin_hf=True)
        assert_same_weights(tmp_path / "whole", with_prediction_module)
        with pytest.raises(ShapeMismatchError, match="--mtp-num-layers 2 is given, but the config says 1"):
            hf_to_torch_dist(with_prediction_module, tmp_path / "other", flags={"mtp_num_layers": 2})

    @pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
    def test_one_with_an_embedding_of_its_own_is_refused(self, with_prediction_module, tmp_path, copy):
        path = with_prediction_module / "module.safetensors"
        own = load_file(path)
        own[f"model.layers.3.{copy}.weight"] += 1
        save_file(own, path)
        with pytest.raises(WeightError, match=rf"layers\.3\.{copy}\.weight .* differs from"):
            hf_to_torch_dist(with_prediction_module, tmp_path / "td")


def saved_one_by_one(directory, origin):
    """The checkpoint that megatron-core writes under ``singleton_local_shards``, of Transformer Engine's layers.

    Nothing is stacked: each layer and each expert has keys of its own, and gate and up projections lie apart.
    """
    weight_map, weights, state = WeightMap(ModelShape.from_hf_config(origin)), weights_of(origin), {}
    for name in weight_map.megatron_names():
        tensor = weight_map.from_hf(name, weights.__getitem__)
        key = weight_map.engine_name(name)
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


@pytest.mark.parametrize("number", [1.5, "128", True, 0])
def test_a_number_of_another_kind_is_refused(one_origin, tmp_path, number):
    with pytest.raises(ShapeMismatchError, match=f"divisible_by {number} must be a whole number from 1 to 1048576"):
        hf_to_torch_dist(one_origin, tmp_path / "td", make_vocab_size_divisible_by=number)
    assert not list(tmp_path.iterdir())


def test_a_header_that_could_not_be_read_back_is_refused(one_origin, one_converted, tmp_path, monkeypatch):
    monkeypatch.setattr("slime_convert.formats.hf._MAX_HEADER_BYTES", 1500)
    with pytest.raises(WeightError, match=r"a header of \d+ bytes, .* allowed: 1500; write smaller files"):
        torch_dist_to_hf(one_converted, tmp_path / "out" / "hf", one_origin)
    assert not list(tmp_path.iterdir())
    torch_dist_to_hf(one_converted, tmp_path / "hf", one_origin, max_shard_bytes=10_000)


def test_frequencies_that_old_llama_files_store_follow_from_the_config(one_origin, tmp_path):
    weights = weights_of(one_origin) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    old = write_model(tmp_path / "old", weights, one_origin / "config.json")
    hf_to_torch_dist(old, tmp_path / "td")
    assert verify(old, tmp_path / "td").equal


def test_a_norm_that_cannot_be_stored_less_one_is_refused(made, tmp_path):
    """Qwen3-Next's gated norm: Megatron stores it less one, in a wider type, and a tiny number would be rounded."""
    weights = weights_of(made("qwen3-next"))
    weights["model.layers.0.linear_attn.norm.weight"][0] = 2.0**-100
    origin = write_model(tmp_path / "tiny", weights, made("qwen3-next") / "config.json")
    with pytest.raises(WeightError, match="cannot be stored less one, as Megatron has it, without rounding"):
        hf_to_torch_dist(origin, tmp_path / "td")
    assert not (tmp_path / "td").exists()


def test_a_norm_of_another_type_than_the_projection_before_it_is_refused(made, tmp_path):
    """Qwen3-Next's gated norm: what Megatron stores does not say its type, which is taken from the projection."""
    weights = weights_of(made("qwen3-next"))
    name = "model.layers.0.linear_attn.norm.weight"
    weights[name] = weights[name].float()
    origin = write_model(tmp_path / "tiny", weights, made("qwen3-next") / "config.json")
    with pytest.raises(WeightError, match=rf"{name} and .*in_proj.* have types bfloat16, float32, but Megatron"):
        hf_to_torch_dist(origin, tmp_path / "td")
    assert not (tmp_path / "td").exists()


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


def test_every_error_is_ours(tmp_path):
    with pytest.raises(ConvertError):
        hf_to_torch_dist(tmp_path / "none", tmp_path / "td")
    with pytest.raises(ConvertError):
        torch_dist_to_hf(tmp_path / "none", tmp_path / "hf", tmp_path / "none")
    assert not any(tmp_path.iterdir())
