"""Every parallel layout computes what one process computes: losses, gradients and weights of three steps."""

import socket

import numpy as np
import pytest

from plain import ADAM_EPS
from slime_core.config import AlgorithmConfig

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
STEPS = 3
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = PP2 | {"virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": "on", "overlap_param_gather": "on"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
SHARED = {"share_prompts": "on"}
# Ranks, settings, samples in a micro-batch.
LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}, 3),
    "tp2+sp": (2, TP2_SP, 3),
    "tp2+sp+etp1": (2, TP2_SP | {"expert_tensor_parallel_size": 1}, 3),
    "pp2": (2, PP2, 2),
    "pp2+vpp2": (2, VPP2, 2),
    "dp2": (2, {}, 3),
    "dp2+dist-opt": (2, DO, 3),
    "dp2+dist-opt+overlap": (2, DO | OVERLAP, 2),
    "pp2+vpp2, dp2+dist-opt+overlap": (4, VPP2 | DO | OVERLAP, 2),
    "cp2": (2, CP2, 3),
    "ep2": (2, EP2, 3),
    "tp2+sp+etp1+ep2": (2, TP2_SP | EP2 | {"expert_tensor_parallel_size": 1}, 3),
    "tp2+sp, pp2": (4, TP2_SP | PP2, 2),
    "pp2, dp2": (4, PP2, 2),
    "cp2, pp2": (4, CP2 | PP2, 2),
    "tp2+sp, cp2": (4, TP2_SP | CP2, 3),
    "tp2+sp, dp2, ep2": (4, TP2_SP | EP2, 3),
    "pp2, dp2, ep2": (4, PP2 | EP2, 2),
    "micro-batches": (1, {}, 3),
    "full recomputation": (1, FULL, None),
    "selective recomputation": (1, SELECTIVE, None),
    "recomputed mlp": (1, SELECTIVE | {"recompute_modules": ("core_attn", "mlp")}, None),
    "recomputed experts": (1, SELECTIVE | {"recompute_modules": ("core_attn", "mlp", "moe")}, None),
    "recomputed shared experts": (1, SELECTIVE | {"recompute_modules": ("shared_experts",)}, None),
    "fused activations": (1, {"megatron_args": {"bias_activation_fusion": True, "bias_dropout_fusion": True}}, None),
    "shared prompts": (1, SHARED, 4),
    "shared prompts, pp2+vpp2": (2, VPP2 | SHARED, 4),
    "shared prompts, tp2+sp": (2, TP2_SP | SHARED, None),
}
DENSE = ["llama-tied/4", "qwen3/4", "glm4/4"]
WITH_EXPERTS = ["qwen3-moe/4", "glm4-moe/4", "deepseek/4"]


def suits(name, layout):
    """Experts with tensor parallelism need sequence parallelism; other models have no experts to place, and what says
    how many ranks share an expert changes nothing."""
    if "shared experts" in layout:
        return name in ("glm4-moe/4", "deepseek/4")
    return (
        layout not in ("tp2", "tp2+sp+etp1")
        if name in WITH_EXPERTS
        else "ep2" not in layout and "experts" not in layout
    )


def is_shown(name, layout):
    """In the normal run: every layout, of a model with experts and latent attention if it has to do with them; and two
    layouts of every family."""
    if layout == "pp2+vpp2, dp2+dist-opt+overlap":
        return False
    with_experts = "ep2" in layout or "experts" in layout or layout in ("cp2", "dp2+dist-opt", "fused activations")
    return name == ("deepseek/4" if with_experts else "qwen3/4") or layout in ("tp2+sp", "pp2+vpp2")


BF16_SHOWN = (("qwen3/4", "tp2+sp"), ("qwen3/4", "shared prompts"), ("deepseek/4", "pp2+vpp2"))


def train(ranks, model, config, shards, world, mutation=None):
    """Each step's metrics and gradients, and the weights after the last."""
    ranks.start(world, config, model.shape, GRPO)
    answers = ranks.call("train_and_watch_gradients", shards, mutation)
    assert all(report.steps == answers[0][0].steps for report, _ in answers), "metrics of ranks"
    return answers[0][0].steps, answers[0][1], ranks.first("weights")


def largest_differences(found, expected, *, with_gradients):
    """The largest difference of each kind, relative; AssertionError where one is beyond its bound."""
    (steps, grads, weights), (expected_steps, expected_grads, expected_weights) = found, expected
    largest = {"loss": 0.0, "grad_norm": 0.0, "gradient": 0.0, "weight": 0.0}
    for step, wanted in zip(steps, expected_steps, strict=True):
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert step[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-6), metric
        for metric in ("loss", "grad_norm"):
            largest[metric] = max(largest[metric], abs(step[metric] - wanted[metric]) / max(1, abs(wanted[metric])))
    assert weights.keys() == expected_weights.keys()
    if with_gradients:
        # The later gradients are those of weights that float32 has rounded.
        assert grads[0].keys() == expected_grads[0].keys()
        for key, wanted in expected_grads[0].items():
            scale = np.abs(wanted).max()
            difference = np.abs(grads[0][key] - wanted).max()
            assert difference <= 1e-5 * scale + 1e-9, (key, difference, scale)
            largest["gradient"] = max(largest["gradient"], float(difference / (scale or 1)))
    for key, value in expected_weights.items():
        difference = float(np.abs(weights[key] - value).max())
        largest["weight"] = max(largest["weight"], difference)
        assert difference <= 3e-5, key  # of steps of 1e-2
    return largest


@pytest.fixture(scope="session")
def alone(tiny_model, tiny_config, make_samples, make_shards, rank_group, rank_pool):
    """A model's training in one process, in one micro-batch a step."""
    known = {}

    def compute(name, **settings):
        key = (name, *settings)
        if key not in known:
            ranks, model = rank_group(rank_pool), tiny_model(name)
            config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **settings)
            samples = make_samples(groups=6, per_group=4, masks=True)
            known[key] = train(ranks, model, config, make_shards(samples, steps=STEPS), 1)
            ranks.close()
        return known[key]

    return compute


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in BF16_SHOWN else [pytest.mark.full])
        for name in ("qwen3/4", "deepseek/4")
        for layout in ("tp2+sp", "pp2+vpp2", "cp2", "dp2+dist-opt", "shared prompts")
    ],
)
def test_a_layout_equals_one_process_in_bf16(
    ranks, alone, tiny_model, tiny_config, make_samples, make_shards, name, layout
):
    """Within rounding: sums are taken in another order."""
    world, settings, micro_batch_size = LAYOUTS[layout]
    [first, *_], _, _ = alone(name, bf16=True)
    config = tiny_config(load=tiny_model(name).checkpoint, adam_eps=ADAM_EPS, bf16=True, **settings)
    samples = make_samples(groups=6, per_group=4, masks=True)
    data_parallel = config.data_parallel_size(world)
    shards = make_shards(samples, data_parallel=data_parallel, steps=STEPS, micro_batch_size=micro_batch_size)
    ranks.start(world, config, tiny_model(name).shape, GRPO)
    [step, *_] = ranks.first("train", shards).steps
    assert step["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-2)
    assert step["loss"] == pytest.approx(first["loss"], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if is_shown(name, layout) else [pytest.mark.full])
        for name in DENSE + WITH_EXPERTS
        for layout in LAYOUTS
        if suits(name, layout)
    ],
)
def test_a_layout_equals_one_process(
    ranks, alone, tiny_model, tiny_config, make_samples, make_shards, name, layout, record_property
):
    """The table in the README shows the differences: see scripts/equality_table.py."""
    world, settings, micro_batch_size = LAYOUTS[layout]
    expected = alone(name)
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **settings)
    shards = make_shards(
        make_samples(groups=6, per_group=4, masks=True),
        data_parallel=config.data_parallel_size(world),
        steps=STEPS,
        micro_batch_size=micro_batch_size,
    )
    with_gradients = not config.use_distributed_optimizer or config.data_parallel_size(world) == 1
    found = train(ranks, model, config, shards, world)
    largest = largest_differences(found, expected, with_gradients=with_gradients)
    record_property("family", name)
    record_property("layout", layout)
    for kind, value in largest.items():
        if kind != "gradient" or with_gradients:
            record_property(kind, value)


@pytest.mark.parametrize(
    ("name", "virtual", "first", "last"),
    [
        ("qwen3/4", None, None, 3),
        pytest.param("deepseek/4", None, 3, None, marks=pytest.mark.full),
        pytest.param("qwen3/6", 2, 2, None, marks=pytest.mark.full),
    ],
)
def test_stages_of_unequal_length_equal_one_process(
    ranks, alone, tiny_model, tiny_config, make_samples, make_shards, name, virtual, first, last
):
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    settings = PP2 | {"virtual_pipeline_model_parallel_size": virtual}
    settings |= {"megatron_args": {end: layers for end, layers in ends.items() if layers is not None}}
    config = tiny_config(load=tiny_model(name).checkpoint, adam_eps=ADAM_EPS, **settings)
    samples = make_samples(groups=6, per_group=4, masks=True)
    shards = make_shards(samples, steps=STEPS, micro_batch_size=2)
    expected = alone(name)
    largest_differences(train(ranks, tiny_model(name), config, shards, 2), expected, with_gradients=True)


@pytest.mark.parametrize(
    ("mutation", "layout", "name", "seen_in"),
    [
        ("swapped chunks", "cp2", "qwen3/4", "grad_norm"),
        ("skipped experts", "dp2", "qwen3-moe/4", "grad_norm"),
        ("dropped broadcast", "pp2", "qwen3/4", "metrics of ranks"),
    ],
)
def test_what_breaks_between_ranks_is_seen(
    ranks, alone, tiny_model, tiny_config, make_samples, make_shards, mutation, layout, name, seen_in
):
    world, settings, micro_batch_size = LAYOUTS[layout]
    config = tiny_config(load=tiny_model(name).checkpoint, adam_eps=ADAM_EPS, **settings)
    samples = make_samples(groups=6, per_group=4, masks=True)
    data_parallel = config.data_parallel_size(world)
    shards = make_shards(samples, data_parallel=data_parallel, steps=STEPS, micro_batch_size=micro_batch_size)
    expected = alone(name)
    with pytest.raises(AssertionError, match=seen_in):
        found = train(ranks, tiny_model(name), config, shards, world, mutation)
        largest_differences(found, expected, with_gradients=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_ranks_meet_at_one_address_and_listen_at_no_other(ranks, tiny_model, tiny_config, address):
    model = tiny_model("llama-tied/4")
    ranks.start(2, tiny_config(load=model.checkpoint), model.shape, address=address)
    assert [host for host in ("127.0.0.1", "127.0.0.2", "::1") if answers(host, ranks.port)] == [address]


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True
