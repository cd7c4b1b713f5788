import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops import (
    Advantages,
    log_probs_and_entropy,
    policy_advantages,
    policy_objective,
    token_weights,
)

VOCAB, WIDTH = 11, 5
FULL = AlgorithmConfig(
    use_kl_loss=True, kl_loss_coef=0.3, kl_loss_type="k3", entropy_coef=0.05, eps_clip=0.2, eps_clip_high=0.28
)


class Sample:
    """A made-up response: hidden states that lead to its tokens, and what the loss needs to know of it."""

    def __init__(self, length, rng: random.Random, generator):
        self.hidden = torch.randn(length, WIDTH, generator=generator, dtype=torch.float64)
        self.targets = torch.randint(0, VOCAB, (length,), generator=generator)
        self.mask = [rng.randint(0, 1) for _ in range(length)]
        self.old = torch.randn(length, generator=generator, dtype=torch.float64) - 2
        self.ref = torch.randn(length, generator=generator, dtype=torch.float64) - 2
        self.reward = rng.gauss(0, 1)


def make_samples(lengths, seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    return [Sample(length, rng, generator) for length in lengths]


def head(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WIDTH, VOCAB, generator=generator, dtype=torch.float64, requires_grad=True)


def objective(weight, samples, config, sizes):
    logits = torch.cat([sample.hidden for sample in samples]) @ weight
    log_probs, entropy = log_probs_and_entropy(
        logits, torch.cat([sample.targets for sample in samples]), temperature=0.9, with_entropy=True
    )
    return policy_objective(
        config,
        log_probs_T=log_probs,
        old_log_probs_T=torch.cat([sample.old for sample in samples]),
        advantages_T=torch.cat(
            [torch.full((len(sample.mask),), sample.reward, dtype=torch.float64) for sample in samples]
        ),
        weights_T=token_weights([sample.mask for sample in samples], dtype=torch.float64, **sizes),
        ref_log_probs_T=torch.cat([sample.ref for sample in samples]),
        entropy_T=entropy,
    )


def by_the_papers(weight, samples, config):
    """GRPO's objective (Shao et al. 2024, equation 3), token by token on plain numbers."""
    total = 0.0
    tokens = max(sum(sum(sample.mask) for sample in samples), 1)
    for sample in samples:
        inner = 0.0
        for t, trained in enumerate(sample.mask):
            logits = [sum(h * w for h, w in zip(sample.hidden[t].tolist(), column, strict=True)) / 0.9
                      for column in weight.T.tolist()]  # fmt: skip
            normalizer = math.log(sum(map(math.exp, logits)))
            log_p = [value - normalizer for value in logits]
            new, old, ref = log_p[sample.targets[t]], sample.old[t].item(), sample.ref[t].item()
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - config.eps_clip), 1 + config.clip_high)
            surrogate = min(ratio * sample.reward, clipped * sample.reward)
            kl = math.exp(ref - new) - (ref - new) - 1
            entropy = -sum(math.exp(lp) * lp for lp in log_p)
            inner += trained * (-surrogate + config.kl_loss_coef * kl - config.entropy_coef * entropy)
        total += inner / tokens if config.calculate_per_token_loss else inner / max(sum(sample.mask), 1) / len(samples)
    return total


def sizes_of(samples, per_token):
    tokens = sum(sum(sample.mask) for sample in samples)
    return {"global_samples": len(samples), "global_tokens": tokens, "per_token": per_token}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("lengths", [[1], [1, 4, 0, 7], [3, 3, 3]])
def test_loss_and_gradient_equal_the_papers(lengths, per_token):
    config = AlgorithmConfig(**{**vars(FULL), "calculate_per_token_loss": per_token})
    samples, weight = make_samples(lengths, seed=5), head(seed=6)
    loss, metrics = objective(weight, samples, config, sizes_of(samples, per_token))
    expected = by_the_papers(weight, samples, config)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    assert metrics["loss"].item() == loss.item()
    (grad,) = torch.autograd.grad(loss, weight)
    shift, moved = 1e-6, weight.detach().clone()
    for row, column in [(0, 0), (2, 7), (4, 10)]:
        moved[row, column] += shift
        slope = (by_the_papers(moved, samples, config) - expected) / shift
        moved[row, column] -= shift
        assert grad[row, column].item() == pytest.approx(slope, rel=1e-3, abs=1e-6)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.booleans(), st.integers(0, 2**16), st.integers(1, 5))
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(lengths, per_token, seed, parts):
    samples, weight = make_samples(lengths, seed), head(seed)
    config = AlgorithmConfig(**{**vars(FULL), "calculate_per_token_loss": per_token})
    sizes = sizes_of(samples, per_token)
    whole, whole_metrics = objective(weight, samples, config, sizes)
    (whole_grad,) = torch.autograd.grad(whole, weight)
    random.Random(seed).shuffle(samples)
    pieces = [samples[part::parts] for part in range(parts) if samples[part::parts]]
    outcomes = [objective(weight, piece, config, sizes) for piece in pieces]
    torch.testing.assert_close(sum(loss for loss, _ in outcomes), whole, rtol=1e-9, atol=1e-9)
    summed = sum(torch.autograd.grad(loss, weight)[0] for loss, _ in outcomes)
    torch.testing.assert_close(summed, whole_grad, rtol=1e-9, atol=1e-9)
    for name, value in whole_metrics.items():
        torch.testing.assert_close(sum(metrics[name] for _, metrics in outcomes), value, rtol=1e-9, atol=1e-9)


def test_a_wholly_masked_step_has_no_loss_and_no_gradient():
    samples, weight = make_samples([4, 1], seed=1), head(seed=1)
    for sample in samples:
        sample.mask = [0] * len(sample.mask)
        sample.old = sample.old + 500  # a ratio of exp(-500): masked tokens must not matter however far off
        sample.ref = sample.ref + 500
    for per_token in (False, True):
        loss, _ = objective(weight, samples, FULL, sizes_of(samples, per_token))
        (grad,) = torch.autograd.grad(loss, weight)
        assert loss.item() == 0
        assert grad.abs().max().item() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"use_kl_loss": True}, "--use-kl-loss needs the reference's log-probs, and none were given"),
        ({"entropy_coef": 0.1}, "--entropy-coef 0.1 needs entropies, and none were given"),
        ({"use_tis": True}, "--use-tis needs the engine's log-probs, and none were given"),
        ({"use_mis": True}, "--use-mis needs the engine's log-probs"),
        ({"use_opsm": True}, "--use-opsm needs the lengths of the responses"),
        ({"advantage_estimator": "gspo"}, "--advantage-estimator gspo needs the lengths of the responses"),
    ],
)
def test_what_the_configuration_needs_must_be_given(flags, message):
    one = torch.zeros(1)
    with pytest.raises(ConfigError, match=message):
        policy_objective(
            AlgorithmConfig(**flags), log_probs_T=one, old_log_probs_T=one, advantages_T=one, weights_T=one
        )


def test_weights_of_another_shape_are_named_so():
    one = torch.zeros(1)
    with pytest.raises(DataError, match=r"log_probs_T \[1\], weights_T \[2\]"):
        policy_objective(
            AlgorithmConfig(), log_probs_T=one, old_log_probs_T=one, advantages_T=one, weights_T=torch.zeros(2)
        )


@pytest.mark.parametrize(
    ("flags", "given", "message"),
    [
        ({"kl_coef": 0.1}, {"ref_log_probs_T": 1}, "--kl-coef needs the log-probs from before the update"),
        ({"kl_coef": 0.1}, {"old_log_probs_T": 1}, "--kl-coef needs the reference's log-probs"),
        ({"use_opd": True}, {"teacher_log_probs_T": 1}, "--use-opd needs the log-probs from before the update"),
        ({"use_opd": True}, {"old_log_probs_T": 1}, "--use-opd needs the teacher's log-probs"),
    ],
)
def test_what_the_advantages_need_must_be_given(flags, given, message):
    one = torch.ones(1)
    with pytest.raises(ConfigError, match=message):
        policy_advantages(AlgorithmConfig(**flags), rewards_N=one, mask_T=one, lengths=[1], **dict.fromkeys(given, one))


def test_the_metrics_of_the_plainest_configuration():
    one = torch.zeros(1)
    _, metrics = policy_objective(
        AlgorithmConfig(), log_probs_T=one, old_log_probs_T=one, advantages_T=one, weights_T=one
    )
    assert sorted(metrics) == ["loss", "pg_clipfrac", "pg_loss", "ppo_kl"]


def test_an_estimator_of_ones_own_takes_the_place_of_the_named_one():
    def own(inputs):
        doubled_T = 2 * inputs.rewards_N.repeat_interleave(inputs.lengths_N)
        return Advantages(doubled_T, doubled_T)

    advantages_T, _ = policy_advantages(
        AlgorithmConfig(), rewards_N=torch.tensor([1.0, 3.0]), mask_T=torch.tensor([1, 0, 1]), lengths=[2, 1],
        estimator=own,
    )  # fmt: skip
    assert advantages_T.tolist() == [2, 0, 6]
