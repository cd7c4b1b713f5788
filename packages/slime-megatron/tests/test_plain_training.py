"""GRPO steps of every family equal those in plain PyTorch on transformers: losses, gradients and weights."""

import copy

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from support.plain import ADAM_EPS, plain_adamw, plain_log_probs, same_step
from support.tiny_models import DENSE, EXPERTS, LATENT

GRPO_WITH_KL = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")


def in_float64(hf):
    model = copy.deepcopy(hf).double()
    model.set_experts_implementation("eager")  # the grouped product is for 32 bits
    return model


def plain_training(hf, steps, *, config, algorithm, temperature):
    """GRPO with AdamW in float64, sample by sample: the model after the last step, each step's loss and gradient norm,
    and the first step's gradients.

    In float32 this reference would have rounding errors of its own, which differ between processors.
    """
    model, reference = in_float64(hf), in_float64(hf)
    optimizer = plain_adamw(model, config)
    old = {}
    with torch.no_grad():
        for sample in (sample for samples in steps for sample in samples):
            old[sample.index] = plain_log_probs(model, sample, temperature)
    metrics, gradients = [], {}
    for samples in steps:
        total = 0.0
        optimizer.zero_grad()
        for sample in samples:
            mask = torch.tensor(sample.loss_mask)
            new = plain_log_probs(model, sample, temperature)
            with torch.no_grad():
                ref = plain_log_probs(reference, sample, temperature)
            ratio = (new - old[sample.index]).exp()
            clipped = ratio.clamp(1 - algorithm.eps_clip, 1 + algorithm.clip_high)
            loss = torch.maximum(-ratio * sample.reward, -clipped * sample.reward)
            loss = loss + algorithm.kl_loss_coef * ((ref - new).exp() - 1 - (ref - new))
            loss = (loss * mask).sum() / mask.sum().clamp(min=1) / len(samples)
            loss.backward()
            total += loss.item()
        gradients = gradients or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        metrics.append({"loss": total, "grad_norm": float(norm)})
    return model, metrics, gradients


def published(tensors):
    """A transformers model's tensors under the names of its checkpoints: experts, which it stacks, one by one."""
    found = {}
    for name, stacked in tensors.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            layer = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(stacked):
                for part, value in zip(("gate", "up"), both.chunk(2), strict=True):
                    found[f"{layer}{expert}.{part}_proj.weight"] = value.numpy()
        elif name.endswith("mlp.experts.down_proj"):
            for expert, value in enumerate(stacked):
                found[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = value.numpy()
        else:
            found[name] = stacked.numpy()
    return found


LAYOUTS = {
    "one": {},
    "shared prompts": {"share_prompts": "on"},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
# So much that the beginning is worth computing once. This seed draws no padding token (0): that gets no gradient.
COMMON = {"common": 13, "seed": 1}
SHOWN = [("llama-tied", "shared prompts"), ("qwen3", "one"), ("glm4-moe", "tp2+sp"), ("deepseek", "tp2+sp")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in SHOWN else pytest.mark.full)
        for name in DENSE + EXPERTS + LATENT
        for layout in LAYOUTS
    ],
)
def test_two_steps_equal_plain_pytorch(ranks, tiny_model, tiny_config, make_samples, make_shards, name, layout):
    model = tiny_model(name)
    config = tiny_config(load=model.checkpoint, adam_eps=ADAM_EPS, **LAYOUTS[layout])
    samples = make_samples(groups=4, per_group=3, masks=True, **(COMMON if layout == "shared prompts" else {}))
    expected, metrics, gradients = plain_training(
        model.hf, [samples[:6], samples[6:]], config=config, algorithm=GRPO_WITH_KL, temperature=0.8
    )
    ranks.start(config.tensor_model_parallel_size, config, model.shape, GRPO_WITH_KL)
    shards = make_shards(samples, steps=2, temperature=0.8)
    report, [found, _] = ranks.call("train_and_watch_gradients", shards)[0]
    # Multiples of the bounds that hold for the first two: what larger activations leave in float32, as measured.
    rounding = {"llama-tied": 1, "qwen3": 1, "glm4-flash": 5}.get(name, 2)
    same_step(report.steps, metrics, ("loss",), rounding * 2e-6)
    same_step(report.steps[:1], metrics[:1], ("grad_norm",), rounding * 2e-6)
    # The second gradient is one of weights that float32 has rounded: 0.2 to 2.1e-6 between processors.
    same_step(report.steps[1:], metrics[1:], ("grad_norm",), rounding * 5e-6)
    assert report.steps[0]["kl_loss"] < 1e-6 < report.steps[1]["kl_loss"]
    gradients = published(gradients)
    trained = {key for key in found if not key.startswith(f"model.layers.{model.shape.num_layers}.")}  # MTP is frozen
    assert trained == gradients.keys()
    for key, value in gradients.items():
        assert np.abs(found[key] - value).max() <= rounding * 1e-5 * np.abs(value).max() + 1e-9, key
    weights, before, moved = ranks.first("weights"), published(model.hf.state_dict()), 0.0
    for key, value in published(expected.state_dict()).items():
        if key in weights:
            np.testing.assert_allclose(weights[key], value, atol=rounding * 5e-6, rtol=0, err_msg=key)
            moved = max(moved, float(np.abs(value - before[key]).max()))
    assert moved > 1e-3


@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "dist-opt"])
def test_each_rollout_may_begin_with_a_new_optimizer(
    ranks, tiny_model, tiny_config, make_samples, make_shards, distributed
):
    """Two rollouts of two steps equal two trainings in plain PyTorch, the second on the weights of the first.

    There are twice as many first steps of Adam as elsewhere, each with rounding errors times lr / eps: eps is larger.
    """
    model, algorithm = tiny_model("qwen3"), AlgorithmConfig()
    settings = {"use_distributed_optimizer": distributed, "reset_optimizer_states": True}
    config = tiny_config(load=model.checkpoint, adam_eps=10 * ADAM_EPS, **settings)
    samples = make_samples(groups=4, per_group=3, masks=True)
    ranks.start(1, config, model.shape, algorithm)
    expected = model.hf
    for rollout_id, steps in enumerate(([samples[:6], samples[6:]], [samples[6:], samples[:6]])):
        expected, metrics, _ = plain_training(expected, steps, config=config, algorithm=algorithm, temperature=0.8)
        shards = make_shards([*steps[0], *steps[1]], steps=2, temperature=0.8, rollout_id=rollout_id)
        same_step(ranks.first("train", shards).steps, metrics, ("loss", "grad_norm"), 1e-5)
    weights = ranks.first("weights")
    for key, value in expected.state_dict().items():
        if key in weights:
            np.testing.assert_allclose(weights[key], value.numpy(), atol=5e-6, rtol=0, err_msg=key)
