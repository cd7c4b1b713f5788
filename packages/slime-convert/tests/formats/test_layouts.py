"""Whole models in every parallel layout, written as Megatron-LM's ranks would, back to Hugging Face bit by bit.

The shards are made by ``WeightMap.split_tp``, which the tests of the trainer hold against megatron-core.
"""

import argparse
from dataclasses import dataclass

import pytest
import torch

from slime_convert import ModelShape, WeightMap, megatron_to_hf
from slime_convert.errors import ShapeMismatchError
from support.family_models import assert_same_weights, weights_of


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; ``stages`` are the layers of each pipeline stage."""

    tp: int = 1
    stages: tuple[int, ...] = (3,)
    ep: int = 1
    etp: int | None = None

    @property
    def pairs(self):
        """The tensor and expert ranks that exist: experts take the processes in an order of their own."""
        etp = self.etp or self.tp
        ranks = range(self.tp * self.ep * etp)
        return {(rank % self.tp, rank // etp % self.ep) for rank in ranks}


LAYOUTS = [
    Layout(),
    Layout(tp=2, stages=(2, 1)),
    Layout(tp=2, stages=(1, 2), ep=2),
    Layout(tp=2, ep=2, etp=1),
    Layout(stages=(0, 2, 1), ep=4),
    Layout(tp=2, stages=(0, 3, 0), ep=4, etp=1),
]
WITH_EXPERTS = ("qwen3-moe", "glm4-moe", "deepseek", "moonlight", "qwen2-moe", "mixtral", "gpt-oss", "glm5")
DENSE = ("glm4", "qwen2-tied", "llama3-scaled")
QUICK = {
    ("qwen3-moe", LAYOUTS[3]),
    ("glm4-moe", LAYOUTS[4]),
    ("deepseek", LAYOUTS[2]),
    ("qwen2-tied", LAYOUTS[1]),
    ("gpt-oss", LAYOUTS[2]),
    ("qwen2-moe", LAYOUTS[5]),
}


def ranks_of(origin, layout, engine, latents_in_parts):
    """Each rank's part of the model, by tensor, pipeline and expert rank."""
    shape = ModelShape.from_hf_config(origin)
    weights, stored = WeightMap(shape, shape.padded_vocab_size(layout.tp)), weights_of(origin)
    first = [sum(layout.stages[:stage]) for stage in range(len(layout.stages) + 1)]
    ranks = {(t, p, e): {} for t, e in layout.pairs for p in range(len(layout.stages))}
    for name in weights.megatron_names():
        whole, expert = weights.from_hf(name, stored.__getitem__), weights.expert(name)
        stage = 0 if name.startswith("embedding") else len(layout.stages) - 1
        local = weights.te_name(name) if engine else name
        if name.startswith("decoder.layers."):
            layer = int(name.split(".")[2])
            stage = next(p for p in range(len(layout.stages)) if first[p] <= layer < first[p + 1])
            local = local.replace(f".{layer}.", f".{layer - first[stage]}.", 1)
        per_rank = (shape.num_experts or 0) // layout.ep
        etp = layout.etp or layout.tp
        for t, e in layout.pairs:
            key, parts = local, layout.tp
            if expert is not None:
                if expert // per_rank != e:
                    continue
                parts, number = etp, f"{expert % per_rank}"
                key = (
                    key.removesuffix(str(expert)) + number
                    if engine
                    else key.replace(f"local_experts.{expert}.", f"local_experts.{number}.")
                )
            shards = weights.split_tp(name, whole, parts)
            if latents_in_parts and name.endswith(("q_down_proj.weight", "kv_down_proj.weight")):
                shards = whole.chunk(parts)
            ranks[t, stage, e][key] = shards[t % parts].clone()
    return ranks


def save(root, origin, layout, *, engine=False, latents_in_parts=False, **more):
    args = argparse.Namespace(
        **ModelShape.from_hf_config(origin).to_megatron_args() | more,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=len(layout.stages),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or layout.tp,
    )
    for (t, p, e), state in ranks_of(origin, layout, engine, latents_in_parts).items():
        place = f"mp_rank_{t:02d}" + f"_{p:03d}" * (len(layout.stages) > 1) + f"_{e:03d}" * (layout.ep > 1)
        (root / place).mkdir(parents=True)
        torch.save({"args": args, "checkpoint_version": 3.0, "model": state}, root / place / "model_optim_rng.pt")
    return root


def cases():
    for model in (*WITH_EXPERTS, *DENSE):
        for number, layout in enumerate(LAYOUTS):
            if layout.ep == 1 or model in WITH_EXPERTS:
                marks = [] if (model, layout) in QUICK else [pytest.mark.full]
                yield pytest.param(model, layout, id=f"{model}-{number}", marks=marks)


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "local"])
@pytest.mark.parametrize(("model", "layout"), cases())
def test_every_layout_is_the_model_it_came_from(made, tmp_path, model, layout, engine):
    origin = made(model)
    megatron_to_hf(save(tmp_path / "legacy", origin, layout, engine=engine), tmp_path / "hf", origin)
    assert_same_weights(tmp_path / "hf", origin)


@pytest.mark.parametrize("model", ["deepseek", "moonlight"])
def test_latents_that_local_layers_split_are_joined(made, tmp_path, model):
    """megatron-core's own linear layer splits the projections to the latents; Transformer Engine's repeats them."""
    legacy = save(tmp_path / "legacy", made(model), Layout(tp=2), latents_in_parts=True)
    megatron_to_hf(legacy, tmp_path / "hf", made(model))
    assert_same_weights(tmp_path / "hf", made(model))


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "moe_mlp_glu_interleave_size"])
def test_weights_of_another_meaning_are_refused(made, tmp_path, name):
    """Their shapes fit: without a word the model would be another."""
    origin = made("qwen2-tied")
    legacy = save(tmp_path / "legacy", origin, Layout(), **{name: 32})
    with pytest.raises(ShapeMismatchError, match=rf"was written with {name} 32, which gives weights another meaning"):
        megatron_to_hf(legacy, tmp_path / "hf", origin)
    unset = save(tmp_path / "unset", origin, Layout(), apply_layernorm_1p=False, moe_mlp_glu_interleave_size=None)
    megatron_to_hf(unset, tmp_path / "hf", origin)
    assert_same_weights(tmp_path / "hf", origin)
