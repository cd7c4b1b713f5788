"""Hugging Face → torch_dist, and back again."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape, hf_to_torch_dist, torch_dist_to_hf, verify
from slime_convert.errors import (
    CheckpointError,
    OutputError,
    ShapeMismatchError,
    WeightError,
)
from slime_convert.formats import open_checkpoint
from slime_convert.shape import check_args
from support.family_models import (
    add_prediction_module,
    assert_same_weights,
    change_config,
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


def test_progress_ends_with_everything_done(one_origin, one_converted, tmp_path):
    there, back = [], []
    torch_dist_to_hf(one_converted, tmp_path / "back", one_origin, on_progress=lambda *call: back.append(call))
    hf_to_torch_dist(one_origin, tmp_path / "td", on_progress=lambda *call: there.append(call))
    for calls in (there, back):
        assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0


def test_existing_output_is_kept_unless_forced(one_origin, tmp_path):
    hf_to_torch_dist(one_origin, tmp_path / "td")
    before = tree(tmp_path)
    with pytest.raises(OutputError, match=r"exists already.*with force=True$"):
        hf_to_torch_dist(one_origin, tmp_path / "td")
    assert tree(tmp_path) == before
    stamp = (tmp_path / "td" / "release" / ".metadata").stat().st_mtime_ns
    hf_to_torch_dist(one_origin, tmp_path / "td", force=True)
    assert (tmp_path / "td" / "release" / ".metadata").stat().st_mtime_ns > stamp and tree(tmp_path) == before


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


@pytest.mark.parametrize("number", [1.5, "128", True, 0])
def test_a_number_of_another_kind_is_refused(one_origin, tmp_path, number):
    with pytest.raises(ShapeMismatchError, match=f"divisible_by {number} must be a whole number from 1 to 1048576"):
        hf_to_torch_dist(one_origin, tmp_path / "td", make_vocab_size_divisible_by=number)
    assert not list(tmp_path.iterdir())


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
