"""Every parallel layout computes what one process computes: losses, gradient norms and weights of three steps."""

import numpy as np
import pytest

from plain import ADAM_EPS
from slime_core.config import AlgorithmConfig

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
STEPS = 3
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
# Ranks, settings, micro-batch size.
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}, 3),
    "tp2+sp": (2, TP2_SP, 3),
    "pp2": (2, PP2, 2),
    "pp2+vpp2": (2, PP2 | {"virtual_pipeline_model_parallel_size": 2}, 2),
    "dp2": (2, {}, 3),
    "dp2+do": (2, {"use_distributed_optimizer": True}, 3),
    "dp2+do+overlap": (
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        2,
    ),
    "cp2": (2, CP2, 3),
    "ep2": (2, EP2, 3),
    "tp2+sp,etp1,ep2": (2, TP2_SP | EP2 | {"expert_tensor_parallel_size": 1}, 3),
    "shared prompts": (1, {"share_prompts": True}, 4),
    "pp2 shared": (2, PP2 | {"share_prompts": True}, 4),
    "recompute": (1, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, None),
    "tp2+sp,pp2": (4, TP2_SP | PP2, 2),
    "pp2,dp2": (4, PP2, 2),
    "cp2,pp2": (4, CP2 | PP2, 2),
    "tp2+sp,cp2": (4, TP2_SP | CP2, 3),
    "tp2+sp,dp2,ep2": (4, TP2_SP | EP2, 3),
    "pp2,dp2,ep2": (4, PP2 | EP2, 2),
}
FAMILIES = ["llama-tied/4", "qwen3/4", "glm4/4", "qwen3-moe/4", "glm4-moe/4", "deepseek/4"]


def has_experts(name):
    return name in ("qwen3-moe/4", "glm4-moe/4", "deepseek/4")


def train(ranks, model, config, samples, make_shards, world, micro_batch_size):
    ranks.start(world, config, model.shape, GRPO)
    data_parallel = config.data_parallel_size(world)
    shards = make_shards(samples, data_parallel=data_parallel, steps=STEPS, micro_batch_size=micro_batch_size)
    reports = ranks.call("train", shards)
    assert all(report.steps == reports[0].steps for report in reports)
    return reports[0].steps, ranks.first("weights")


@pytest.fixture(scope="session")
def alone(tiny_model, tiny_config, make_samples, make_shards, rank_group, rank_pool):
    """A model's training in one process."""
    known = {}

    def compute(name):
        if name not in known:
            ranks, model = rank_group(rank_pool), tiny_model(name)
            config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS)
            samples = make_samples(groups=6, per_group=4, masks=True)
            known[name] = train(ranks, model, config, samples, make_shards, 1, None)
            ranks.close()
        return known[name]

    return compute


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_layout_equals_one_process(ranks, alone, tiny_model, tiny_config, make_samples, make_shards, name, layout):
    world, settings, micro_batch_size = LAYOUTS[layout]
    model = tiny_model(name)
    if "ep2" in layout and not has_experts(name):
        pytest.skip("no experts")
    if layout == "tp2" and has_experts(name):
        pytest.skip("refused")
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **settings)
    expected_steps, expected = alone(name)
    steps, weights = train(
        ranks, model, config, make_samples(groups=6, per_group=4, masks=True), make_shards, world, micro_batch_size
    )
    for step, wanted in zip(steps, expected_steps, strict=True):
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert step[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-6), metric
    assert weights.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(weights[key], value, atol=1e-5, rtol=0, err_msg=key)
