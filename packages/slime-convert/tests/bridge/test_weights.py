"""Conversions through mbridge: of models that only it knows, and of those that our tables know too."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_convert import ModelShape
from slime_convert.bridge import bridged_weights
from slime_convert.convert import check_args, hf_to_torch_dist, torch_dist_to_hf
from slime_convert.errors import (
    BridgeError,
    HfConfigError,
    ShapeMismatchError,
    UnsupportedModelError,
    WeightError,
)
from slime_convert.mapping import WeightMap
from slime_convert.megatron_to_hf import megatron_to_hf
from slime_convert.torch_dist import TorchDistReader
from slime_convert.verify import verify

# Those of the models in conftest.py that mbridge knows too.
KNOWN_TO_BOTH = ["llama-tied", "llama3-scaled", "qwen2-tied", "qwen3-tied", "qwen3-untied", "qwen3-moe"]
KNOWN_TO_BOTH += ["glm4-moe", "glm4-air", "deepseek", "moonlight"]


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def make_mimo(directory):
    """MiMo: a Qwen2.5 with a prediction module under names of its own. transformers has no class for it."""
    edit_config(directory, model_type="mimo", num_nextn_predict_layers=1, attention_bias=True)
    (directory / "model.safetensors.index.json").unlink()
    layer, module = "model.layers.0.", "model.mtp_layers.0."
    own = {
        name.replace(layer, module): tensor + 1
        for name, tensor in weights_of(directory).items()
        if name.startswith(layer)
    }
    norms = ("token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    own |= {module + name: torch.randn(24).bfloat16() for name in norms}
    own[module + "input_proj.weight"] = torch.randn(24, 48).bfloat16()
    save_file(own, directory / "further.safetensors")
    return directory


@pytest.fixture
def bridged_origin(origin_of):
    """Makes a model that only mbridge knows."""
    return lambda name: make_mimo(origin_of("qwen2-untied")) if name == "mimo" else origin_of(name)


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "qwen2-moe", "qwen2-moe-normed", "mimo"])
def test_there_and_back_is_bit_equal(bridged_origin, tmp_path, name):
    origin, calls = bridged_origin(name), []
    hf_to_torch_dist(origin, tmp_path / "td", bridge="mbridge", on_progress=lambda *call: calls.append(call))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] > 0
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin, bridge="mbridge", max_shard_bytes=20_000)
    megatron_to_hf(tmp_path / "td", tmp_path / "any", origin, bridge="mbridge")
    for sides in ((origin, tmp_path / "td"), (tmp_path / "td", tmp_path / "back")):
        found = verify(*sides, bridge="mbridge")
        assert found.equal and found.naming == "huggingface" and found.num_equal == len(weights_of(origin))
    for path in (tmp_path / "back", tmp_path / "any"):
        assert_equal_bits(weights_of(path), weights_of(origin))
        assert (path / "config.json").read_bytes() == (origin / "config.json").read_bytes()


@pytest.mark.full
@pytest.mark.parametrize("origin", KNOWN_TO_BOTH, indirect=True)
def test_there_and_back_of_known_models(origin, tmp_path):
    hf_to_torch_dist(origin, tmp_path / "td", bridge="mbridge")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", origin, bridge="mbridge")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "ours", origin)
    assert_equal_bits(weights_of(tmp_path / "back"), weights_of(origin))
    assert_equal_bits(weights_of(tmp_path / "ours"), weights_of(origin))


@pytest.mark.parametrize("origin", KNOWN_TO_BOTH, indirect=True)
def test_our_tables_and_the_bridge_say_the_same(origin):
    shape, weights = ModelShape.from_hf_config(origin), weights_of(origin)
    ours = WeightMap(shape, shape.padded_vocab_size(1))
    theirs = bridged_weights("mbridge", origin, make_vocab_size_divisible_by=128)
    assert set(theirs.megatron_names()) == set(ours.megatron_names())
    assert set(theirs.hf_names()) == set(ours.hf_names()) and theirs.hf_copies() == ours.hf_copies()
    assert (theirs.family, theirs.equal_layers) == (ours.family, ours.equal_layers)
    for name in ours.megatron_names():
        assert theirs.megatron_shape(name) == ours.megatron_shape(name)
        assert theirs.stored_as(name) == ours.stored_as(name)
        assert theirs.expert(name) == ours.expert(name)
        assert theirs.hf_parts(name) == ours.hf_parts(name)
        whole = ours.from_hf(name, weights.__getitem__)
        assert torch.equal(theirs.from_hf(name, weights.__getitem__), whole)
        assert_equal_bits(dict(theirs.to_hf(name, whole)), dict(ours.to_hf(ours.engine_name(name), whole)))
    check_args(ours.megatron_args(), theirs.megatron_args(), origin)
    check_args(theirs.megatron_args(), ours.megatron_args(), origin)


@pytest.mark.parametrize("origin", ["qwen3-moe"], indirect=True)
def test_our_tables_and_the_bridge_write_the_same(origin, converted, tmp_path):
    hf_to_torch_dist(origin, tmp_path / "bridged", bridge="mbridge")
    ours, theirs = TorchDistReader(converted), TorchDistReader(tmp_path / "bridged")
    assert ours.weight_keys == theirs.weight_keys
    for name in WeightMap(ModelShape.from_hf_config(origin)).megatron_names():
        assert torch.equal(ours.load(name), theirs.load(name)), name


@pytest.mark.parametrize("origin", ["qwen2-tied", "qwen3-moe", "glm4-air"], indirect=True)
def test_shards_are_merged(origin):
    shape, weights = ModelShape.from_hf_config(origin), weights_of(origin)
    ours, theirs = WeightMap(shape, 128), bridged_weights("mbridge", origin, make_vocab_size_divisible_by=128)
    for name in ours.megatron_names():
        whole = ours.from_hf(name, weights.__getitem__)
        for spelling in (name, ours.engine_name(name)):
            assert torch.equal(theirs.merge_tp(spelling, ours.split_tp(name, whole, 2)), whole), name
        assert theirs.merge_tp(name, [whole]) is whole


def test_a_prediction_module_of_mimo_has_its_halves_in_megatrons_order(bridged_origin):
    origin = bridged_origin("mimo")
    weights, bridged = weights_of(origin), bridged_weights("mbridge", origin)
    theirs = weights["model.mtp_layers.0.input_proj.weight"]
    expected = torch.cat([theirs[:, 24:], theirs[:, :24]], dim=1)  # the embedding's half first
    assert torch.equal(bridged.from_hf("mtp.layers.0.eh_proj.weight", weights.__getitem__), expected)


@pytest.fixture(scope="module")
def logits_of_megatron(origin_maker, tmp_path_factory):
    """Logits of transformers and of stock megatron-core models that load what was converted, by model."""
    root, jobs, expected = tmp_path_factory.mktemp("logits"), [], {}
    for name in ("mixtral", "mixtral-tied", "qwen2-moe", "qwen2-moe-normed"):
        model = AutoModelForCausalLM.from_pretrained(origin_maker(name, root / name / "origin"), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.4)
            expected[name] = model(torch.arange(20)[None]).logits
        model.save_pretrained(root / name / "hf")
        hf_to_torch_dist(root / name / "hf", root / name / "td", bridge="mbridge")
        jobs.append({"checkpoint": str(root / name / "td" / "release"), "logits": str(root / f"{name}.pt")})
    program = Path(__file__).parent / "stock_logits.py"
    result = subprocess.run([sys.executable, program, json.dumps(jobs)], capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    return {name: (torch.load(root / f"{name}.pt"), logits) for name, logits in expected.items()}


@pytest.mark.parametrize("name", ["mixtral", "mixtral-tied", "qwen2-moe", "qwen2-moe-normed"])
def test_megatron_computes_what_transformers_does(logits_of_megatron, name):
    ours_BSV, theirs_BSV = logits_of_megatron[name]
    assert theirs_BSV.abs().max() > 1
    assert (ours_BSV[..., :101] - theirs_BSV).abs().max() < 1e-4


def test_the_process_is_left_as_it_was(origin_of, monkeypatch):
    from mbridge.core.bridge import _MODEL_REGISTRY
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_latent_attention

    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")  # which Megatron's models refuse
    tied, untied, latent = origin_of("qwen2-tied"), origin_of("qwen2-untied"), origin_of("moonlight")
    tables = {family: dict(kind._DIRECT_MAPPING) for family, kind in _MODEL_REGISTRY.items()}
    before = (
        dict(os.environ),
        torch.cuda.current_device,
        multi_latent_attention.TELinear,
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    random_state = torch.get_rng_state()
    for directory in (tied, untied, latent):
        bridged = bridged_weights("mbridge", directory)
    assert before == (
        dict(os.environ),
        torch.cuda.current_device,
        multi_latent_attention.TELinear,
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    )
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not parallel_state.model_parallel_is_initialized() and not torch.distributed.is_initialized()
    assert {family: dict(kind._DIRECT_MAPPING) for family, kind in _MODEL_REGISTRY.items()} == tables
    assert bridged.hf_parts("output_layer.weight") == ["lm_head.weight"]


def test_nothing_of_it_is_imported_before_it_is_asked_for():
    code = "import sys, slime_convert.convert, slime_convert.bridge; print([*sys.modules])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout
    assert "slime_convert.bridge" in modules
    assert not [name for name in ("mbridge", "megatron", "transformers", "einops") if f"'{name}'" in modules]


@pytest.mark.parametrize("package", ["mbridge", "megatron.core", "einops", "transformers"])
def test_without_the_extra_it_is_told_how_to_install_it(one_origin, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BridgeError, match=r"pip install 'slime-convert\[mbridge\]'"):
        bridged_weights("mbridge", one_origin)


def test_what_the_libraries_warn_of_is_not_shown(one_origin):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bridged_weights("mbridge", one_origin)


def test_other_bridges_are_refused(one_origin, tmp_path):
    with pytest.raises(BridgeError, match="bridge 'ferry' is unknown; allowed: 'mbridge'"):
        hf_to_torch_dist(one_origin, tmp_path / "td", bridge="ferry")


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"model_type": "gemma3"}, UnsupportedModelError, "'gemma3' of .* has a vision tower.*; allowed"),
        ({"model_type": "gpt_oss"}, UnsupportedModelError, "'gpt_oss' of .* is unknown to mbridge; allowed.* mixtral"),
        ({"model_type": None}, UnsupportedModelError, "None of .* is unknown to mbridge"),
        ({"model_type": ["mixtral"]}, UnsupportedModelError, r"\['mixtral'\] of .* is unknown to mbridge"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, 'hidden_act "gelu" of .* is not carried by mbridge'),
        ({"sliding_window": 8}, UnsupportedModelError, "sliding_window 8 of .* is not carried by mbridge"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            UnsupportedModelError,
            "rope_type 'linear' of .* is not carried by mbridge; allowed: 'default'",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, UnsupportedModelError, "quantization_config .* not carried"),
        ({"hidden_size": "wide"}, HfConfigError, "transformers cannot read .*config.json"),
        ({"model_type": "mimo", "vocab_size": None}, HfConfigError, "vocab_size is None in .* must be an integer"),
        (
            {"model_type": "mimo", "num_nextn_predict_layers": "two"},
            UnsupportedModelError,
            "Megatron cannot build the mimo model of .*config.json",
        ),
        (
            {"model_type": "deepseek_v3", "n_shared_experts": None},
            (UnsupportedModelError, HfConfigError),
            "mbridge cannot describe the deepseek_v3 model|transformers cannot read",
        ),
        ({"intermediate_size": 44}, WeightError, r"w1\.weight has shape \(40, 24\), but the model's config says \(44,"),
        ({"num_local_experts": 3}, WeightError, r"weights that a mixtral model does not have, such as .*experts\.3\."),
    ],
)
def test_what_would_be_lost_or_wrong_is_refused(origin_of, tmp_path, changes, error, told):
    origin = edit_config(origin_of("mixtral"), **changes)
    with pytest.raises(error, match=told):
        hf_to_torch_dist(origin, tmp_path / "td", bridge="mbridge")
    assert not (tmp_path / "td").exists()


def test_flags_are_checked(origin_of, tmp_path):
    origin = origin_of("qwen2-moe")
    given = {"num_layers": 3, "num_experts": 4, "add_qkv_bias": True, "swiglu": True, "moe_layer_freq": "([1]*3)"}
    bridged = bridged_weights("mbridge", origin, flags=given | {"untie_embeddings_and_output_weights": True})
    assert bridged.megatron_args()["moe_shared_expert_gate"] is True
    wrong = given | {"num_layers": 4, "qk_layernorm": True, "q_lora_rank": 3, "moe_layer_freq": "([0]*1+[1]*2)"}
    with pytest.raises(
        ShapeMismatchError, match=r"--num-layers 4 .*--qk-layernorm is given.*--moe-layer-freq.*--q-lora-rank 3"
    ):
        hf_to_torch_dist(origin, tmp_path / "td", flags=wrong, bridge="mbridge")


def test_a_checkpoint_of_another_model_is_refused(origin_of, tmp_path):
    origin = origin_of("mixtral")
    hf_to_torch_dist(origin, tmp_path / "td", bridge="mbridge")
    shutil.copytree(origin, tmp_path / "other")
    edit_config(tmp_path / "other", num_experts_per_tok=3)
    with pytest.raises(ShapeMismatchError, match=r"moe_router_topk 2 \(config: 3\)"):
        torch_dist_to_hf(tmp_path / "td", tmp_path / "back", tmp_path / "other", bridge="mbridge")


def test_wrong_weights_are_told(origin_of):
    bridged = bridged_weights("mbridge", origin_of("mixtral-tied"))
    assert bridged.to_hf("output_layer.weight", torch.zeros(101, 24)) == []
    with pytest.raises(WeightError, match=r"'decoder\.layers\.7\.x' is no weight of the mixtral model"):
        bridged.megatron_shape("decoder.layers.7.x")
    with pytest.raises(WeightError, match=r"final_layernorm\.weight has shape \(3,\), but .* \(24,\)"):
        bridged.to_hf("decoder.final_layernorm.weight", torch.zeros(3))
