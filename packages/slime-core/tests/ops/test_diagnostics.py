import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.ops.diagnostics import Statistics, drift_statistics, policy_statistics, weight_statistics
from slime_core.ops.objective import token_weights
from slime_core.ops.token_losses import policy_token_loss

COMPUTE = {"policy": policy_statistics, "drift": drift_statistics}
LENGTHS = st.lists(st.integers(0, 5), max_size=6)
CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": 1.5}


class Batch:
    """Made-up sequences under two policies, with what is masked being NaN."""

    def __init__(self, lengths, seed, spread=0.5, per_token=False):
        rng = random.Random(seed)
        self.lengths, self.per_token = lengths, per_token
        self.new = [[rng.uniform(-4, 0) for _ in range(length)] for length in lengths]
        self.old = [[value - rng.gauss(0, spread) for value in row] for row in self.new]
        self.masks = [[int(rng.random() < 0.7) for _ in range(length)] for length in lengths]
        self.advantages = [[rng.choice([-1.0, 0.0, 2.0]) for _ in range(length)] for length in lengths]

    def inputs(self, kind, chosen=None):
        chosen = range(len(self.lengths)) if chosen is None else chosen
        mask = torch.tensor([value for n in chosen for value in self.masks[n]], dtype=torch.int64)

        def flat(rows):
            values = [value for n in chosen for value in rows[n]]
            return torch.tensor(values, dtype=torch.float64).masked_fill(mask == 0, torch.nan)

        weights = token_weights(
            [self.masks[n] for n in chosen], dtype=torch.float64, per_token=self.per_token,
            global_samples=max(len(self.lengths), 1), global_tokens=sum(map(sum, self.masks)),
        )  # fmt: skip
        common = {"mask_T": mask, "weights_T": weights}
        if kind == "policy":
            return {
                "log_probs_T": flat(self.new), "old_log_probs_T": flat(self.old),
                "advantages_T": flat(self.advantages), **common, **CLIP,
            }  # fmt: skip
        lengths = [self.lengths[n] for n in chosen]
        return {
            "train_log_probs_T": flat(self.new),
            "rollout_log_probs_T": flat(self.old),
            "lengths": lengths,
            **common,
        }

    def rows(self):
        """Of every trained token: its share of the loss, both log-probs, its advantage."""
        tokens = max(sum(map(sum, self.masks)), 1)
        for n, mask in enumerate(self.masks):
            share = 1 / tokens if self.per_token else 1 / (max(sum(mask), 1) * len(self.lengths))
            for t, trained in enumerate(mask):
                if trained:
                    yield share, self.new[n][t], self.old[n][t], self.advantages[n][t]

    def sequences(self):
        """Of every sequence with trained tokens: its share of the loss, and log-ratios of the trained tokens."""
        tokens = max(sum(map(sum, self.masks)), 1)
        for n, mask in enumerate(self.masks):
            if any(mask):
                share = sum(mask) / tokens if self.per_token else 1 / len(self.lengths)
                yield share, [self.new[n][t] - self.old[n][t] for t, trained in enumerate(mask) if trained]


def spread(name, weighted):
    """Mean, deviation, effective sample size and extremes of (share, value) pairs, by their definitions."""
    pairs = list(weighted)
    total = math.fsum(a for a, _ in pairs)
    if not total:
        return {f"{name}_{kind}": 0.0 for kind in ("mean", "std", "ess", "min", "max")}
    mean = math.fsum(a * w for a, w in pairs) / total
    return {
        f"{name}_mean": mean,
        f"{name}_std": math.sqrt(math.fsum(a * (w - mean) ** 2 for a, w in pairs) / total),
        f"{name}_ess": math.fsum(a * w for a, w in pairs) ** 2 / (total * math.fsum(a * w * w for a, w in pairs)),
        f"{name}_min": min(w for _, w in pairs),
        f"{name}_max": max(w for _, w in pairs),
    }


def numbers(metrics):
    return {name: value.item() for name, value in metrics.items()}


@given(LENGTHS, st.integers(0, 99), st.booleans())
def test_policy_statistics_are_their_definitions(lengths, seed, per_token):
    batch = Batch(lengths, seed, per_token=per_token)
    expected = dict.fromkeys(
        ["pg_clipfrac_low", "pg_clipfrac_high", "pg_clipfrac_dual", "ppo_kl_k1", "ppo_kl_k2", "ppo_kl_k3"], 0.0
    )
    for share, new, old, advantage in batch.rows():
        ratio = math.exp(new - old)
        expected["pg_clipfrac_low"] += share * (advantage < 0 and ratio < 0.8)
        expected["pg_clipfrac_high"] += share * (advantage > 0 and ratio > 1.28)
        expected["pg_clipfrac_dual"] += share * (advantage < 0 and ratio > 1.5)
        expected["ppo_kl_k1"] += share * (old - new)
        expected["ppo_kl_k2"] += share * (old - new) ** 2 / 2
        expected["ppo_kl_k3"] += share * (ratio - 1 - math.log(ratio))
    expected |= spread("ratio", ((share, math.exp(new - old)) for share, new, old, _ in batch.rows()))
    found = numbers(policy_statistics(**batch.inputs("policy")).metrics())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)  # abs: a deviation of 0 comes from a square root


def test_the_clip_fractions_are_those_of_the_loss():
    batch = Batch([40, 3, 0, 17], seed=1)
    inputs = batch.inputs("policy")
    _, clipped = policy_token_loss(inputs["log_probs_T"], inputs["old_log_probs_T"], inputs["advantages_T"], 0.2, 0.28)
    sums = policy_statistics(**inputs).sums
    both = sums["pg_clipfrac_low"] + sums["pg_clipfrac_high"]
    assert both.item() == pytest.approx((clipped * inputs["weights_T"]).sum().item())
    assert min(sums["pg_clipfrac_low"], sums["pg_clipfrac_high"]) > 0


@given(LENGTHS, st.integers(0, 99), st.booleans())
def test_drift_statistics_are_their_definitions(lengths, seed, per_token):
    batch = Batch(lengths, seed, per_token=per_token)
    rows = [(share, train, rollout) for share, train, rollout, _ in batch.rows()]
    sequences = list(batch.sequences())
    means = [(share, math.fsum(d) / len(d)) for share, d in sequences]
    ratios = [(share, math.exp(math.fsum(d))) for share, d in sequences]
    expected = {
        "train_rollout_logprob_abs_diff": sum(a * abs(t - r) for a, t, r in rows),
        "train_rollout_logprob_abs_diff_max": max((abs(t - r) for _, t, r in rows), default=0.0),
        "mismatch_kl": sum(a * (r - t) for a, t, r in rows),
        "mismatch_k3_kl": sum(a * (math.exp(t - r) - 1 - (t - r)) for a, t, r in rows),
        "mismatch_training_log_ppl": sum(-a * t for a, t, _ in rows),
        "mismatch_rollout_log_ppl": sum(-a * r for a, _, r in rows),
        "mismatch_log_ppl_abs_diff": sum(a * abs(mean) for a, mean in means),
        "mismatch_ppl_ratio": sum(a * math.exp(-mean) for a, mean in means),
        "mismatch_chi2_token": sum(a * (math.exp(t - r) ** 2 - 1) for a, t, r in rows),
        "mismatch_chi2_seq": sum(a * (ratio**2 - 1) for a, ratio in ratios),
        **spread("mismatch_ratio", ((a, math.exp(t - r)) for a, t, r in rows)),
        **spread("mismatch_seq_ratio", ratios),
    }
    found = numbers(drift_statistics(**batch.inputs("drift")).metrics())
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-7)


@given(LENGTHS.filter(len), st.integers(0, 99), st.integers(1, 4), st.sampled_from(["policy", "drift"]))
def test_any_split_into_micro_batches_gives_the_same(lengths, seed, count, kind):
    batch = Batch(lengths, seed)
    compute = COMPUTE[kind]
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    parts = [compute(**batch.inputs(kind, order[k::count])) for k in range(count)]  # some may be empty
    whole = numbers(compute(**batch.inputs(kind)).metrics())
    assert numbers(Statistics.merged(parts).metrics()) == pytest.approx(whole, rel=1e-9, abs=1e-7)


def statistics_of_a_rank(rank, kind, split, dtype):
    batch = Batch([4, 3, 0, 6, 1], seed=7)
    inputs = {
        name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.inputs(kind, split[rank]).items()
    }
    return numbers(COMPUTE[kind](**inputs).reduced().metrics())


@pytest.mark.parametrize("kind", ["policy", "drift"])
@pytest.mark.parametrize("split", [([0, 1, 2], [3, 4]), ([0, 1, 2, 3, 4], []), ([2], [4, 3, 1, 0])])
def test_two_ranks_find_what_one_does(two_ranks, kind, split):
    """A step split evenly, one of which a rank has nothing, and one of which it has only an empty sequence."""
    whole = numbers(COMPUTE[kind](**Batch([4, 3, 0, 6, 1], seed=7).inputs(kind)).metrics())
    for metrics in two_ranks(__file__, "statistics_of_a_rank", kind, split, torch.float64):
        assert metrics == pytest.approx(whole, rel=1e-9)
    for metrics in two_ranks(__file__, "statistics_of_a_rank", kind, split, torch.float32):
        assert metrics == pytest.approx(whole, rel=1e-5, abs=1e-6)


def in_another_order(rank):
    batch = Batch([4, 3, 0, 6, 1], seed=7)
    parts = [COMPUTE[kind](**batch.inputs(kind, [[0, 3], [1, 2, 4]][rank])) for kind in sorted(COMPUTE)]
    return numbers(Statistics.merged(parts[:: 1 - 2 * rank]).reduced().metrics())


def test_ranks_may_put_their_statistics_together_in_any_order(two_ranks):
    batch = Batch([4, 3, 0, 6, 1], seed=7)
    whole = numbers(Statistics.merged(COMPUTE[kind](**batch.inputs(kind)) for kind in COMPUTE).metrics())
    for metrics in two_ranks(__file__, "in_another_order"):
        assert metrics == pytest.approx(whole, rel=1e-9)


def test_statistics_of_a_correction_and_their_effective_sample_size():
    """Weights 1, 1, 0, 0 are worth two of four samples; one weight of four is worth one."""
    mask, weights = torch.tensor([1, 1, 1, 1, 0]), torch.tensor([0.25, 0.25, 0.25, 0.25, 0.0])
    for values, mean, std, ess, largest in (
        ([1, 1, 0, 0, torch.nan], 0.5, 0.5, 0.5, 1),
        ([3, 0, 0, 0, torch.nan], 0.75, math.sqrt(27) / 4, 0.25, 3),
        ([2, 2, 2, 2, torch.nan], 2.0, 0.0, 1.0, 2),
    ):
        metrics = numbers(weight_statistics("tis", torch.tensor(values), mask, weights).metrics())
        expected = {"tis_mean": mean, "tis_std": std, "tis_ess": ess, "tis_min": 2.0 if ess == 1 else 0.0}
        assert metrics == pytest.approx({**expected, "tis_max": largest})
    nothing = weight_statistics("tis", torch.zeros(4), mask[:4], weights[:4]).metrics()
    assert nothing["tis_ess"].item() == 0


@pytest.mark.parametrize("size", [1e-8, 1e-4, 1.0, 1e6])
def test_the_effective_sample_size_does_not_depend_on_the_weights_scale(size):
    """Ratios of long sequences lie far from 1. In fp32, about 1, nothing of such a size is left."""
    mask, weights = torch.ones(4), torch.full((4,), 0.25)
    for values, std, ess in (([1.0, 1.0, 1.0, 1.0], 0.0, 1.0), ([1.0, 2.0, 1.0, 2.0], 0.5, 0.9)):
        metrics = numbers(weight_statistics("w", size * torch.tensor(values), mask, weights).metrics())
        assert metrics["w_ess"] == pytest.approx(ess)
        assert metrics["w_std"] == pytest.approx(size * std, rel=1e-5, abs=1e-9 * size)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_seen(bad):
    """A trained token with one must not read as a drift of 0."""
    metrics = drift_statistics(
        train_log_probs_T=torch.tensor([-1.0, -1.0]), rollout_log_probs_T=torch.tensor([-1.0, -bad]),
        mask_T=torch.ones(2), weights_T=torch.full((2,), 0.5), lengths=[2],
    ).metrics()  # fmt: skip
    for name in ("train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"):
        assert not metrics[name].isfinite()


def test_a_tiny_deviation_keeps_its_digits_in_fp32():
    """Ratios of 1 ± 1e-4: their squares differ from 1 by what fp32 can hardly hold."""
    difference = torch.tensor([1e-4, -1e-4] * 500)
    metrics = policy_statistics(
        log_probs_T=difference, old_log_probs_T=torch.zeros(1000), advantages_T=torch.ones(1000),
        mask_T=torch.ones(1000), weights_T=torch.full((1000,), 1e-3), **CLIP,
    ).metrics()  # fmt: skip
    assert metrics["ratio_std"].item() == pytest.approx(1e-4, rel=1e-5)
    weights = torch.full((1000,), 1e-3)
    metrics = weight_statistics("w", 1 + difference, torch.ones(1000), weights).metrics()
    assert metrics["w_std"].item() == pytest.approx(1e-4, rel=1e-3)  # 1 + 1e-4 has been rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [1, 0])
def test_huge_and_tiny_ratios_stay_finite(mask, dtype):
    new = torch.tensor([0.0, 30.0, -30.0, 1e4, -1e4, 1e15, -1e15], dtype=dtype)
    common = {"mask_T": torch.full((7,), mask), "weights_T": torch.full((7,), mask / 7)}
    parts = [
        policy_statistics(
            log_probs_T=new, old_log_probs_T=torch.zeros_like(new), advantages_T=torch.ones_like(new), **common, **CLIP
        ),
        drift_statistics(train_log_probs_T=new, rollout_log_probs_T=torch.zeros_like(new), lengths=[4, 3], **common),
    ]
    metrics = Statistics.merged(parts).metrics()
    assert all(value.dtype in (torch.float32, torch.float64) and value.isfinite() for value in metrics.values())
    if not mask:
        assert not any(value for value in metrics.values())


def test_nothing_is_no_error_and_carries_no_gradient():
    empty = Batch([], seed=0)
    metrics = (
        drift_statistics(**empty.inputs("drift")).metrics() | policy_statistics(**empty.inputs("policy")).metrics()
    )
    assert set(numbers(metrics).values()) == {0.0}
    assert Statistics.merged([]).metrics() == {}
    inputs = Batch([3], seed=1).inputs("policy")
    inputs["log_probs_T"].requires_grad_()
    assert not any(value.requires_grad for value in policy_statistics(**inputs).metrics().values())


def test_shapes_that_do_not_match():
    inputs = Batch([2, 3], seed=1)
    with pytest.raises(DataError, match=r"must have one shape.*advantages_T \[1\], mask_T \[5\]$"):
        policy_statistics(**{**inputs.inputs("policy"), "advantages_T": torch.zeros(1)})
    with pytest.raises(DataError, match=r"one shape.*log_probs_T \[5\], other_log_probs_T \[1\], mask_T \[5\]$"):
        drift_statistics(**{**inputs.inputs("drift"), "rollout_log_probs_T": torch.zeros(1)})
    with pytest.raises(DataError, match="add up to 4 but there are 5 tokens"):
        drift_statistics(**{**inputs.inputs("drift"), "lengths": [2, 2]})
