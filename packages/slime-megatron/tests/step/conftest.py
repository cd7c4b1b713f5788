"""Samples for algorithms that look at engines and teachers."""

import dataclasses
import random

import pytest
import torch

from support.plain import plain_log_probs

TEMPERATURE = 0.8


@pytest.fixture
def near_samples(make_samples, tiny_model):
    """Samples with gaps in their masks, two of them one trajectory; log-probs of engine and teacher near ours."""

    def build(groups=4):
        model, generator = tiny_model("qwen3").hf, random.Random(3)
        samples = make_samples(groups=groups, per_group=3, masks=True)
        result = []
        for number, sample in enumerate(samples):
            joined = samples[number - number % 3 + 1 : number - number % 3 + 3] if number % 3 else [sample]
            with torch.no_grad():
                ours = plain_log_probs(model, sample, TEMPERATURE).tolist()
            rollout, teacher = ([value + generator.gauss(0, 0.3) for value in ours] for _ in range(2))
            result.append(
                dataclasses.replace(
                    sample, reward=joined[-1].reward, rollout_log_probs=rollout, teacher_log_probs=teacher,
                    trajectory_tokens=sum(sum(part.loss_mask) for part in joined),
                )
            )  # fmt: skip
        return result

    return build
