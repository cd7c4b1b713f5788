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
    sft_objective,
    token_weights,
    trajectory_tokens,
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


MASKS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6)


def by_the_definition(masks, values, per_token):
    total, tokens = 0.0, sum(sum(mask) for mask in masks)
    for mask, row in zip(masks, values, strict=True):
        masked = sum(m * x for m, x in zip(mask, row, strict=True))
        total += masked / max(tokens, 1) if per_token else masked / max(sum(mask), 1) / len(masks)
    return total


@given(MASKS.filter(bool), st.booleans(), st.integers(0, 1000))
def test_the_weighted_sum_is_the_mean(masks, per_token, seed):
    """Ragged responses, empty ones and wholly masked ones included."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    tokens = sum(map(sum, masks))
    weights = token_weights(
        masks, global_samples=len(masks), global_tokens=tokens, per_token=per_token, dtype=torch.float64
    )
    flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    assert (weights * flat).sum().item() == pytest.approx(by_the_definition(masks, values, per_token), abs=1e-12)


@given(MASKS.filter(bool), st.booleans(), st.data())
def test_parts_of_a_step_have_the_weights_of_the_whole(masks, per_token, data):
    cut = data.draw(st.integers(0, len(masks)))
    sizes = {"global_samples": len(masks), "global_tokens": sum(map(sum, masks)), "per_token": per_token}
    parts = [token_weights(part, **sizes) for part in (masks[:cut], masks[cut:])]
    assert torch.cat(parts).equal(token_weights(masks, **sizes))


def test_tensor_masks_and_a_bad_denominator():
    weights = token_weights([torch.tensor([1, 0, 1])], global_samples=4, global_tokens=2, per_token=False)
    assert weights.tolist() == [0.125, 0.0, 0.125]
    with pytest.raises(DataError, match="global_samples 0 must be 1 or more"):
        token_weights([[1]], global_samples=0, global_tokens=1, per_token=False)


def test_narrow_types_still_count_every_token():
    """bf16 has no 257. What is given back is rounded once, at the end."""
    mask = [1] * 257
    exact = torch.tensor(1 / 257).bfloat16()
    ours = [
        token_weights([mask], global_samples=1, global_tokens=0, dtype=torch.bfloat16),
        token_weights([mask], global_samples=1, global_tokens=257, per_token=True, dtype=torch.bfloat16),
        token_weights([mask], trajectory_tokens=[257], global_samples=1, global_tokens=0, dtype=torch.bfloat16),
        token_weights([mask], divisor=257, global_samples=1, global_tokens=0, dtype=torch.bfloat16),
    ]
    assert all(weights.equal(exact.expand(257)) for weights in ours)


def test_a_part_without_samples_has_no_weights():
    for weights in (
        token_weights([], global_samples=2, global_tokens=3),
        token_weights([], global_samples=2, global_tokens=3, per_token=True),
        token_weights([], trajectory_tokens=[], global_samples=2, global_tokens=0),
        token_weights([], divisor=4, global_samples=2, global_tokens=0, dtype=torch.float64),
    ):
        assert weights.shape == (0,)
    assert weights.dtype == torch.float64


STEP = st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3)), min_size=1, max_size=7)


@given(STEP, st.integers(0, 1000), st.data())
def test_per_trajectory_is_the_mean_over_trajectories_however_its_samples_are_split(step, seed, data):
    """A trajectory's samples in any order, apart, empty or wholly masked."""
    masks, ids = [mask for mask, _ in step], [trajectory for _, trajectory in step]
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    expected = 0.0
    for trajectory in set(ids):
        pairs = [
            (m, x)
            for mask, row, owner in zip(masks, values, ids, strict=True)
            for m, x in zip(mask, row, strict=True)
            if owner == trajectory
        ]
        expected += sum(m * x for m, x in pairs) / max(sum(m for m, _ in pairs), 1) / len(set(ids))
    counts = trajectory_tokens(masks, ids)
    order = data.draw(st.permutations(range(len(step))))
    cut = data.draw(st.integers(0, len(step)))
    total = 0.0
    for part in (order[:cut], order[cut:]):
        weights = token_weights(
            [masks[n] for n in part], trajectory_tokens=[counts[n] for n in part],
            global_samples=len(set(ids)), global_tokens=0, dtype=torch.float64,
        )  # fmt: skip
        flat = torch.tensor([x for n in part for x in values[n]], dtype=torch.float64)
        total += (weights * flat).sum().item()
    assert total == pytest.approx(expected, abs=1e-12)


def test_trajectory_ids_may_be_a_tensor():
    assert trajectory_tokens([[1, 1], [1, 0], [1, 1, 1]], torch.tensor([5, 6, 5])) == [5, 1, 5]


@given(MASKS.filter(bool))
def test_with_one_sample_per_trajectory_it_is_the_per_sample_mean(masks):
    counts = trajectory_tokens(masks, list(range(len(masks))))
    per_sample = token_weights(masks, global_samples=len(masks), global_tokens=0)
    sizes = {"global_samples": len(masks), "global_tokens": 0}
    assert token_weights(masks, trajectory_tokens=counts, **sizes).equal(per_sample)


@given(MASKS.filter(bool), st.integers(0, 1000), st.integers(1, 64), st.integers(0, 6))
def test_by_a_constant(masks, seed, divisor, cut):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist() for mask in masks]
    expected = sum(
        sum(m * x for m, x in zip(mask, row, strict=True)) / divisor / len(masks)
        for mask, row in zip(masks, values, strict=True)
    )
    parts = [
        token_weights(part, divisor=divisor, global_samples=len(masks), global_tokens=0, dtype=torch.float64)
        for part in (masks[:cut], masks[cut:])
    ]
    flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
    assert (torch.cat(parts) * flat).sum().item() == pytest.approx(expected, abs=1e-12)


def weights_of_one(samples, **how):
    return token_weights([[1]], global_samples=samples, global_tokens=0, **how)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trajectory_tokens([[1]], [0, 1]), "1 loss masks and 2 trajectory ids"),
        (lambda: weights_of_one(1, trajectory_tokens=[]), "1 loss masks and 0 token counts"),
        (lambda: weights_of_one(0, trajectory_tokens=[1]), "global_samples 0 must be"),
        (lambda: weights_of_one(1, divisor=0), "divisor 0 must be"),
        (lambda: weights_of_one(1, divisor=math.nan), "divisor nan must be"),
        (lambda: weights_of_one(1, divisor=math.inf), "divisor inf must be"),
        (lambda: weights_of_one(0, divisor=1), "global_samples 0 must be"),
    ],
)
def test_what_cannot_be_a_denominator(call, message):
    with pytest.raises(DataError, match=message):
        call()


SFT_MASKS = st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=5)


@given(SFT_MASKS, st.integers(0, 2**16), st.booleans(), st.integers(0, 5))
def test_is_the_mean_cross_entropy_however_it_is_split(masks, seed, per_token, cut):
    """Against log-softmax token by token; NaN logits wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(map(sum, masks))
    flat = torch.tensor([m for mask in masks for m in mask], dtype=torch.bool)
    log_probs = -torch.rand(len(flat), generator=generator, dtype=torch.float64)
    log_probs = log_probs.masked_fill(~flat, torch.nan).requires_grad_()
    expected, slopes, start = 0.0, [], 0
    for mask in masks:
        scale = 1 / max(tokens, 1) if per_token else 1 / max(sum(mask), 1) / len(masks)
        expected -= sum(scale * log_probs[start + t].item() for t, m in enumerate(mask) if m)
        slopes += [-scale * m for m in mask]
        start += len(mask)

    def objective(part, rows):
        weights = token_weights(
            part, global_samples=len(masks), global_tokens=tokens, per_token=per_token, dtype=torch.float64
        )
        return sft_objective(log_probs[rows], weights)

    whole, metrics = objective(masks, slice(None))
    assert whole.item() == metrics["loss"].item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.grad(whole, log_probs)[0].tolist() == pytest.approx(slopes)
    at = sum(len(mask) for mask in masks[:cut])
    parts = [objective(masks[:cut], slice(at)), objective(masks[cut:], slice(at, None))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected, abs=1e-12)


def test_from_logits_it_is_pytorchs_cross_entropy():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, mask = torch.tensor([1, 8, 0, 3, 3, 5]), torch.tensor([1, 1, 0, 1, 0, 1])
    weights = token_weights([mask], global_samples=1, global_tokens=4, per_token=True, dtype=torch.float64)
    loss, _ = sft_objective(log_probs_and_entropy(logits, targets)[0], weights)
    other = torch.nn.functional.cross_entropy(logits, targets.masked_fill(mask == 0, -100))
    torch.testing.assert_close(loss, other)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(other, logits))


def test_bf16_is_summed_in_fp32_and_shapes_must_agree():
    log_probs = torch.full((4096,), -1.0078125, dtype=torch.bfloat16)
    assert sft_objective(log_probs, torch.ones(4096))[0].item() == 4096 * 1.0078125
    with pytest.raises(DataError, match="one shape"):
        sft_objective(torch.zeros(3), torch.zeros(4))
