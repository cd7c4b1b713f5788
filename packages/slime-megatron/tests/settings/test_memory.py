"""The memory of a role, said before it is built, is what its ranks then hold."""

import dataclasses
import re

import numpy as np
import pytest

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.settings.memory import check_memory, stages_memory
from support.layouts import DO, EP2, PP2, TP2_SP, VPP2

LORA = {"lora_rank": 4, "lora_alpha": 4.0}
CASES = {
    "llama-tied, pp2": ("llama-tied/4", 2, PP2),
    "qwen3, tp2, bf16, dp1": ("qwen3/4", 2, TP2_SP | {"bf16": True}),
    "qwen3, dp2, bf16": ("qwen3/4", 2, DO | {"bf16": True}),
    "qwen3, pp2+vpp2": ("qwen3/4", 2, VPP2),
    "qwen3, pp2, uneven": ("qwen3/4", 2, PP2 | {"megatron_args": {"num_layers_in_last_pipeline_stage": 3}}),
    "qwen3, lora": ("qwen3/4", 2, TP2_SP | LORA),
    "qwen3, frozen": ("qwen3/4", 1, {"freeze_params_name_list": ("mlp",)}),
    "deepseek, ep2": ("deepseek-mtp/4", 2, EP2),
    "deepseek, ep2, dp2, pp2": ("deepseek-mtp/4", 4, EP2 | PP2 | DO),
}
SHOWN = ("qwen3, dp2, bf16", "qwen3, lora", "deepseek, ep2", "llama-tied, pp2")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in SHOWN else pytest.mark.full) for case in CASES]
)
def test_it_is_what_the_ranks_hold(ranks, tiny_model, tiny_config, case):
    name, world, values = CASES[case]
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, **values)
    expected = max(stages_memory(model.shape, config, world), key=lambda own: own.total)
    *on_device, elsewhere = dataclasses.astuple(expected)
    ranks.start(world, config, model.shape)
    held = max(ranks.call("held_bytes"), key=sum)
    # Core pads its buffers, and Adam counts its steps.
    assert held == pytest.approx(tuple(on_device), rel=0.02) and elsewhere == 0


@pytest.mark.parametrize("layout", [EP2 | PP2 | DO, TP2_SP | {"bf16": True}], ids=["ep2, pp2", "tp2"])
def test_experts_that_are_counted_take_what_experts_that_are_named_take(layout):
    """They are named where a pattern may choose among them; this one matches nothing."""
    shape = ModelShape.from_hf_config(PUBLISHED["qwen3-30B-A3B"].config)
    counted = MegatronConfig(**layout)
    named = dataclasses.replace(counted, freeze_params_name_list=("no such weight",))
    assert stages_memory(shape, counted, 8) == stages_memory(shape, named, 8)


@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_an_offloaded_optimizer_is_in_host_memory(fraction):
    """With a gradient of what is there; on a CPU nothing is elsewhere."""
    shape = ModelShape.from_hf_config(PUBLISHED["qwen3-4B"].config)
    args = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    config = MegatronConfig(bf16=True, use_distributed_optimizer=True, megatron_args=args)
    [whole], [own] = (stages_memory(shape, config, 8, on_gpu=on_gpu) for on_gpu in (False, True))
    assert (own.weights, own.gradients, whole.host) == (whole.weights, whole.gradients, 0)
    assert own.optimizer == pytest.approx((1 - fraction) * whole.optimizer, rel=1e-6)
    assert own.host == pytest.approx(fraction * whole.optimizer * 16 / 12, rel=1e-6)
    assert own.total == own.weights + own.gradients + own.optimizer


@pytest.mark.parametrize(
    ("name", "world", "values"),
    [
        ("llama-tied/4", 2, PP2),
        pytest.param("qwen3/4", 2, PP2 | {"bf16": True}, marks=pytest.mark.full),
        pytest.param("llama-tied/4", 2, TP2_SP, marks=pytest.mark.full),
        pytest.param("deepseek-mtp/4", 2, PP2, marks=pytest.mark.full),
    ],
)
def test_of_a_critic_too_it_is_what_every_stage_holds(ranks, tiny_model, tiny_config, name, world, values):
    """Its head is tied to no embedding, so that of a tied model the last stage has no copy of one."""
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, **values)
    stages = stages_memory(model.shape, config, world, value_head=True)
    ranks.start(world, config, model.shape, AlgorithmConfig(advantage_estimator="ppo"))
    for rank, held in enumerate(ranks.call("held_bytes", "critic")):
        *on_device, _ = dataclasses.astuple(stages[rank * len(stages) // world])
        assert held == pytest.approx(tuple(on_device), rel=0.02)


@pytest.mark.parametrize(
    "values", [{}, {"bf16": True, "use_distributed_optimizer": True}, {"lora_rank": 4}, PP2], ids=str
)
def test_a_worker_that_only_evaluates_holds_weights_alone(
    ranks, tiny_model, tiny_config, make_samples, make_shards, values, tmp_path
):
    """No critic either. It continues a checkpoint with the weights, and computes what the one that trains does."""
    model, world = tiny_model("qwen3/4"), values.get("pipeline_model_parallel_size", 1)
    config = tiny_config(load=model.checkpoint, save=str(tmp_path), lr=1e-3, **values)
    shards = make_shards(make_samples(groups=2))
    algorithm = AlgorithmConfig(advantage_estimator="ppo")
    ranks.start(world, config, model.shape, algorithm)
    ranks.call("train", shards)
    checkpoint = ranks.call("save", 0)[0]
    expected, trains = ranks.first("forward", shards), ranks.call("held_bytes")
    ranks.start(world, config, model.shape, algorithm, only_evaluates=True, resume_from=checkpoint)
    assert ranks.iteration == 0
    held = ranks.call("held_bytes")
    assert [one[0] for one in held] == pytest.approx([one[0] for one in trains], rel=0.01)  # a buffer is padded
    assert all(one[1:] == (0, 0) for one in held) and all(min(one[1:]) > 0 for one in trains)
    roles = ranks.call("role_bytes")
    assert [[one[0]] for one in held] == roles
    for mine, theirs in zip(ranks.first("forward", shards), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=5e-6)  # weights that lie elsewhere round otherwise
    stages = stages_memory(model.shape, config, world, only_evaluates=True)
    assert {(own.gradients, own.optimizer, own.host) for own in stages} == {(0, 0, 0)}
    assert max(one[0] for one in held) == pytest.approx(max(own.weights for own in stages), rel=0.02)
    ranks.call("sleep")
    ranks.call("wake")
    assert ranks.call("role_bytes") == roles
    assert "start the worker without only_evaluates" in ranks.first("error_of_training", shards)


def test_a_critic_has_a_head_of_one_row(tiny_model):
    shape = tiny_model("qwen3").shape
    [actor], [critic] = (stages_memory(shape, MegatronConfig(), 1, value_head=head) for head in (False, True))
    assert actor.weights - critic.weights == 4 * (shape.padded_vocab_size(1) - 1) * shape.hidden_size


def test_what_does_not_fit_is_named_with_its_parts():
    shape = ModelShape.from_hf_config(PUBLISHED["qwen3-4B"].config)
    stages = stages_memory(shape, MegatronConfig(bf16=True), 1)
    assert stages[0].weights == 2 * stages[0].gradients / 4
    parts = [4_022_468_096 * size / 2**30 for size in (2, 4, 12)]  # the bytes of a number; so many has Qwen3-4B
    weights, gradients, optimizer = (f"{part:.1f} GiB" for part in parts)
    says = (
        f"takes {sum(parts):.1f} GiB on each device ({weights} weights, {gradients} gradients, {optimizer} optimizer), "
    )
    with pytest.raises(ConfigError, match=re.escape(f"the actor {says}which has 40.0 GiB; split it")) as caught:
        check_memory({"actor": stages}, 40 * 2**30, take_turns=True)
    assert "\n" not in str(caught.value)
    split = stages_memory(shape, MegatronConfig(bf16=True, use_distributed_optimizer=True), 8)
    check_memory({"actor": split}, 40 * 2**30, take_turns=False)


def test_roles_that_take_turns_need_the_memory_of_one():
    """Of a pipeline the stage counts that holds most of both together. This model's last has its embedding, too."""
    shape = ModelShape.from_hf_config(PUBLISHED["qwen3-4B"].config)
    config = MegatronConfig(bf16=True, pipeline_model_parallel_size=2)
    roles = {
        "actor": stages_memory(shape, config, 2),
        "critic": stages_memory(shape, config, 2, value_head=True),
    }
    most = max(own.total for stages in roles.values() for own in stages)
    both = max(actor.total + critic.total for actor, critic in zip(*roles.values(), strict=True))
    check_memory(roles, most, take_turns=True)
    check_memory(roles, both, take_turns=False)
    with pytest.raises(
        ConfigError, match=f"the actor takes {most / 2**30:.1f} GiB on .*, which has {most / 2**30:.1f} GiB"
    ):
        check_memory(roles, most - 1, take_turns=True)
    half, whole = f"{both / 2**31:.1f} GiB", f"{both / 2**30:.1f} GiB"
    needed = re.escape(f"take {half} + {half} on each device, which has {whole}, and each fits alone")
    with pytest.raises(ConfigError, match=f"the actor and the critic {needed}") as caught:
        check_memory(roles, both - 1, take_turns=False)
    assert "--offload-train" in str(caught.value) and "\n" not in str(caught.value)
