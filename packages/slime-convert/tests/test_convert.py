import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape
from slime_convert.convert import check_args, hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import (
    CheckpointError,
    ConvertError,
    HfConfigError,
    OutputError,
    ShapeMismatchError,
    WeightError,
)
from slime_convert.mapping import WeightMap
from slime_convert.megatron_to_hf import megatron_to_hf
from slime_convert.torch_dist import TorchDistReader


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_round_trip_is_bit_equal(origin, converted, tmp_path):
    torch_dist_to_hf(converted, tmp_path / "back", origin)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(origin))
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (origin / name).read_bytes()
    model, _ = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours = model(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32)(ids).logits
    assert torch.equal(ours, theirs)


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
def test_shards_have_an_index_and_a_size(origin, converted, tmp_path, where):
    torch_dist_to_hf(converted / where, tmp_path / "back", origin, max_shard_bytes=10_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1 and files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    back = weights_of(tmp_path / "back")
    assert_equal_bits(back, weights_of(origin))
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in back.values())
    assert all(sum(t.nbytes for t in load_file(tmp_path / "back" / name).values()) <= 10_000 for name in files)


def test_checkpoint_records_the_models_arguments(origin, converted):
    shape = ModelShape.from_hf_config(origin)
    args = TorchDistReader(converted).args()
    expected = shape.to_megatron_args() | {
        "padded_vocab_size": 128,
        "make_vocab_size_divisible_by": 128,
        "params_dtype": "bfloat16",
    }
    assert args == {name: value for name, value in expected.items() if value is not None}
    check_args(shape.to_megatron_args(), args, converted)
    with pytest.raises(ShapeMismatchError, match=r"num_layers 3 \(config: 4\).*hidden_size 24 \(config: 48\)"):
        check_args(shape.to_megatron_args() | {"num_layers": 4, "hidden_size": 48}, args, converted)
    assert args["hf_model_type"] == shape.family


@pytest.mark.parametrize(
    ("name", "family", "told"),
    [
        ("qwen2-tied", "llama", r"hf_model_type qwen2 \(config: llama\); add_qkv_bias True \(config: False\); give"),
        ("qwen3-untied", "llama", r"hf_model_type qwen3 \(config: llama\); qk_layernorm True \(config: False\); give"),
    ],
)
def test_an_origin_of_another_family_is_told(origin_of, tmp_path, name, family, told):
    directory = origin_of(name)
    hf_to_torch_dist(directory, tmp_path / "td")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": family}))
    for convert in (torch_dist_to_hf, megatron_to_hf):
        with pytest.raises(ShapeMismatchError, match=told):
            convert(tmp_path / "td", tmp_path / "back", directory)
    assert not (tmp_path / "back").exists()


def test_one_model_under_two_names_of_its_family_is_no_mistake(origin_of, tmp_path):
    """Kimi-K2 is often called ``deepseek_v3`` in an edited config."""
    directory = origin_of("deepseek")
    hf_to_torch_dist(directory, tmp_path / "td")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", directory)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(directory))


def test_weights_of_another_type_are_told_in_the_config(origin, tmp_path):
    wide = tmp_path / "wide"
    AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float32).save_pretrained(wide)
    hf_to_torch_dist(wide, tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.float32


def test_progress_ends_with_everything_done(origin, converted, tmp_path):
    there, back = [], []
    torch_dist_to_hf(converted, tmp_path / "back", origin, on_progress=lambda *call: back.append(call))
    hf_to_torch_dist(origin, tmp_path / "td", on_progress=lambda *call: there.append(call))
    for calls in (there, back):
        assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


def test_a_checkpoint_of_another_model_is_refused(origin, converted, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(origin, other)
    config = json.loads((other / "config.json").read_text())
    if "mlp_layer_types" in config:
        config["mlp_layer_types"].append("sparse")
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ShapeMismatchError, match=r"num_layers 3 \(config: 4\)"):
        torch_dist_to_hf(converted, tmp_path / "back", other)
    # A checkpoint that records no arguments is checked by its weights.
    common = converted / "release" / "common.pt"
    torch.save({"iteration": 0}, common)
    with pytest.raises(
        CheckpointError, match=r"has 3 layers; layer 3 was asked for|has no weight decoder\.layers\.3\."
    ):
        torch_dist_to_hf(converted, tmp_path / "back", other)
    config = json.loads((origin / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 41, "moe_intermediate_size": 41}))
    with pytest.raises(WeightError, match=r"linear_fc1\.weight has shape \(\d+, 24\), but the model's config says"):
        torch_dist_to_hf(converted, tmp_path / "back", other)
    assert not (tmp_path / "back").exists()


def test_weights_that_would_be_lost_are_refused(origin, tmp_path):
    extended = tmp_path / "extended"
    shutil.copytree(origin, extended)
    (extended / "model.safetensors.index.json").unlink()
    save_file({"model.layers.0.self_attn.o_proj.bias": torch.zeros(24)}, extended / "extra.safetensors")
    with pytest.raises(WeightError, match=r"1 weights that a \w+ model does not have, such as .*o_proj\.bias"):
        hf_to_torch_dist(extended, tmp_path / "td")
    assert list(tmp_path.iterdir()) == [extended]


def test_an_incomplete_model_is_refused(origin, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(origin, broken)
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


def test_flags_are_checked(origin, tmp_path):
    with pytest.raises(ShapeMismatchError, match="--num-layers 7"):
        hf_to_torch_dist(origin, tmp_path / "td", flags={"num_layers": 7, "hidden_size": 24})
    assert not any(tmp_path.iterdir())


def test_existing_output_is_kept_unless_forced(origin, converted, tmp_path):
    stamp = (converted / "release" / ".metadata").stat().st_mtime_ns
    with pytest.raises(OutputError, match=r"exists already.*--force"):
        hf_to_torch_dist(origin, converted)
    assert (converted / "release" / ".metadata").stat().st_mtime_ns == stamp
    hf_to_torch_dist(origin, converted, force=True)
    assert (converted / "release" / ".metadata").stat().st_mtime_ns > stamp
    assert list(tmp_path.iterdir()) == [converted]


def test_inputs_are_never_replaced(origin, converted):
    with pytest.raises(OutputError, match="is or holds the input"):
        torch_dist_to_hf(converted, origin, origin, force=True)
    with pytest.raises(OutputError, match="is or holds the input"):
        torch_dist_to_hf(converted / "release", converted, origin, force=True)


def test_a_full_disk_is_told_and_what_is_written_stays(one_origin, tmp_path, full_disk):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    with full_disk(5000), pytest.raises(OutputError, match=r"cannot write .*/new .*File too large.*again to continue"):
        hf_to_torch_dist(one_origin, tmp_path / "new")
    with full_disk(5000), pytest.raises(OutputError, match=r"cannot write .*/hf .*File too large.*again to continue"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "hf", one_origin)
    assert {path.name for path in tmp_path.iterdir()} == {"td", ".new.partial", ".hf.partial"}
    hf_to_torch_dist(one_origin, tmp_path / "new")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "hf", one_origin)
    assert {path.name for path in tmp_path.iterdir()} == {"td", "new", "hf"}
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(one_origin))


def test_prediction_modules_come_along(with_prediction_module, tmp_path):
    hf_to_torch_dist(with_prediction_module, tmp_path / "td")
    keys = TorchDistReader(tmp_path / "td").weight_keys
    assert {
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight",
    } < keys
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", with_prediction_module)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(with_prediction_module))


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


@pytest.mark.parametrize("origin", ["qwen3-moe", "glm4-moe", "llama-tied"], indirect=True)
def test_layers_and_experts_that_lie_one_by_one_are_read(origin, tmp_path):
    saved_one_by_one(tmp_path / "td", origin)
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(origin))


def test_prediction_modules_that_lie_one_by_one_are_read(with_prediction_module, tmp_path):
    saved_one_by_one(tmp_path / "td", with_prediction_module)
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", with_prediction_module)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(with_prediction_module))


def test_a_config_with_prediction_modules_whose_weights_are_not_there_is_told(with_prediction_module, tmp_path):
    """Such as transformers saves: it keeps the config's key and drops the module."""
    (with_prediction_module / "further.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no prediction module .* num_nextn_predict_layers .* set it to 0"):
        hf_to_torch_dist(with_prediction_module, tmp_path / "td")
    config = json.loads((with_prediction_module / "config.json").read_text())
    (with_prediction_module / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    hf_to_torch_dist(with_prediction_module, tmp_path / "td")


def test_a_prediction_module_with_an_embedding_of_its_own_is_refused(with_prediction_module, tmp_path):
    path = with_prediction_module / "further.safetensors"
    own = load_file(path)
    own["model.layers.3.embed_tokens.weight"] += 1
    save_file(own, path)
    with pytest.raises(
        WeightError, match=r"layers\.3\.embed_tokens\.weight .* differs from model\.embed_tokens\.weight"
    ):
        hf_to_torch_dist(with_prediction_module, tmp_path / "td")


def test_every_error_is_ours(tmp_path):
    with pytest.raises(ConvertError):
        hf_to_torch_dist(tmp_path / "none", tmp_path / "td")
    with pytest.raises(ConvertError):
        torch_dist_to_hf(tmp_path / "none", tmp_path / "hf", tmp_path / "none")
