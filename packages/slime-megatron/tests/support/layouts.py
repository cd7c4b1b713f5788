"""The parallel layouts that must compute what one process computes, and the models that they are shown with."""

import dataclasses
from typing import Any, NamedTuple

from slime_core.config import AlgorithmConfig
from slime_core.schedule import ShardSpec, build_shards
from slime_core.types import RolloutBatch, Sample, Status
from support.plain import ADAM_EPS

STEPS = 3
# A step of 1e-2 in Adam is 1e-2 · g / (|g| + eps), so rounding errors of small gradients come out 1e-2 / eps times as
# large: 100 times with eps 1e-4, and 33 times with this.
EPS = 3 * ADAM_EPS
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


class Layout(NamedTuple):
    """Ranks, settings, and how a step is divided: by samples in a micro-batch, or by slime-core under a token limit.

    ``uneven``: some samples have a reward of 0 and are left out, of two data-parallel ranks more of the second's, in
    the last step all of them.
    """

    world: int
    settings: dict[str, Any]
    micro_batch_size: int | None = None
    max_tokens: int | None = None
    uneven: bool = False


LAYOUTS = {
    "tp2": Layout(2, {"tensor_model_parallel_size": 2}, 3),
    "tp2+sp": Layout(2, TP2_SP, 3),
    "tp2+sp+etp1": Layout(2, TP2_SP | {"expert_tensor_parallel_size": 1}, 3),
    "pp2": Layout(2, PP2, 2),
    "pp2+vpp2": Layout(2, VPP2, 2),
    "dp2": Layout(2, {}, 3),
    "dp2+dist-opt": Layout(2, DO, 3),
    "dp2+dist-opt+overlap": Layout(2, DO | OVERLAP, 2),
    "pp2+vpp2, dp2+dist-opt+overlap": Layout(4, VPP2 | DO | OVERLAP, 2),
    "cp2": Layout(2, CP2, 3),
    "ep2": Layout(2, EP2, 3),
    "tp2+sp+etp1+ep2": Layout(2, TP2_SP | EP2 | {"expert_tensor_parallel_size": 1}, 3),
    "tp2+sp, pp2": Layout(4, TP2_SP | PP2, 2),
    "pp2, dp2": Layout(4, PP2, 2),
    "cp2, pp2": Layout(4, CP2 | PP2, 2),
    "tp2+sp, cp2": Layout(4, TP2_SP | CP2, 3),
    "tp2+sp, dp2, ep2": Layout(4, TP2_SP | EP2, 3),
    "pp2, dp2, ep2": Layout(4, PP2 | EP2, 2),
    "micro-batches": Layout(1, {}, 3),
    "pp2+vpp2, 3 micro-batches": Layout(2, VPP2, 3),
    "dynamic micro-batches, dp2": Layout(2, {}, max_tokens=60),
    "dynamic micro-batches, ep2": Layout(2, EP2, max_tokens=60),
    "dynamic micro-batches, pp2+vpp2": Layout(2, VPP2, max_tokens=60),
    "uneven ranks, dp2": Layout(2, {}, 1, uneven=True),
    "uneven ranks, ep2": Layout(2, EP2, 1, uneven=True),
    "uneven ranks, pp2+vpp2, dp2": Layout(4, VPP2, 1, uneven=True),
    "full recomputation": Layout(1, FULL),
    "selective recomputation": Layout(1, SELECTIVE),
    "recomputed mlp": Layout(1, SELECTIVE | {"recompute_modules": ("core_attn", "mlp")}),
    "recomputed experts": Layout(1, SELECTIVE | {"recompute_modules": ("core_attn", "mlp", "moe")}),
    "recomputed shared experts": Layout(1, SELECTIVE | {"recompute_modules": ("shared_experts",)}),
    "fused activations": Layout(1, {"megatron_args": {"bias_activation_fusion": True, "bias_dropout_fusion": True}}),
    "shared prompts": Layout(1, SHARED, 4),
    "shared prompts, pp2+vpp2": Layout(2, VPP2 | SHARED, 4),
    "shared prompts, tp2+sp": Layout(2, TP2_SP | SHARED),
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


def unevenly_rewarded(samples):
    """Samples of three steps of 8, which two ranks get in turns: one keeps 3 of each, the other 1, 1 and none."""
    return [
        dataclasses.replace(sample, reward=0.0)
        if number % 8 == 0 or (number % 2 and (number % 8 < 7 or number >= 16))
        else sample
        for number, sample in enumerate(samples)
    ]


def deal(make_shards, samples, layout, config):
    """The shard of each data-parallel rank."""
    ranks = config.data_parallel_size(layout.world)
    if layout.max_tokens is None:
        return make_shards(samples, data_parallel=ranks, steps=STEPS, micro_batch_size=layout.micro_batch_size)
    batch = RolloutBatch(rollout_id=0, groups=[[_as_rolled_out(sample) for sample in samples]])
    shards = build_shards(
        batch,
        ShardSpec(
            algorithm=AlgorithmConfig(disable_rewards_normalization=True),
            temperature=1.0,
            data_parallel_size=ranks,
            micro_batch_size=1,
            global_batch_size=len(samples) // STEPS,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=layout.max_tokens,
        ),
    )
    sizes = {len(batch) for shard in shards for step in shard.steps for batch in step.micro_batches}
    assert len(sizes) > 1, "the limit gives micro-batches of different sizes"
    return shards


def _as_rolled_out(sample):
    return Sample(
        index=sample.index,
        group_index=sample.group_index,
        prompt="",
        tokens=sample.tokens,
        response_length=sample.response_length,
        loss_mask=sample.loss_mask,
        reward=sample.reward,
        rollout_log_probs=sample.rollout_log_probs,
        status=Status.COMPLETED,
    )
