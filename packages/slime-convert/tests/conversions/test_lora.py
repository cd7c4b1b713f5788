"""LoRA adapters that PEFT wrote, merged: what PEFT itself makes of them in float64, rounded once."""

import itertools
import json
import os
import shutil
from contextlib import suppress

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_convert import hf_to_fp8, hf_to_torch_dist, merge_lora, torch_dist_to_hf, verify
from slime_convert.cli import main
from slime_convert.conversions.lora import merged
from slime_convert.errors import AdapterError, ConvertError, HfConfigError, OutputError, UnfinishedError, WeightError
from slime_convert.formats import open_checkpoint
from slime_convert.formats.hf import open_model
from support.family_models import (
    assert_same_weights,
    change_config,
    make_model,
    read,
    same_bits,
    tree,
    weights_of,
    write_model,
)

# PEFT warns of settings that are meant here.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "RuntimeWarning")]
ALL = "all-linear"


def make_adapter(origin, path, *, dtype=torch.float32, scale=1.0, **settings):
    """An adapter of random factors and random further weights, as PEFT saves it."""
    model = AutoModelForCausalLM.from_pretrained(origin, dtype="auto")
    model = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ALL} | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                random = torch.randn(parameter.shape, generator=generator) * scale
                parameter.data = random.to(dtype if "lora_" in name else parameter.dtype)
    model.save_pretrained(path)
    return path


def expected(origin, adapter, path):
    """What PEFT merges, in float64."""
    base = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.float64)
    PeftModel.from_pretrained(base, adapter).double().merge_and_unload().save_pretrained(path)
    return weights_of(path)


def assert_rounded_once(ours, origin, wanted):
    """Every weight is the nearest of its type to what is wanted, but for the rounding of sums in float32."""
    changed = 0
    assert ours.keys() == origin.keys() == wanted.keys()
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (origin[name].dtype, origin[name].shape)
        if torch.equal(wanted[name], origin[name].double()):
            assert same_bits(tensor, origin[name])
            continue
        summed = 1e-6 * (1 + wanted[name].abs() + origin[name].double().abs())
        allowed = torch.finfo(tensor.dtype).eps / 2 * wanted[name].abs() + summed
        assert ((tensor.double() - wanted[name]).abs() <= allowed).all(), name
        changed += 1
    return changed


CASES = {
    "all linear layers": {},
    "another rank": {"r": 1, "lora_alpha": 3},
    "patterns of ranks and alphas": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 7, r"^model\.layers\.0\.self_attn\.v_proj": 3},
        "alpha_pattern": {"q_proj": 5, r"layers.[02].mlp.up_proj": 9, "up_proj": 1, "self_attn.o_proj": 0.5, "proj": 2},
    },
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"k_proj": 9}},
    "some layers": {"layers_to_transform": [1], "target_modules": ["k_proj", "o_proj"]},
    "embedding and output layer": {"target_modules": ["embed_tokens", "lm_head", "gate_proj"]},
    "an embedding by its pattern": {"target_modules": r".*\.embed_tokens", "alpha_pattern": {"embed_tokens": 11}},
    "weights trained as a whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]},
    "another start": {"init_lora_weights": "orthogonal"},
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_peft_merges(one_origin, tmp_path, case):
    adapter = make_adapter(one_origin, tmp_path / "adapter", **CASES[case])
    done = merge_lora(one_origin, adapter, tmp_path / "merged")
    ours, wanted = weights_of(tmp_path / "merged"), expected(one_origin, adapter, tmp_path / "peft")
    assert assert_rounded_once(ours, weights_of(one_origin), wanted) > 0
    assert (done.num_weights, done.num_bytes) == (len(ours), sum(tensor.nbytes for tensor in ours.values()))
    assert done.path == tmp_path / "merged"


TYPES = [torch.float32, torch.bfloat16, torch.float16]
QUICK = [(torch.float32, torch.float64), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(
    ("weights", "factors"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.full])
        for pair in itertools.product(TYPES, [*TYPES, torch.float64])
    ],
)
def test_any_types(tmp_path, weights, factors):
    origin = make_model("llama-tied", tmp_path / "origin", dtype=weights, num_hidden_layers=1)
    adapter = make_adapter(origin, tmp_path / "adapter", dtype=factors, target_modules=["q_proj", "down_proj"])
    stored = load_file(adapter / "adapter_model.safetensors")
    save_file({name: tensor.to(factors) for name, tensor in stored.items()}, adapter / "adapter_model.safetensors")
    merge_lora(origin, adapter, tmp_path / "merged")
    wanted = expected(origin, adapter, tmp_path / "peft")
    assert assert_rounded_once(weights_of(tmp_path / "merged"), weights_of(origin), wanted) == 2


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("glm4-unbiased", ALL),
        ("gemma3", ALL),
        ("deepseek", ["q_a_proj", "kv_b_proj", "o_proj"]),
        ("qwen3-moe", ["q_proj", "k_proj"]),
    ],
)
def test_other_families(made, tmp_path, name, modules):
    """Names of modules mean the same whatever the family: merging reads no table of weights."""
    adapter = make_adapter(made(name), tmp_path / "adapter", target_modules=modules)
    merge_lora(made(name), adapter, tmp_path / "merged")
    wanted = expected(made(name), adapter, tmp_path / "peft")
    assert assert_rounded_once(weights_of(tmp_path / "merged"), weights_of(made(name)), wanted) > 5


def test_an_embedding_that_is_the_output_layer_too(made, tmp_path):
    adapter = make_adapter(made("llama-tied"), tmp_path / "adapter", target_modules=["embed_tokens"])
    merge_lora(made("llama-tied"), adapter, tmp_path / "merged")
    wanted = expected(made("llama-tied"), adapter, tmp_path / "peft")
    wanted.pop("lm_head.weight", None)
    assert assert_rounded_once(weights_of(tmp_path / "merged"), weights_of(made("llama-tied")), wanted) == 1


def test_an_embedding_that_was_changed_before_the_training(one_origin, tmp_path):
    """PEFT saves it next to the factors, and loads it again."""
    adapter = make_adapter(one_origin, tmp_path / "adapter", target_modules=["embed_tokens"])
    path = adapter / "adapter_model.safetensors"
    stored = load_file(path)
    (base,) = (name for name in stored if name.endswith("base_layer.weight"))
    stored[base] = stored[base] * 2 + 1
    save_file(stored, path)
    merge_lora(one_origin, adapter, tmp_path / "merged")
    wanted = expected(one_origin, adapter, tmp_path / "peft")
    assert assert_rounded_once(weights_of(tmp_path / "merged"), weights_of(one_origin), wanted) == 1


def test_the_names_of_an_older_peft(one_origin, tmp_path):
    """With the adapter's name in them."""
    adapter = make_adapter(one_origin, tmp_path / "adapter", modules_to_save=["lm_head"], target_modules=["q_proj"])
    merge_lora(one_origin, adapter, tmp_path / "new")
    path = adapter / "adapter_model.safetensors"
    older = {
        name.replace(".lora_A.", ".lora_A.default.")
        .replace(".lora_B.", ".lora_B.default.")
        .replace("lm_head.weight", "lm_head.modules_to_save.default.weight"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(older, path)
    merge_lora(one_origin, adapter, tmp_path / "old")
    assert_same_weights(tmp_path / "old", tmp_path / "new")


def test_a_quantized_model_is_expanded(tmp_path):
    wide = {"hidden_size": 192, "intermediate_size": 128, "num_hidden_layers": 1}
    origin = make_model("llama-tied", tmp_path / "origin", **wide)
    adapter = make_adapter(origin, tmp_path / "adapter")
    hf_to_fp8(origin, tmp_path / "fp8")
    merge_lora(tmp_path / "fp8", adapter, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    model = open_model(tmp_path / "fp8")
    ours, before = weights_of(tmp_path / "merged"), {name: read(model, name) for name in model.tensors}
    factors = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    wanted = before[f"{name}.weight"].double() + 6 / 4 * b @ a
    found = ours[f"{name}.weight"]
    assert found.dtype == torch.bfloat16 and torch.allclose(found.double(), wanted, rtol=2**-8, atol=1e-5)


def test_files_beside_the_weights(one_origin, tmp_path):
    """The model's, and none of the adapter's; and files no larger than asked for."""
    model = shutil.copytree(one_origin, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter")
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, model)
    merge_lora(model, adapter, tmp_path / "merged", max_shard_bytes=10_000)
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} < names
    assert not [name for name in names if name.startswith("adapter")]
    assert (tmp_path / "merged" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    merge_lora(model, adapter, tmp_path / "one file")
    assert_same_weights(tmp_path / "merged", tmp_path / "one file")


def test_on_the_way_to_megatron(one_origin, tmp_path, capsys):
    """The same as two steps; and without ``--adapter`` it is said that one next to the model was left out."""
    adapter = make_adapter(one_origin, tmp_path / "adapter")
    merge_lora(one_origin, adapter, tmp_path / "merged")
    hf_to_torch_dist(tmp_path / "merged", tmp_path / "two steps")
    capsys.readouterr()  # transformers' bars
    words = ["hf-to-torch-dist", "--hf-checkpoint", one_origin, "--adapter", adapter, "--save", tmp_path / "one step"]
    assert main([*(str(word) for word in words), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert verify(tmp_path / "one step", tmp_path / "two steps").equal
    assert verify(tmp_path / "merged", tmp_path / "one step").equal
    assert not verify(one_origin, tmp_path / "one step").equal
    assert open_checkpoint(tmp_path / "one step").arguments == open_checkpoint(tmp_path / "two steps").arguments
    torch_dist_to_hf(tmp_path / "one step", tmp_path / "back", one_origin)
    assert_same_weights(tmp_path / "back", tmp_path / "merged")

    beside = shutil.copytree(one_origin, tmp_path / "beside")
    for path in adapter.glob("adapter_*"):
        shutil.copy(path, beside)
    (note,) = hf_to_torch_dist(beside, tmp_path / "without").notes
    assert note == f"the LoRA adapter in {beside} is not merged in; adapter= {beside} does that"
    assert verify(one_origin, tmp_path / "without").equal
    assert hf_to_torch_dist(beside, tmp_path / "with", adapter=beside).notes == ()
    assert verify(tmp_path / "with", tmp_path / "merged").equal
    (note,) = torch_dist_to_hf(tmp_path / "with", tmp_path / "with back", beside).notes
    assert note == f"the LoRA adapter in {beside} was trained on other weights; it is left out"
    assert not (tmp_path / "with back" / "adapter_config.json").exists()


def test_on_the_command_line(one_origin, tmp_path, capsys):
    adapter = make_adapter(one_origin, tmp_path / "adapter")
    words = ["merge-lora", "--hf-checkpoint", one_origin, "--adapter", adapter, "--save", tmp_path / "merged"]
    words = [str(word) for word in words]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrote 36 weights, ") and out.endswith(f": {tmp_path / 'merged'}\n")
    merge_lora(one_origin, adapter, tmp_path / "again")
    assert_same_weights(tmp_path / "merged", tmp_path / "again")
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--force", "--quiet", "--max-shard-gib", "1"]) == 0
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit):
        main([*words[:3], "--save", str(tmp_path / "new")])
    assert "required: --adapter" in capsys.readouterr().err


def test_inputs_are_not_written_over(one_origin, tmp_path):
    adapter = make_adapter(one_origin, tmp_path / "adapter")
    before = tree(tmp_path)
    for target in (adapter, adapter / "merged"):
        with pytest.raises(OutputError, match="the input"):
            merge_lora(one_origin, adapter, target, force=True)
    assert tree(tmp_path) == before


@pytest.fixture(scope="module")
def plain(one_origin, tmp_path_factory):
    """An adapter that can be merged. Not to be changed."""
    return make_adapter(one_origin, tmp_path_factory.mktemp("plain") / "adapter", target_modules=["q_proj"])


@pytest.fixture
def adapter(plain, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(plain, tmp_path / "adapter")


def refused(origin, adapter, words, error=AdapterError):
    before = tree(adapter.parent)
    with pytest.raises(error, match=words):
        merge_lora(origin, adapter, adapter.parent / "merged")
    assert tree(adapter.parent) == before


def configured(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "use_dora True of .* is not supported; allowed: False"),
        ({"bias": "all"}, "bias all of .* is not supported; allowed: none"),
        ({"bias": "lora_only"}, "bias lora_only of .* is not supported; allowed: none"),
        ({"lora_bias": True}, "lora_bias True of .* is not supported; allowed: False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa of .* is not supported; allowed: True, False"),
        (
            {"trainable_token_indices": [1, 2]},
            r"trainable_token_indices \[1, 2\] of .*; allowed: none",
        ),
        (
            {"task_type": "CAUSAL_LM", "alora_invocation_tokens": [1, 2]},
            r"alora_invocation_tokens \[1, 2\] of .* is not supported; allowed: none",
        ),
        ({"layer_replication": [(0, 2), (1, 3)]}, "layer_replication .* of .* is not supported; allowed: none"),
    ],
)
def test_kinds_whose_factors_mean_something_else(one_origin, tmp_path, settings, words):
    """As PEFT writes them: plain merging would give another model without a word."""
    refused(one_origin, make_adapter(one_origin, tmp_path / "adapter", **settings), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3 of .* is not supported; allowed: LORA"),
        ({"peft_type": None}, "peft_type None of .* is not supported; allowed: LORA"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out True of .* allowed: False"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters .* allowed: "),
        ({"use_qalora": True}, "use_qalora True of .* allowed: False"),
        ({"use_dora": 0}, "use_dora 0 of .* allowed: False"),
        ({"use_rslora": "false"}, "use_rslora false of .* allowed: False, True"),
        ({"kasa_config": {"beta": 1}}, "kasa_config .* allowed: none"),
        ({"lora_alpha": None}, "lora_alpha of .* is None; it must be a number"),
        ({"lora_alpha": "8"}, "lora_alpha of .* is 8; it must be a number"),
        ({"lora_alpha": True}, "lora_alpha of .* is True; it must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha of .* is 10*; it must be a number below"),
        ({"lora_alpha": float("inf")}, "lora_alpha of .* is inf; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha of .* is nan; it must be a number"),
        ({"alpha_pattern": {"q_proj": "2"}}, "lora_alpha of .* is 2; it must be a number"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern of .* holds no patterns"),
        ({"alpha_pattern": {"q_proj(": 2}}, "alpha_pattern of .* holds no patterns"),
        ({"alpha_pattern": {"([a-z0-9._]+)+!": 2}}, "alpha_pattern .* is too complicated; allowed: at most three"),
        ({"alpha_pattern": {".*.*.*.*x": 2}}, "alpha_pattern .* is too complicated"),
        ({"alpha_pattern": {".?" * 40: 2}}, "alpha_pattern .* is too complicated"),
        ({"alpha_pattern": {"(.|.)" * 30: 2}}, "alpha_pattern .* is too complicated"),
        ({"alpha_pattern": {"a{99999999999999999999}": 2}}, "alpha_pattern .* holds no patterns"),
    ],
)
def test_settings_that_are_not_what_they_must_be(one_origin, adapter, changes, words):
    configured(adapter, **changes)
    refused(one_origin, adapter, words)


def test_a_setting_that_an_older_peft_does_not_write_is_off(one_origin, adapter, tmp_path):
    merge_lora(one_origin, adapter, tmp_path / "new")
    kept = ("peft_type", "r", "lora_alpha", "target_modules")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({key: settings[key] for key in kept}))
    merge_lora(one_origin, adapter, tmp_path / "old")
    assert_same_weights(tmp_path / "old", tmp_path / "new")


NAME = "base_model.model.model.layers.0.self_attn.q_proj"


def changed(change):
    """Change the stored factors by a function of them."""

    def apply(adapter):
        stored = load_file(adapter / "adapter_model.safetensors")
        change(stored)
        save_file(stored, adapter / "adapter_model.safetensors")

    return apply


def emptied(adapter):
    save_file({}, adapter / "adapter_model.safetensors")


def cut_off(adapter):
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def pickled(adapter):
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")


def linked(adapter):
    path = adapter / "adapter_model.safetensors"
    path.rename(adapter.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def pipe(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")


def retyped(name):
    def apply(adapter):
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', name.ljust(5)))

    return apply


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (retyped(b'"F4"'), AdapterError, "has type F4; allowed: floating-point numbers"),
        (retyped(b'"I32"'), AdapterError, "has type int32; allowed: floating-point numbers"),
        (
            changed(lambda stored: stored.update({f"{NAME.replace('.0.', '.9.')}.lora_A.weight": torch.ones(4, 24)})),
            AdapterError,
            r"has only A of model\.layers\.9\.self_attn\.q_proj's two factors",
        ),
        (
            changed(lambda stored: stored.pop(f"{NAME}.lora_A.weight")),
            AdapterError,
            r"has only B of model\.layers\.0\.self_attn\.q_proj's two factors",
        ),
        (
            changed(lambda stored: stored.update({f"{NAME}.lora_A.weight": torch.ones(3, 24)})),
            AdapterError,
            r"q_proj of .* has factors of shapes \(3, 24\) and \(48, 4\)",
        ),
        (
            changed(lambda stored: stored.update({f"{NAME}.lora_{s}.weight": torch.ones(0, 0) for s in "AB"})),
            AdapterError,
            r"has factors of shapes \(0, 0\) and \(0, 0\)",
        ),
        (
            changed(lambda stored: stored.update({f"{NAME}.lora_A.weight": torch.ones(4, 25)})),
            AdapterError,
            r"changes model\.layers\.0\.self_attn\.q_proj\.weight by \(48, 25\), and the model's has shape \(48, 24\)",
        ),
        (
            changed(lambda stored: stored.update({f"{NAME}.lora_magnitude_vector": torch.ones(48)})),
            AdapterError,
            r"q_proj\.lora_magnitude_vector of .* is not a part of a plain LoRA adapter; merge it with PEFT",
        ),
        (
            changed(lambda stored: stored.update({"base_model.model.lm_head.weight": torch.ones(100, 24)})),
            AdapterError,
            r"lm_head\.weight of .* has shape \(100, 24\), and the model's \(101, 24\)",
        ),
        (
            changed(lambda stored: stored.update({"base_model.model.score.weight": torch.ones(2, 24)})),
            AdapterError,
            r"changes score\.weight, which the model does not have; give the model that the adapter was trained on",
        ),
        (
            changed(lambda stored: stored[f"{NAME}.lora_B.weight"].fill_(torch.nan)),
            AdapterError,
            r"layers\.0\.self_attn\.q_proj\.weight would hold a NaN or an infinity",
        ),
        (
            changed(lambda stored: stored[f"{NAME}.lora_B.weight"].fill_(3e38)),
            AdapterError,
            r"layers\.0\.self_attn\.q_proj\.weight would hold a NaN or an infinity",
        ),
        (emptied, AdapterError, "holds no factors; give a directory that PEFT's save_pretrained wrote"),
        (cut_off, HfConfigError, "adapter_model.safetensors"),
        (pickled, HfConfigError, "cannot read .*adapter_model.safetensors"),
        (linked, HfConfigError, "outside the checkpoint's directory"),
        (pipe, HfConfigError, "is a pipe, not a regular file"),
        (lambda adapter: (adapter / "adapter_config.json").unlink(), AdapterError, "cannot read .*adapter_config.json"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), AdapterError, "is not valid JSON"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), AdapterError, "holds a JSON list"),
    ],
)
def test_damaged_adapters_are_refused_and_nothing_is_left(one_origin, adapter, damage, error, words):
    damage(adapter)
    refused(one_origin, adapter, words, error)


def test_another_models_adapter(made, adapter):
    refused(made("deepseek"), adapter, r"changes model\.layers\.0\.self_attn\.q_proj\.weight, which the model does not")


def test_no_adapter_and_no_model(one_origin, adapter, tmp_path):
    with pytest.raises(AdapterError, match=r"cannot read .*adapter_config\.json .*give a directory that PEFT's"):
        merge_lora(one_origin, tmp_path / "none", tmp_path / "merged")
    with pytest.raises(HfConfigError, match=r"cannot read .*config\.json"):
        merge_lora(tmp_path / "none", adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_one_that_is_being_written(one_origin, adapter, tmp_path):
    """By another conversion, which has it as its output."""
    with pytest.raises(KeyboardInterrupt):
        merge_lora(one_origin, adapter, tmp_path / "merged", on_progress=interrupt)
    partial = tmp_path / ".merged.partial" / "output"
    for path in adapter.iterdir():
        shutil.copy(path, partial)
    with pytest.raises(UnfinishedError):
        merge_lora(one_origin, partial, tmp_path / "other")


def interrupt(*_):
    raise KeyboardInterrupt


def test_merging_reads_nothing(one_origin, plain, monkeypatch):
    """But headers, until the weights are written: a model larger than memory can be merged."""
    model = open_model(one_origin)
    tensors = {name: model.tensor(name) for name in model.tensors}
    monkeypatch.setattr("slime_convert.files.reading.TensorReader.read", interrupt)
    monkeypatch.setattr("slime_convert.files.reading.TensorReader.load", interrupt)
    found = merged(tensors, plain)
    assert {name for name in tensors if found[name] is not tensors[name]} == {
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(3)
    }


def test_every_error_is_ours(one_origin, adapter):
    """One byte of the header after another is damaged."""
    path = adapter / "adapter_model.safetensors"
    data = path.read_bytes()
    model = open_model(one_origin)
    tensors = {name: model.tensor(name) for name in model.tensors}
    for place in range(0, int.from_bytes(data[:8], "little"), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 2]) + data[place + 1 :])
        with suppress(ConvertError):
            merged(tensors, adapter)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_one_of_two_tied_matrices_is_refused(origin_of, tmp_path, target):
    """Which of the two counts would depend on the program that reads the result."""
    origin = origin_of("qwen3-untied")
    adapter = make_adapter(origin, tmp_path / "adapter", target_modules=[target])
    weights = weights_of(origin)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    tied = write_model(tmp_path / "tied", weights, origin / "config.json")
    change_config(tied, tie_word_embeddings=True)
    told = r"lm_head\.weight of .*tied with .*adapter merged in differs from model\.embed_tokens\.weight, but .* set it"
    with pytest.raises(WeightError, match=told):
        merge_lora(tied, adapter, tmp_path / "out" / "merged")
    assert not (tmp_path / "out").exists()
    change_config(tied, tie_word_embeddings=False)
    merge_lora(tied, adapter, tmp_path / "merged")
    hf_to_torch_dist(tmp_path / "merged", tmp_path / "td")
