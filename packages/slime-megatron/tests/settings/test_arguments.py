"""Megatron's other arguments: which can be given, what becomes of them, and what those compute that balance experts."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from support.plain import ADAM_EPS

BIAS = "moe_router_bias_update_rate"
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("qwen3", {"lr": 0.1}, "lr 0.1 is a setting of its own; give it as --lr"),
        ("qwen3", {"recompute_modules": ["mlp"]}, "give it as --recompute-modules"),
        ("qwen3", {"moe_z_los_coeff": 1.0}, "unknown to Megatron-core; near names: moe_z_loss_coeff"),
        ("qwen3", {"hidden_size": 65}, "hidden_size 65: the model has 64; leave it out"),
        ("qwen3-moe", {"num_moe_experts": 4}, "num_moe_experts 4: the model has 8"),
        ("qwen3", {"bucket_size": 1.5}, "bucket_size 1.5 must be int or None"),
        ("qwen3", {"batch_p2p_sync": 1}, "batch_p2p_sync 1 must be True or False"),
        ("qwen3", {"moe_token_drop_policy": "all"}, "moe_token_drop_policy 'all' must be probs or position"),
        ("qwen3-moe", {"moe_aux_loss_coeff": -1.0}, "moe_aux_loss_coeff -1.0 must be a number, 0 or more"),
        ("qwen3", {"timers": print}, "timers is a function, which slime sets"),
        ("qwen3", {"fp16": True}, "fp16 True cannot be given: precision follows --bf16; leave it out"),
        ("qwen3", {"batch_p2p_comm": False}, "batch_p2p_comm False cannot be given: the pipeline's schedule"),
        ("qwen3", {"calculate_per_token_loss": True}, "calculate_per_token_loss True cannot be given"),
        ("qwen3", {"moe_aux_loss_coeff": 0.1}, "moe_aux_loss_coeff 0.1: the model has no experts; leave it out"),
        ("qwen3-moe", {BIAS: 0.1}, "moe_router_bias_update_rate 0.1: the model's routers have no bias"),
        ("qwen3-moe", {"moe_router_load_balancing_type": "sinkhorn"}, "allowed: none, aux_loss, seq_aux_loss"),
        (
            "qwen3-moe",
            {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss"},
            "moe_aux_loss_coeff 0.1 needs moe_router_load_balancing_type aux_loss, not seq_aux_loss",
        ),
        (
            "qwen3-moe",
            {"moe_pad_expert_input_to_capacity": True},
            "Megatron-core refuses the settings, given moe_pad_expert_input_to_capacity True: moe_expert_capacity_fac",
        ),
    ],
)
def test_what_cannot_be_given_is_named(ranks, tiny_model, tiny_config, rank_error, name, arguments, words):
    with pytest.raises(rank_error, match=words) as caught:
        ranks.start(1, tiny_config(megatron_args=arguments), tiny_model(name).shape)
    assert caught.value.kind == "ConfigError"
    assert "\n" not in caught.value.text


def test_all_that_is_wrong_is_named_at_once(ranks, tiny_model, tiny_config, rank_error):
    arguments = {"lr": 0.1, "hidden_sizes": 64, "fp16": True, "bucket_size": "large"}
    with pytest.raises(rank_error) as caught:
        ranks.start(1, tiny_config(megatron_args=arguments), tiny_model("qwen3").shape)
    assert len(caught.value.text.splitlines()) == 4


def test_adapters_want_a_base_that_stays(ranks, tiny_model, tiny_config, rank_error):
    config = tiny_config(lora_rank=2, lora_alpha=2.0, megatron_args={BIAS: 0.1})
    with pytest.raises(rank_error, match=f"{BIAS} 0.1 changes the model, and --lora-rank adapters alone"):
        ranks.start(1, config, tiny_model("deepseek").shape)


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        ({"moe_z_loss_coeff": 0.1}, {}, "moe_z_loss_coeff 0.1, which counts a shared prompt once"),
        ({"moe_expert_capacity_factor": 2.0}, {}, "moe_expert_capacity_factor 2.0, which counts a shared prompt once"),
        ({}, {"context_parallel_size": 2}, "--context-parallel-size 2, which cuts each sample by itself"),
    ],
)
def test_prompts_are_not_shared_where_that_would_change_the_result(
    ranks, tiny_model, tiny_config, make_samples, make_shards, arguments, settings, words
):
    model = tiny_model("qwen3-moe")
    world = settings.get("context_parallel_size", 1)
    ranks.start(world, tiny_config(load=model.checkpoint, megatron_args=arguments, **settings), model.shape)
    assert f"--share-prompts auto shares none: it does not work with {words}" in ranks.first("warnings")
    samples = make_samples(groups=1)
    reports = ranks.call("train", make_shards(samples))
    computed = sum(report.tokens["forward_backward"] for report in reports)
    assert computed == sum(len(sample.tokens) - 1 for sample in samples)


def balance_losses(hf, samples):
    """Two losses over all layers and tokens, each sample by itself, from the inputs of the experts' layers.

    Switch Transformer's (Fedus et al., 2021, equation 4): E / (K T²) Σ_e n_e Σ_t p_te, where n_e tokens go to
    expert e and p is the router's softmax; and ST-MoE's z loss (Zoph et al., 2022, equation 5), the mean of log² Σ exp.
    """
    inputs, hooks = {}, []
    layers = [layer.mlp for layer in hf.model.layers]
    for number, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, given, n=number: inputs.setdefault(n, []).append(given)))
    for sample in samples:
        hf(torch.tensor([sample.tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    aux, z = 0.0, 0.0
    for number, layer in enumerate(layers):
        hidden_TD = torch.cat([given[0].reshape(-1, given[0].shape[-1]) for given in inputs[number]])
        logits_TE = torch.nn.functional.linear(hidden_TD, layer.gate.weight)
        tokens, experts = logits_TE.shape
        chosen = logits_TE.topk(2, dim=1).indices.flatten()
        loads_E = torch.bincount(chosen, minlength=experts)
        aux = aux + experts / (2 * tokens**2) * (loads_E * logits_TE.softmax(-1).sum(0)).sum()
        z = z + logits_TE.logsumexp(-1).square().mean()
    return aux, z


def test_router_losses_are_those_of_the_papers(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, samples = tiny_model("qwen3-moe"), make_samples(groups=2)
    grads = []
    for arguments in ({"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25}, {}):
        config = tiny_config(load=model.checkpoint, share_prompts="off", megatron_args=arguments)
        ranks.start(1, config, model.shape)
        grads.append(ranks.first("train_and_watch_gradients", make_shards(samples))[1][0])
    hf = copy.deepcopy(model.hf)
    aux, z = balance_losses(hf, samples)
    (0.5 * aux + 0.25 * z).backward()
    compared = 0
    for name, weight in hf.named_parameters():
        if name in grads[0] and weight.grad is not None:
            found, wanted = grads[0][name] - grads[1][name], weight.grad.numpy()
            assert np.abs(found - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max()), name
            compared += name.endswith("gate.weight")
    assert compared == 2


REGULATED = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.25, BIAS: 0.01}


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, TP2_SP, id="tp2+sp"),
        pytest.param(2, {"expert_model_parallel_size": 2}, id="dp2+ep2"),
        pytest.param(2, {"context_parallel_size": 2}, id="cp2", marks=pytest.mark.full),
        pytest.param(4, TP2_SP | {"pipeline_model_parallel_size": 2}, id="tp2+sp, pp2", marks=pytest.mark.full),
        pytest.param(1, RECOMPUTED, id="recomputed", marks=pytest.mark.full),
    ],
)
def test_a_layout_regulates_load_as_one_process_does(
    ranks, tiny_model, tiny_config, make_samples, make_shards, world, settings
):
    """With the same micro-batches: the router's losses are means over them. Padding does not count."""
    model, samples = tiny_model("deepseek/4"), make_samples(groups=4, masks=True)
    halves = samples[0::2] + samples[1::2]
    found = []
    for ranks_used, how in ((1, {}), (world, settings)):
        config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, megatron_args=REGULATED, **how)
        if config.data_parallel_size(ranks_used) == 2:
            shards = make_shards(samples, data_parallel=2)
        else:
            shards = make_shards(halves, micro_batch_size=len(halves) // 2)
        ranks.start(ranks_used, config, model.shape)
        [*answers] = ranks.call("train_and_watch_gradients", shards)
        found.append((answers[0][1][0], ranks.first("weights")))
    (expected, weights), (grads, others) = found
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        np.testing.assert_array_equal(others[name], weights[name])
    for name, wanted in expected.items():
        assert float(np.abs(grads[name] - wanted).max()) <= 1e-5 * float(np.abs(wanted).max()) + 1e-9, name


def test_the_routers_biases_move_by_the_load_alone(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """By the rate, up for experts that had less than the mean; not where a rank runs fillers, nor if a step fails."""
    model, samples = tiny_model("deepseek"), make_samples(groups=2)
    samples = [dataclasses.replace(s, reward=0.0) if number % 2 else s for number, s in enumerate(samples)]
    config = tiny_config(load=model.checkpoint, megatron_args={BIAS: 0.125, "moe_aux_loss_coeff": 0.1})
    [name] = [name for name, _ in model.hf.named_buffers() if name.endswith("e_score_correction_bias")]
    before, moved = dict(model.hf.named_buffers())[name].numpy(), []
    for world in (1, 2):
        ranks.start(world, config, model.shape)
        ranks.call("train", make_shards(samples, data_parallel=world, micro_batch_size=3))
        moved.append(ranks.first("weights")[name])
    np.testing.assert_array_equal(moved[0], moved[1])
    steps = np.round((moved[0] - before) / 0.125, 4)
    assert set(steps) <= {-1.0, 0.0, 1.0}
    assert {-1.0, 1.0} <= set(steps)
    loads = chosen_experts(copy.deepcopy(model.hf), samples[0::2])
    np.testing.assert_array_equal(steps, np.sign(loads.mean() - loads))

    ranks.start(1, config, model.shape)
    broken = [dataclasses.replace(sample, reward=3e38) for sample in make_samples(groups=1)]
    error, unchanged = ranks.first("train_and_fail", make_shards(broken))
    assert "the step was not taken" in error
    assert unchanged


def chosen_experts(hf, samples):
    """How many tokens transformers' DeepSeek-V3 sends to each expert of its last layer."""
    layer, counts = hf.model.layers[-1].mlp, np.zeros(8)

    def count(module, given):
        *_, indices = module.gate(given[0])
        np.add.at(counts, indices.flatten().numpy(), 1)

    hook = layer.register_forward_pre_hook(count)
    with torch.no_grad():
        for sample in samples:
            hf(torch.tensor([sample.tokens[:-1]]))
    hook.remove()
    return counts


def test_overlap_of_a_step_that_trains_nothing(ranks, tiny_model, tiny_config, make_samples, make_shards):
    """Nothing has started to reduce gradients then."""
    model, samples = tiny_model("qwen3"), make_samples(groups=2)
    nothing = [dataclasses.replace(sample, reward=0.0) for sample in samples]
    weights = []
    for overlap in ("off", "on"):
        config = tiny_config(
            load=model.checkpoint,
            adam_eps=ADAM_EPS,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        ranks.start(2, config, model.shape)
        for given in (nothing, samples, nothing, samples):
            ranks.call("train", make_shards(given, data_parallel=2))
        weights.append(ranks.first("weights"))
    for key, value in weights[0].items():
        np.testing.assert_allclose(weights[1][key], value, atol=1e-6, rtol=0, err_msg=key)


def test_two_deterministic_runs_are_equal(ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, found = tiny_model("qwen3-moe"), []
    for _ in range(2):
        config = tiny_config(load=model.checkpoint, deterministic_mode=True, trainer_threads=2)
        ranks.start(1, config, model.shape, AlgorithmConfig(entropy_coef=0.01))
        report = ranks.first("train", make_shards(make_samples(), steps=2))
        found.append((report.steps, ranks.first("weights")))
        assert ranks.first("megatron_settings", ["deterministic_mode"]) == {"deterministic_mode": True}
        assert ranks.first("is_deterministic")
    assert found[0][0] == found[1][0]
    assert all(np.array_equal(value, found[1][1][key]) for key, value in found[0][1].items())
    ranks.start(1, tiny_config(load=model.checkpoint), model.shape)
    assert not ranks.first("is_deterministic")
