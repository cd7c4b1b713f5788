"""``--optimizer-cpu-offload``: Megatron-core's own optimizer with a stand-in for host memory. Not run on CUDA."""

import dataclasses

import numpy as np
import pytest

from slime_core.config import AlgorithmConfig
from slime_megatron.settings.memory import stages_memory

GRPO = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
OFFLOAD = {"optimizer_cpu_offload": True}
ALL = OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True, "use_precision_aware_optimizer": True}
HALF = OFFLOAD | {"optimizer_offload_fraction": 0.5}
PP2 = {"pipeline_model_parallel_size": 2}
CASES = {
    "all": ("qwen3", {}, ALL),
    "half": ("qwen3", {}, HALF),
    "half, experts": ("qwen3-moe", {"expert_model_parallel_size": 2}, HALF),
    "a stage without weights that train": ("qwen3", PP2 | {"only_train_params_name_list": ("final_layernorm",)}, ALL),
    "adapters": ("qwen3", {"lora_rank": 4, "lora_alpha": 8.0}, ALL),
    "adam from 0": ("qwen3", {"reset_optimizer_states": True}, HALF),
}
SHOWN = ("half", "a stage without weights that train")


@pytest.fixture
def start(ranks, tiny_config):
    """Starts two ranks as on GPUs, and gives their settings."""

    def begin(model, args, resume_from=None, **settings):
        settings = {"bf16": True, "use_distributed_optimizer": True, "lr_warmup_iters": 3, **settings}
        config = tiny_config(load=model.checkpoint, megatron_args=args, **settings)
        ranks.call_apart(2, "build_on_gpu", config, GRPO, model.shape, resume_from=resume_from)
        return config

    return begin


def rollouts(make_samples, make_shards, data_parallel):
    return [
        make_shards(make_samples(seed=seed), data_parallel=data_parallel, steps=2, rollout_id=seed) for seed in range(3)
    ]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SHOWN else pytest.mark.full) for case in CASES]
)
def test_it_changes_no_bit(ranks, start, tiny_model, make_samples, make_shards, tmp_path, case):
    """Of steps and weights, over a sleep; and a checkpoint of either is continued by either as if nobody had stopped.

    An operation on tensors of both memories, but for a copy, fails.
    """
    name, settings, args = CASES[case]
    model, shards = tiny_model(name), rollouts(make_samples, make_shards, 1 if settings.keys() & PP2.keys() else 2)
    ends = {}

    def rest():
        return [ranks.first("train", each).steps for each in shards[1:]], ranks.first("weights")

    for offloaded in (False, True):
        config = start(model, args if offloaded else {}, save=str(tmp_path / str(offloaded)), **settings)
        first = ranks.first("train", shards[0]).steps
        ranks.call("save", 1)
        ranks.call("sleep")
        ranks.call("wake")
        ends[offloaded] = first, *rest()
    if (fraction := config.offload_fraction) == 1:  # counts of steps alone are left on the GPU
        own = max(stages_memory(model.shape, config, 2, on_gpu=True), key=lambda own: own.host)
        assert max(ranks.call("host_bytes")) == pytest.approx(own.host, rel=0.02) and own.optimizer == 0
        assert max(optimizer for _, _, optimizer in ranks.call("held_bytes")) < 1000
    else:
        assert any(ranks.call("host_bytes")) and any(optimizer > 1000 for _, _, optimizer in ranks.call("held_bytes"))
    assert ends[True][0] == ends[False][0]
    found = [ends[True][1:]]
    for saved, continued in ((True, True), (False, True), (True, False)):
        start(model, args if continued else {}, resume_from=str(tmp_path / str(saved)), **settings)
        found.append(rest())
    for steps, weights in found:
        assert steps == ends[False][1]
        for key, value in ends[False][2].items():
            np.testing.assert_array_equal(weights[key], value, err_msg=key)
    assert fraction == args.get("optimizer_offload_fraction", 1.0)


def test_what_is_not_finite_stops_the_run_before_the_weights_change(
    ranks, start, tiny_model, make_samples, make_shards
):
    samples = [dataclasses.replace(sample, reward=3e38) for sample in make_samples(groups=2)]
    start(tiny_model("qwen3"), ALL)
    error, unchanged = ranks.first("train_and_fail", make_shards(samples, data_parallel=2))
    assert "grad_norm of an optimizer step must be finite" in error and unchanged
    assert ranks.first("warnings") == []


@pytest.mark.parametrize("settings", [{"bf16": False}, {"use_distributed_optimizer": False}])
def test_what_core_cannot_offload_is_refused(start, tiny_model, rank_error, settings):
    with pytest.raises(rank_error, match=r"ConfigError: --optimizer-cpu-offload needs --bf16 and"):
        start(tiny_model("qwen3"), OFFLOAD, **settings)
