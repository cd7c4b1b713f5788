"""Transformer Engine's layers, of stand-ins, compute, name and save what local layers do."""

import numpy as np
import pytest
import torch

from slime_convert.mapping import WeightMap
from slime_core.config import AlgorithmConfig
from support.plain import ADAM_EPS, same_step

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TE = {"transformer_impl": "transformer_engine"}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "moe_act", "core_attn")}
EP2 = {"expert_model_parallel_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def te_pool():
    pool = []
    yield pool
    for member in pool:
        member.stop()


@pytest.fixture
def te_ranks(rank_group, te_pool, monkeypatch):
    """Ranks that have stand-ins for Transformer Engine, also those that are started later."""
    monkeypatch.setenv("TE_STAND_IN", "1")
    group = rank_group(te_pool)
    yield group
    group.close()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("glm4", {}, marks=pytest.mark.full),
        pytest.param("deepseek-mtp", TP2_SP, marks=pytest.mark.full),
        pytest.param("qwen3-moe", EP2, marks=pytest.mark.full),
        pytest.param("qwen3-moe", TP2_SP, marks=pytest.mark.full),
        pytest.param("glm4-moe", TP2_SP | EP2 | {"expert_tensor_parallel_size": 1}, marks=pytest.mark.full),
        pytest.param("qwen2-tied", {"tensor_model_parallel_size": 2}, marks=pytest.mark.full),
        ("moonlight", {}),
    ],
)
def test_te_layers_do_what_local_ones_do(
    te_ranks, tiny_model, tiny_config, make_samples, make_shards, hf_logits, tmp_path, name, layout
):
    """Logits, steps, exported weights; and a checkpoint of either kind of layers continues with the other.

    Experts are computed one by one by local layers, and as one grouped product by Transformer Engine's.
    """
    model, ranks, size = tiny_model(name), te_ranks, max(layout.values(), default=1)
    samples = make_samples(groups=2, per_group=3)
    shards = make_shards(samples, data_parallel=size // layout.get("tensor_model_parallel_size", 1))
    found = {}
    for kind in ("local", "transformer_engine"):
        own = {**layout, "transformer_impl": kind, "save": str(tmp_path / kind), "adam_eps": ADAM_EPS}
        ranks.start(size, tiny_config(load=model.checkpoint, **own), model.shape, GRPO)
        calls, grouped = ranks.first("te_attention_calls"), ranks.first("grouped_calls")
        logits = ranks.first("logits", samples)
        assert (ranks.first("te_attention_calls") > calls) == (kind == "transformer_engine")
        is_grouped = kind == "transformer_engine" and model.shape.num_experts is not None
        assert (ranks.first("grouped_calls") > grouped) == is_grouped
        with torch.no_grad():
            assert (torch.from_numpy(logits) - hf_logits(model.hf, samples)).abs().max() < 1e-4
        step = ranks.first("train", shards).steps
        ranks.call("save", 1)
        found[kind] = step, ranks.first("weights")
    check(*found.values())
    continued = {}
    for kind, other in (("transformer_engine", "local"), ("local", "transformer_engine")):
        config = tiny_config(load=model.checkpoint, **layout, transformer_impl=kind, adam_eps=ADAM_EPS)
        ranks.start(size, config, model.shape, GRPO, resume_from=str(tmp_path / other))
        assert ranks.iteration == 1
        continued[kind] = ranks.first("train", shards).steps, ranks.first("weights")
    check(*continued.values())


def check(one, other):
    same_step(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for key, value in one[1].items():
        assert np.abs(other[1][key] - value).max() <= 3e-5, key


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("deepseek", ("layernorm", "mla_up_proj", "moe_act")),
        pytest.param("qwen3-moe", ("layernorm", "moe_act"), marks=pytest.mark.full),
    ],
)
def test_what_te_layers_compute_again_is_the_same(
    te_ranks, tiny_model, tiny_config, make_samples, make_shards, name, modules
):
    """But for rounding: a norm's input then gets its gradients in another order."""
    model, shards = tiny_model(name), make_shards(make_samples(groups=2, per_group=3), steps=2)
    found = []
    for recomputed in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **TE, **recomputed)
        te_ranks.start(1, config, model.shape, GRPO)
        before = te_ranks.first("grouped_calls")
        steps = te_ranks.first("train", shards).steps
        found.append((steps, te_ranks.first("weights"), te_ranks.first("grouped_calls") - before))
    check(*found)
    assert found[0][2] == found[1][2]  # of the experts the activation alone is computed again


def test_experts_one_by_one_in_te_layers(te_ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, shards = tiny_model("qwen3-moe"), make_shards(make_samples(groups=2, per_group=3))
    found = []
    for arguments in ({}, {"moe_grouped_gemm": False}, {"moe_grouped_gemm": True}):
        config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, megatron_args=arguments, **TE)
        te_ranks.start(1, config, model.shape, GRPO)
        assert not [text for text in te_ranks.first("warnings") if "moe_grouped_gemm" in text]
        before = te_ranks.first("grouped_calls")
        steps = te_ranks.first("train", shards).steps
        assert (te_ranks.first("grouped_calls") > before) == arguments.get("moe_grouped_gemm", True)
        found.append((steps, te_ranks.first("weights")))
    check(found[0], found[1])
    check(found[0], found[2])


def test_gradients_are_added_up_in_products_without_apex(te_ranks, tiny_model, tiny_config):
    """By Transformer Engine's layers; no local one, which would need Apex's kernel, does. Not run on CUDA."""
    model = tiny_model("deepseek-mtp")
    [found] = te_ranks.call_apart(1, "fusing_layers", tiny_config(**TE), model.shape)
    kinds = {kind for kind, _ in found.values()}
    assert {"HiddenOutput", "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear"} <= kinds
    assert {name: fuses for name, (kind, fuses) in found.items() if fuses != kind.startswith("TE")} == {}


def test_fused_norms_are_frozen_by_their_own_names(te_ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, samples = tiny_model("qwen3"), make_samples(groups=2, per_group=3)
    config = tiny_config(load=model.hf_directory, freeze_params_name_list=("layernorm",), **TE)
    te_ranks.start(1, config, model.shape)
    before = te_ranks.first("weights")
    te_ranks.call("train", make_shards(samples))
    after = te_ranks.first("weights")
    assert before.keys() == set(WeightMap(model.shape).hf_names())
    assert {name for name in before if np.array_equal(before[name], after[name])} == {
        name for name in before if "norm" in name
    }


def test_prompts_are_not_shared_where_attention_cannot(te_ranks, tiny_model, tiny_config, make_samples, make_shards):
    model, samples = tiny_model("qwen3"), make_samples(groups=2, per_group=4, prompt=20)
    te_ranks.start(1, tiny_config(load=model.checkpoint, **TE), model.shape)
    [warning] = [text for text in te_ranks.first("warnings") if "prompts" in text]
    assert warning.startswith("prompts are not shared: Transformer Engine's attention cannot")
    report = te_ranks.first("train", make_shards(samples))
    assert report.tokens["forward_backward"] == sum(len(sample.tokens) - 1 for sample in samples)
