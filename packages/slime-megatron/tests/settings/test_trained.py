"""Freezing by name: frozen weights keep every bit, and nothing is kept for them; what trains is as in one process."""

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.fits import check_fits
from support.plain import ADAM_EPS

ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
DO = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}
# A model, what trains, a pattern of the Hugging Face names of all that trains, and layouts: ranks and settings.
LAST_STAGE = {"only_train_params_name_list": (r"layers\.3\.mlp", "final_layernorm")}
FIRST_STAGE = {"only_train_params_name_list": (r"layers\.0\.self_attention",)}
TWO_RANKS = {"tp2+sp": (2, TP2_SP), "pp2": (2, PP2), "dp2+do": (2, DO), "pp2,dp2+do": (4, PP2 | DO)}
CASES = {
    "the last layer": ("qwen3/4", LAST_STAGE, ("layers.3.mlp", "model.norm"), TWO_RANKS),
    "the first layer": ("qwen3/4", FIRST_STAGE, ("layers.0.self_attn",), TWO_RANKS | {"recompute": (1, FULL)}),
    "all but the embedding": (
        "llama-tied/4",
        {"freeze_params_name_list": ("word_embeddings",)},
        ("layers", "model.norm"),
        {"pp2": (2, PP2), "tp2": (2, {"tensor_model_parallel_size": 2}), "recompute": (1, FULL)},
    ),
    "experts alone": (
        "qwen3-moe/4",
        {"only_train_params_name_list": ("local_experts",)},
        ("mlp.experts",),
        {
            "ep2": (2, {"expert_model_parallel_size": 2}),
            "tp2+sp": (2, TP2_SP),
            "dp2+do": (2, DO),
            "recompute": (1, MOE),
        },
    ),
    "all but experts": (
        "qwen3-moe/4",
        {"freeze_params_name_list": ("experts",)},
        ("self_attn", "norm", "embed", "lm_head", "mlp.gate."),
        {"ep2": (2, {"expert_model_parallel_size": 2}), "dp2+do": (2, DO)},
    ),
}
SHOWN = {
    "the last layer": ("pp2",),
    "the first layer": (),
    "all but the embedding": ("recompute",),
    "experts alone": ("ep2",),
    "all but experts": ("dp2+do",),
}
RUNS = [
    pytest.param(case, layout, marks=[] if layout in SHOWN[case] else [pytest.mark.full])
    for case, (*_, layouts) in CASES.items()
    for layout in layouts
]


@pytest.fixture(scope="module")
def trained(rank_group, rank_pool, tiny_model, tiny_config, make_samples, make_shards):
    """Two steps of a case in a layout: their metrics, the weights, and how many numbers of state all ranks keep."""
    known = {}

    def train(case, world, settings):
        key = (case, world, tuple(settings.items()))
        if key not in known:
            name, chosen, _, _ = CASES[case]
            ranks, model = rank_group(rank_pool), tiny_model(name)
            config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **chosen, **settings)
            samples = make_samples(groups=4, per_group=4)
            ranks.start(world, config, model.shape, ALGORITHM)
            shards = make_shards(samples, data_parallel=config.data_parallel_size(world), steps=2, micro_batch_size=2)
            reports = ranks.call("train", shards)
            assert all(report.steps == reports[0].steps for report in reports)
            kept = ranks.call("optimizer_numbers")
            known[key] = (reports[0].steps, ranks.first("weights"), kept)
            ranks.close()
        return known[key]

    return train


@pytest.mark.parametrize(("case", "layout"), RUNS)
def test_frozen_weights_keep_every_bit_and_the_others_train_as_in_one_process(trained, tiny_model, case, layout):
    name, _, changing, layouts = CASES[case]
    expected_steps, expected, _ = trained(case, 1, {})
    steps, weights, _ = trained(case, *layouts[layout])
    for step, wanted in zip(steps, expected_steps, strict=True):
        for metric in ("loss", "grad_norm", "kl_loss"):
            assert step[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-6), metric
        assert step["grad_norm"] > 0 and step["lr"] == wanted["lr"] > 0
    for key, start in tiny_model(name).hf.state_dict().items():
        if key not in weights:
            continue
        if any(part in key for part in changing):
            assert np.abs(weights[key] - start.numpy()).max() > 1e-3, key
            np.testing.assert_allclose(weights[key], expected[key], atol=1e-5, rtol=0, err_msg=key)
        else:
            np.testing.assert_array_equal(weights[key], start.numpy(), err_msg=key)


@pytest.mark.parametrize("case", ["the last layer", "experts alone"])
def test_the_optimizer_keeps_nothing_for_frozen_weights(trained, tiny_model, case):
    """Adam's two means of what trains, once over all ranks with the distributed optimizer, and nothing else."""
    name, _, changing, _ = CASES[case]
    weights = tiny_model(name).hf.state_dict()
    trains = sum(
        weight.numel()
        for key, weight in weights.items()
        if any(part in key for part in changing) and "gate." not in key
    )
    if case == "experts alone":  # transformers stacks them
        trains = sum(weight.numel() for key, weight in weights.items() if "mlp.experts" in key)
    for world, settings in ((1, {}), (2, DO)):
        assert sum(trained(case, world, settings)[2]) == 2 * trains


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        pytest.param(2, PP2, id="pp2"),
        pytest.param(2, PP2 | {"bf16": True}, id="pp2, bf16", marks=pytest.mark.full),
        pytest.param(4, PP2 | DO, id="pp2,dp2+do", marks=pytest.mark.full),
        pytest.param(2, DO, id="dp2+do", marks=pytest.mark.full),
    ],
)
def test_a_stage_that_trains_nothing_continues_from_a_checkpoint(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, world, settings
):
    """The first stage writes the optimizer's common state, and has none; nor has a rank that holds padding alone."""
    model = tiny_model("qwen3/4")
    chosen = {"only_train_params_name_list": ("final_layernorm",)}
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), **chosen, **settings)
    data_parallel = config.data_parallel_size(world)
    first, second = (make_shards(make_samples(seed=seed), data_parallel=data_parallel, steps=2) for seed in (0, 1))
    ranks.start(world, config, model.shape)
    ranks.call("train", first)
    ranks.call("save", 1)
    expected = ranks.first("train", second).steps
    weights = ranks.first("weights")
    ranks.start(world, config, model.shape, resume_from=str(tmp_path))
    assert ranks.first("train", second).steps == expected
    assert all(np.array_equal(value, weights[key]) for key, value in ranks.first("weights").items())


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        pytest.param(("final_layernorm",), {}, id="no layer"),
        pytest.param((r"layers\.1\.",), DO, id="one layer"),
        pytest.param((r"layers\.[12]\.",), {}, id="a layer of each stage", marks=pytest.mark.full),
    ],
)
def test_it_continues_at_another_layout(
    ranks, tiny_model, tiny_config, make_samples, make_shards, tmp_path, names, settings
):
    """Also with most layers frozen, where Megatron cannot stack the optimizer's state of all layers."""
    model = tiny_model("qwen3/4")
    chosen = {"only_train_params_name_list": names, "load": model.checkpoint, "save": str(tmp_path)}
    chosen |= {"adam_eps": ADAM_EPS, **settings}
    first, second = (make_shards(make_samples(seed=seed), steps=2) for seed in (0, 1))
    ranks.start(2, tiny_config(**chosen, **PP2), model.shape)
    ranks.call("train", first)
    ranks.call("save", 1)
    expected = ranks.first("train", second).steps
    ranks.start(1, tiny_config(**chosen), model.shape, resume_from=str(tmp_path))
    for got, wanted in zip(ranks.first("train", second).steps, expected, strict=True):
        assert all(got[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6) for name in ("loss", "grad_norm"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"freeze_params_name_list": ("linear_qvk",)},
            "--freeze-params-name-list linear_qvk matches no weight of the model; near names: linear_qkv, ",
        ),
        ({"only_train_params_name_list": ("zzz",)}, "zzz matches no weight of the model; patterns are searched in"),
        ({"freeze_params_name_list": (".",)}, r"--freeze-params-name-list \. leaves no weight to train"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_named(tiny_model, values, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_fits(MegatronConfig(**values), tiny_model("qwen3").shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"freeze_params_name_list": ("(",)}, r"--freeze-params-name-list \( is an invalid regular expression"),
        (
            {"freeze_params_name_list": ("a",), "only_train_params_name_list": ("b",)},
            "each say which weights train; give one of them",
        ),
    ],
)
def test_patterns_that_contradict_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        MegatronConfig(**values)
