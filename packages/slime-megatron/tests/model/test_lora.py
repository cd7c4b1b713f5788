"""LoRA: adapters alone train, at every layout as in one process and as in plain PyTorch, and go out merged."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_convert import merge_lora, torch_dist_to_hf
from slime_convert.errors import CheckpointError
from slime_convert.mapping import WeightMap
from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import check_fits
from slime_megatron.settings.trained import Lora
from support.plain import ADAM_EPS, plain_log_probs

ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
LORA = {"lora_rank": 4, "lora_alpha": 6.0}
EXPERTS = LORA | {"lora_target_modules": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = TP2 | {"sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DO = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = {
    "qwen3/4": {
        "tp2": (2, TP2),
        "tp2+sp": (2, TP2_SP),
        "pp2": (2, PP2),
        "pp2+vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}),
        "dp2+do": (2, DO),
        "cp2": (2, {"context_parallel_size": 2}),
        "recompute": (1, FULL),
        "tp2+sp,pp2": (4, TP2_SP | PP2),
    },
    "qwen2-tied/4": {"tp2": (2, TP2), "pp2": (2, PP2)},
    "qwen3-moe/4": {
        "ep2": (2, EP2),
        "tp2+sp": (2, TP2_SP),
        "tp2+sp,etp1,ep2": (2, TP2_SP | EP2 | {"expert_tensor_parallel_size": 1}),
        "etp2,ep2": (4, EP2 | {"expert_tensor_parallel_size": 2}),
        "dp2+do,ep2": (2, EP2 | DO),
    },
    "deepseek/4": {"tp2+sp": (2, TP2_SP), "pp2": (2, PP2)},
}
SHOWN = {
    "qwen3/4": ("pp2+vpp2", "dp2+do", "cp2", "recompute"),
    "qwen2-tied/4": ("pp2",),
    "qwen3-moe/4": ("ep2",),
    "deepseek/4": (),
}
RUNS = [
    pytest.param(name, layout, marks=[] if layout in SHOWN[name] else [pytest.mark.full])
    for name, layouts in LAYOUTS.items()
    for layout in layouts
]


def settings(name):
    return EXPERTS if name == "qwen3-moe/4" else LORA


@pytest.fixture(scope="module")
def trained(rank_group, rank_pool, tiny_model, tiny_config, make_samples, make_shards):
    """Three steps from adapters with random factors: metrics, merged weights."""
    known = {}

    def train(name, world, values):
        key = (name, world, tuple(values.items()))
        if key not in known:
            ranks, model = rank_group(rank_pool), tiny_model(name)
            config = tiny_config(load=model.checkpoint, lr=2e-3, adam_eps=ADAM_EPS, **settings(name), **values)
            ranks.start(world, config, model.shape, ALGORITHM)
            ranks.call("move_adapters")
            samples = make_samples(groups=6, per_group=4, masks=True)
            shards = make_shards(samples, data_parallel=config.data_parallel_size(world), steps=3, micro_batch_size=2)
            reports = ranks.call("train", shards)
            assert all(report.steps == reports[0].steps for report in reports)
            known[key] = reports[0].steps, ranks.first("weights")
            ranks.close()
        return known[key]

    return train


@pytest.mark.parametrize(("name", "layout"), RUNS)
def test_a_layout_equals_one_process(trained, name, layout):
    expected_steps, expected = trained(name, 1, {})
    steps, weights = trained(name, *LAYOUTS[name][layout])
    for step, wanted in zip(steps, expected_steps, strict=True):
        assert wanted["kl_loss"] > 1e-3 and wanted["grad_norm"] > 1e-2
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert step[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-6), metric
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, atol=1e-5, rtol=0, err_msg=key)


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_gradients_follow_from_those_of_the_merged_weights(
    ranks, tiny_model, tiny_config, make_samples, make_shards, name
):
    """With W' = W + s B A: dB = s dW' Aᵀ and dA = s Bᵀ dW', of transformers' dW' in plain PyTorch."""
    model, samples = tiny_model(name), make_samples(groups=2, per_group=2)
    config = tiny_config(load=model.checkpoint, **LORA)
    ranks.start(1, config, model.shape, AlgorithmConfig(loss_type="sft_loss"))
    ranks.call("move_adapters")
    merged = {key: torch.from_numpy(value) for key, value in ranks.first("weights").items()}
    (_, factors), [(found, _, _)] = ranks.first("train_and_watch_the_optimizer", make_shards(samples))

    plain = AutoModelForCausalLM.from_config(model.hf.config, dtype=torch.float32).eval()
    plain.load_state_dict(model.hf.state_dict())
    with torch.no_grad():
        for key, param in plain.named_parameters():
            if key in merged:
                param.copy_(merged[key])
    sum(-plain_log_probs(plain, sample, 1.0).mean() / len(samples) for sample in samples).backward()
    gradients = {key: param.grad for key, param in plain.named_parameters()}
    weight_map, checked = WeightMap(model.shape), 0
    for weight in config.lora.weights(model.shape):
        grad_OI = weight_map.from_hf(weight, gradients.__getitem__)
        layer = weight.removesuffix("weight")
        a_RI, b_OR = (torch.from_numpy(factors[layer + factor]) for factor in ("lora_A", "lora_B"))
        for factor, wanted in (("lora_A", b_OR.T @ grad_OI), ("lora_B", grad_OI @ a_RI.T)):
            wanted = config.lora.scale * wanted.numpy()
            np.testing.assert_allclose(found[layer + factor], wanted, atol=2e-5 * np.abs(wanted).max(), rtol=0)
            checked += 1
    assert checked == len(found) > 8


@pytest.mark.parametrize(
    ("name", "world", "values"),
    [
        ("qwen3", 2, TP2_SP),
        ("glm4", 1, {}),
        pytest.param("deepseek", 2, PP2, marks=pytest.mark.full),
        ("qwen3-moe", 2, EP2),
    ],
)
def test_adapters_go_out_merged_and_as_peft_has_them(
    ranks, tiny_model, tiny_config, make_samples, hf_logits, tmp_path, name, world, values
):
    """transformers gives the trainer's logits: of the weights for engines, and of the saved adapters merged in."""
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), **settings(f"{name}/4"), **values)
    samples = make_samples(groups=2, per_group=2)
    ranks.start(world, config, model.shape)
    ranks.call("move_adapters")
    sent = ranks.first("weights")
    adapter = Path(ranks.first("save", 1)) / "adapter"
    if "pipeline_model_parallel_size" in values:  # whole logits come from one stage: continue on one rank
        alone = {key: value for key, value in vars(config).items() if key not in values}
        ranks.start(1, MegatronConfig(**alone), model.shape, resume_from=str(tmp_path))
    logits = torch.from_numpy(ranks.first("logits", samples))

    merge_lora(model.hf_directory, adapter, tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == sent.keys()
    for key, value in merged.items():
        np.testing.assert_allclose(sent[key], value.numpy(), atol=1e-6, rtol=0, err_msg=key)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (hf_logits(exported, samples) - logits).abs().max() < 1e-5 * logits.abs().max()
        assert (hf_logits(model.hf, samples) - logits).abs().max() > 0.1
    if model.shape.num_experts:  # PEFT 0.21 takes any MLP's layer of such a model for one of the experts
        return
    import peft

    base = AutoModelForCausalLM.from_pretrained(model.hf_directory, dtype=torch.float32)
    with torch.no_grad():
        adapted = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()
        assert (hf_logits(adapted, samples) - logits).abs().max() < 1e-5 * logits.abs().max()


def test_the_reference_is_the_model_without_its_adapters(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model = tiny_model("qwen3")
    samples = make_samples(groups=2, per_group=2)
    ranks.start(2, tiny_config(load=model.checkpoint, **LORA, **TP2_SP), model.shape, ALGORITHM)
    shards = make_shards(samples)
    fresh = ranks.first("forward", shards)
    ranks.call("move_adapters")
    actor, reference = ranks.first("forward", shards), ranks.first("forward", shards, role="reference")
    for sample, base, before, after in zip(samples, reference, fresh, actor, strict=True):
        wanted = plain_log_probs(model.hf, sample, 1.0).detach().numpy()
        np.testing.assert_allclose(base, wanted, atol=1e-4)
        np.testing.assert_array_equal(before, base)  # B is 0 at first
        assert np.abs(after - base).max() > 0.1
    assert [np.abs(again - once).max() for again, once in zip(ranks.first("forward", shards), actor, strict=True)] == (
        [0.0] * len(samples)
    )


@pytest.mark.parametrize(
    ("world", "values"),
    [
        pytest.param(2, TP2_SP, marks=pytest.mark.full),
        (2, DO | {"bf16": True}),
        pytest.param(2, PP2, marks=pytest.mark.full),
    ],
    ids=["tp2+sp", "dp2+do, bf16", "pp2"],
)
def test_a_resumed_run_equals_one_that_never_stopped(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, world, values
):
    model = tiny_model("qwen3/4")
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), lr=2e-3, **LORA, **values)
    data_parallel = config.data_parallel_size(world)
    first, second = (make_shards(make_samples(seed=seed), data_parallel=data_parallel, steps=2) for seed in (0, 1))
    ranks.start(world, config, model.shape, ALGORITHM)
    ranks.call("train", first)
    ranks.call("save", 1)
    expected, weights = ranks.first("train", second).steps, ranks.first("weights")
    ranks.start(world, config, model.shape, ALGORITHM, resume_from=str(tmp_path))
    assert ranks.first("train", second).steps == expected
    assert all(np.array_equal(value, weights[key]) for key, value in ranks.first("weights").items())


def test_adapters_load_at_another_layout_and_never_go_unnoticed(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, rank_error
):
    model = tiny_model("qwen3")
    shards = make_shards(make_samples())
    ranks.start(2, tiny_config(load=model.checkpoint, save=str(tmp_path / "run"), **LORA, **TP2), model.shape)
    ranks.call("move_adapters")
    ranks.call("save", 1)
    weights = ranks.first("weights")
    ranks.start(1, tiny_config(load=str(tmp_path / "run"), **LORA), model.shape)
    for key, value in ranks.first("weights").items():
        np.testing.assert_allclose(value, weights[key], atol=1e-6, rtol=0, err_msg=key)
    for values, words in (
        ({}, "this run is without adapters"),
        (LORA | {"lora_alpha": 7.0}, "this run is with others"),
    ):
        with pytest.raises(rank_error, match=f"{words}; give --lora-rank 4 --lora-alpha 6, or merge") as caught:
            ranks.start(1, tiny_config(load=str(tmp_path / "run"), **values), model.shape)
        assert "\n" not in caught.value.text
    with pytest.raises(
        CheckpointError, match="holds LoRA adapters beside the base model's weights; merge its adapter/"
    ):
        torch_dist_to_hf(tmp_path / "run", tmp_path / "hf", model.hf_directory)
    # One without adapters is the base of fresh ones, which change nothing yet; no LoRA run continues from it.
    ranks.start(1, tiny_config(load=model.checkpoint, save=str(tmp_path / "base"), lr=0.0), model.shape)
    ranks.call("save", 1)
    expected = ranks.first("train", shards).steps[0]["loss"]
    ranks.start(1, tiny_config(load=str(tmp_path / "base"), **LORA), model.shape)
    assert ranks.first("train", shards).steps[0]["loss"] == expected
    with pytest.raises(rank_error, match="holds no adapters, so no run with --lora-rank can continue from it"):
        ranks.start(1, tiny_config(**LORA), model.shape, resume_from=str(tmp_path / "base"))


def sizes(lora, shape):
    """Numbers in the adapters, and in all weights of the model."""
    weights = WeightMap(shape)
    adapters = sum(lora.rank * sum(weights.megatron_shape(name)) for name in lora.weights(shape))
    return adapters, sum(math.prod(weights.megatron_shape(name)) for name in weights.megatron_names())


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_only_adapters_train(ranks, tiny_model, tiny_config, name):
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, **settings(f"{name}/4"))
    ranks.start(1, config, model.shape)
    adapters, weights = sizes(config.lora, model.shape)
    trained, held = ranks.first("trainable_numbers")
    assert trained == adapters and ranks.first("optimizer_numbers") == 2 * adapters
    padding = (model.shape.padded_vocab_size(1) - model.shape.vocab_size) * model.shape.hidden_size
    assert held == adapters + weights + 2 * padding


@pytest.mark.parametrize(("name", "rank"), [("qwen3-4B", 16), ("llama3.1-8B", 16), ("glm4-9B", 16)])
def test_adapters_of_published_models_are_under_a_hundredth(name, rank):
    shape = ModelShape.from_hf_config(PUBLISHED[name].config)
    adapters, weights = sizes(Lora(rank, 32.0), shape)
    assert weights > 3e9 and 0 < adapters < weights / 100


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_rank": 0, "lora_alpha": 1.0}, "--lora-rank 0 must be 1 or more"),
        ({"lora_rank": 4, "lora_alpha": 0.0}, "--lora-alpha 0.0 must be above 0"),
        ({"lora_alpha": 4.0}, "--lora-alpha 4.0 has no effect without --lora-rank"),
        (
            {"lora_target_modules": ("linear_qkv",)},
            "--lora-target-modules linear_qkv has no effect without --lora-rank",
        ),
        (LORA | {"freeze_params_name_list": ("a",)}, "--lora-rank trains adapters alone"),
    ],
)
def test_contradictions_are_named(values, words):
    with pytest.raises(ConfigError, match=words) as caught:
        MegatronConfig(**values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "linear_qvk",
            "linear_qvk matches no linear layer of the model; near names: linear_qkv, .*; allowed: linear_qkv",
        ),
        ("router", "router matches no linear layer of the model"),
        ("q_proj", "q_proj is a part of linear_qkv, which gets one adapter; give k_proj, v_proj too, or linear_qkv"),
    ],
)
def test_targets_that_fit_nothing_are_named(tiny_model, target, words):
    with pytest.raises(ConfigError, match=f"--lora-target-modules {words}") as caught:
        check_fits(MegatronConfig(**LORA, lora_target_modules=(target,)), tiny_model("qwen3").shape)
    assert "\n" not in str(caught.value)


def test_targets_may_have_hugging_face_names(tiny_model):
    shape = tiny_model("qwen3").shape
    theirs = Lora(4, 4.0, ("q_proj", "k_proj", "v_proj", "down_proj")).weights(shape)
    assert theirs == Lora(4, 4.0, ("linear_qkv", "linear_fc2")).weights(shape) and len(theirs) == 4
    latent = tiny_model("deepseek").shape
    assert Lora(4, 4.0, ("kv_b_proj",)).weights(latent) == Lora(4, 4.0, ("linear_kv_up_proj",)).weights(latent)
    shared = Lora(4, 4.0, ("shared_experts.linear_fc1",)).weights(latent)
    assert shared == ["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"]
    assert not any("local_experts" in name for name in Lora(4, 4.0).weights(latent))
