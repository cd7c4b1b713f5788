"""A step has one denominator: a ragged batch, every other sample wholly masked, divided in every way.

The learning rate is 0, so that the gradients of a rollout's steps are all of the same weights.
"""

import copy
import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from slime_core.config import AlgorithmConfig
from support.layouts import CP2, DO
from support.plain import plain_log_probs


class Way(NamedTuple):
    """Ranks, settings, and samples in a micro-batch."""

    world: int
    settings: dict[str, Any]
    micro_batch_size: int | None


WAYS = {
    "one micro-batch": Way(1, {}, None),
    "micro-batches of 1": Way(1, {}, 1),
    "micro-batches of 3": Way(1, {}, 3),
    "dp2": Way(2, {}, 2),
    "dp2, distributed optimizer": Way(2, DO, 1),
    "cp2": Way(2, CP2, 3),
    "dp2, cp2": Way(4, CP2, 1),
}
SHOWN = ("micro-batches of 3", "dp2, distributed optimizer", "dp2, cp2")
LOSSES = {"a mean per sample": False, "a mean over tokens": True}
STEPS = (1, 2)


@pytest.fixture(scope="module")
def samples(make_samples):
    """Responses of 1 to 20 tokens; of two data-parallel ranks, the second has nothing to train on."""
    ragged = [one for length in (1, 6, 18) for one in make_samples(groups=1, response=length, seed=length, masks=True)]
    masks = [[0] * one.response_length if place % 2 else one.loss_mask for place, one in enumerate(ragged)]
    return [
        dataclasses.replace(one, index=place, loss_mask=mask, trajectory_tokens=sum(mask), reward=place - 4.3)
        for place, (one, mask) in enumerate(zip(ragged, masks, strict=True))
    ]


@pytest.fixture(scope="module")
def plain_gradients(tiny_model, samples):
    """Of transformers in float64: the loss, its gradient and its norm for each step of a rollout."""

    def compute(per_token, steps):
        model, found = copy.deepcopy(tiny_model("qwen3").hf).double(), []
        size = len(samples) // steps
        for number in range(steps):
            members, loss = samples[number * size : (number + 1) * size], torch.zeros((), dtype=torch.float64)
            for sample in members:
                mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
                log_probs = plain_log_probs(model, sample, 1.0)
                whole = -sample.reward * (torch.exp(log_probs - log_probs.detach()) * mask).sum()
                loss = loss + (whole if per_token else whole / mask.sum().clamp(min=1.0))
            loss = loss / (sum(sum(sample.loss_mask) for sample in members) if per_token else size)
            model.zero_grad()
            loss.backward()
            grads = {name: weight.grad.clone() for name, weight in model.named_parameters()}
            norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
            found.append((loss.item(), float(norm), {name: grad.numpy() for name, grad in grads.items()}))
        return found

    return compute


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way in SHOWN else [pytest.mark.full]) for way in WAYS])
def test_gradient_and_norm_are_equal_however_a_batch_is_divided(
    ranks, tiny_model, tiny_config, make_shards, samples, plain_gradients, way, loss
):
    model, (world, settings, micro_batch_size) = tiny_model("qwen3"), WAYS[way]
    config = tiny_config(load=model.checkpoint, lr=0.0, **settings)
    ranks.start(world, config, model.shape, AlgorithmConfig(calculate_per_token_loss=LOSSES[loss]))
    for steps in STEPS:
        shards = make_shards(
            samples,
            data_parallel=config.data_parallel_size(world),
            micro_batch_size=micro_batch_size,
            steps=steps,
        )
        answers = ranks.call("train_and_watch_gradients", shards)
        expected = plain_gradients(LOSSES[loss], steps)
        assert all(report.steps == answers[0][0].steps for report, _ in answers), "metrics of ranks"
        for step, grads, (value, norm, wanted) in zip(answers[0][0].steps, answers[0][1], expected, strict=True):
            assert step["loss"] == pytest.approx(value, rel=1e-5, abs=1e-6)
            assert step["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert grads.keys() <= wanted.keys() and len(grads) > 20
            for name, grad in grads.items():
                largest = max(float(np.abs(wanted[name]).max()), 1e-3)
                np.testing.assert_allclose(grad, wanted[name], atol=1e-5 * largest, rtol=0, err_msg=name)
