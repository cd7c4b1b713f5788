import dataclasses
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.config import MIS_LEVELS, MIS_MODES, AlgorithmConfig, MisConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops.objective import token_weights
from slime_core.ops.off_policy import (
    correction_factors,
    icepop_weights,
    mis_weight_sums,
    mis_weights,
    opsm_mask,
    tis_weights,
)

LENGTHS = st.lists(st.integers(0, 5), max_size=6)
HUGE = [0.0, 30.0, -30.0, 1e4, -1e4, 1e15, -1e15]


class Batch:
    """Made-up sequences: log-probs of the two policies, masks, and the loss's weights."""

    def __init__(self, lengths, seed, spread=0.6, per_token=False):
        rng = random.Random(seed)
        self.lengths = lengths
        self.train = [[rng.uniform(-4, 0) for _ in range(length)] for length in lengths]
        self.rollout = [[value - rng.gauss(0, spread) for value in row] for row in self.train]
        self.masks = [[int(rng.random() < 0.7) for _ in range(length)] for length in lengths]
        self.advantages = [[rng.choice([-1.0, 0.0, 2.0]) for _ in range(length)] for length in lengths]
        self.sizes = {
            "global_samples": max(len(lengths), 1), "global_tokens": sum(map(sum, self.masks)), "per_token": per_token
        }  # fmt: skip
        self.denominators = [
            max(self.sizes["global_tokens"], 1) if per_token else max(sum(mask), 1) * self.sizes["global_samples"]
            for mask in self.masks
        ]

    def part(self, chosen):
        """The arguments for some of the sequences, what is masked being NaN."""

        def flat(rows):
            values = [value for n in chosen for value in rows[n]]
            return torch.tensor(values, dtype=torch.float64).masked_fill(mask == 0, torch.nan)

        mask = torch.tensor([value for n in chosen for value in self.masks[n]], dtype=torch.int64)
        weights = token_weights([self.masks[n] for n in chosen], dtype=torch.float64, **self.sizes)
        common = {"mask_T": mask, "weights_T": weights}
        ratio = {"train_log_probs_T": flat(self.train), "rollout_log_probs_T": flat(self.rollout), **common}
        return {
            "token": ratio,
            "sequence": {**ratio, "lengths": [self.lengths[n] for n in chosen]},
            "opsm": {
                "log_probs_T": flat(self.rollout), "old_log_probs_T": flat(self.train), **common,
                "advantages_T": flat(self.advantages), "lengths": [self.lengths[n] for n in chosen],
            },
        }  # fmt: skip

    @property
    def whole(self):
        return self.part(range(len(self.lengths)))

    def positions(self):
        """Sequence, token and the share of the loss of every trained token."""
        for n, mask in enumerate(self.masks):
            for t, trained in enumerate(mask):
                if trained:
                    yield n, t, 1 / self.denominators[n]

    def flat(self, values):
        """Numbers by (sequence, token), masked ones 0, in the order of the tensors."""
        return [values.get((n, t), 0.0) for n, length in enumerate(self.lengths) for t in range(length)]

    def log_ratio(self, n, t):
        return self.train[n][t] - self.rollout[n][t]

    def ratio(self, level, n, t):
        """Liu, Li et al. 2025: of the token, of the sequence, and its geometric mean."""
        if level == "token":
            return math.exp(self.log_ratio(n, t))
        trained = [self.log_ratio(n, k) for k, kept in enumerate(self.masks[n]) if kept]
        return math.exp(sum(trained) / (len(trained) if level == "geometric" else 1))


def summed(parts):
    return {name: sum(part[name].item() for part in parts) for name in parts[0]}


@given(LENGTHS, st.integers(0, 99), st.sampled_from([(0.0, 2.0), (0.5, 1.5), (1.0, 1.0)]), st.booleans())
def test_tis_and_icepop_are_those_of_the_papers(lengths, seed, bounds, per_token):
    batch = Batch(lengths, seed, per_token=per_token)
    lower, upper = bounds
    truncated, masked, tis, icepop = {}, {}, dict.fromkeys(["", "_abs", "_clipfrac"], 0.0), [0.0]
    for n, t, share in batch.positions():
        ratio = math.exp(batch.log_ratio(n, t))
        truncated[n, t] = min(max(ratio, lower), upper)
        masked[n, t] = ratio if lower <= ratio <= upper else 0.0
        tis[""] += share * ratio
        tis["_abs"] += share * abs(ratio - 1)
        tis["_clipfrac"] += share * (truncated[n, t] != ratio)
        icepop[0] += share * (masked[n, t] != ratio)
    factor, metrics = tis_weights(**batch.whole["token"], lower=lower, upper=upper)
    assert factor.tolist() == pytest.approx(batch.flat(truncated))
    assert summed([metrics]) == pytest.approx({f"tis{kind}": value for kind, value in tis.items()})
    factor, metrics = icepop_weights(**batch.whole["token"], lower=lower, upper=upper)
    assert factor.tolist() == pytest.approx(batch.flat(masked))
    assert summed([metrics]) == pytest.approx(
        {"icepop": tis[""], "icepop_abs": tis["_abs"], "icepop_clipfrac": icepop[0]}
    )


def mis_by_the_paper(batch, config):
    """Factors and metrics, token by token."""
    (lower, upper), (least, most) = config.bounds, config.rejection_bounds
    before, low, high = {}, {}, {}
    for n, t, _ in batch.positions():
        ratio = batch.ratio(config.mis_level, n, t)
        low[n, t] = ratio < lower and config.mis_mode in ("clip", "mask")
        high[n, t] = ratio > upper and config.mis_mode != "none"
        before[n, t] = {
            "truncate": min(ratio, upper),
            "clip": min(max(ratio, lower), upper),
            "mask": ratio if lower <= ratio <= upper else 0.0,
            "none": 1.0,
        }[config.mis_mode]
    total = sum(share for *_, share in batch.positions())
    mean = sum(share * before[n, t] for n, t, share in batch.positions()) / total if total else 1.0
    factors = {}
    names = ["ratio", "weight", "low_fraction", "high_fraction", "dropped_fraction"]
    names += ["rejected_fraction"] * (config.mis_rs_level is not None)
    names += ["veto_token_fraction", "veto_fraction"] * (config.mis_veto_threshold is not None)
    metrics = dict.fromkeys([f"mis_{name}" for name in names], 0.0)
    for n, t, share in batch.positions():
        factor = before[n, t] / (mean if config.mis_batch_normalize and mean > 0 else 1.0)
        if config.mis_rs_level is not None:
            rejected = not least <= batch.ratio(config.mis_rs_level, n, t) <= most
            metrics["mis_rejected_fraction"] += share * rejected
            factor = 0.0 if rejected else factor
        if config.mis_veto_threshold is not None:
            trained = [k for k, kept in enumerate(batch.masks[n]) if kept]
            vetoed = any(math.exp(batch.log_ratio(n, k)) < config.mis_veto_threshold for k in trained)
            metrics["mis_veto_fraction"] += share * vetoed
            metrics["mis_veto_token_fraction"] += share * (math.exp(batch.log_ratio(n, t)) < config.mis_veto_threshold)
            factor = 0.0 if vetoed else factor
        factors[n, t] = factor
        metrics["mis_ratio"] += share * batch.ratio(config.mis_level, n, t)
        metrics["mis_weight"] += share * factor
        metrics["mis_low_fraction"] += share * low[n, t]
        metrics["mis_high_fraction"] += share * high[n, t]
        metrics["mis_dropped_fraction"] += share * (factor == 0)
    return batch.flat(factors), metrics


CONFIGS = st.builds(
    MisConfig().adapted,
    mis_level=st.sampled_from(MIS_LEVELS),
    mis_mode=st.sampled_from(MIS_MODES),
    mis_upper_bound=st.sampled_from([1.1, 2.0]),
    mis_lower_bound=st.sampled_from([None, 0.0, 0.8]),
    mis_batch_normalize=st.booleans(),
    mis_rs_level=st.sampled_from([None, *MIS_LEVELS]),
    mis_rs_upper_bound=st.sampled_from([1.3, 3.0]),
    mis_veto_threshold=st.sampled_from([None, 0.4, 1e-4]),
)


@given(CONFIGS, LENGTHS, st.integers(0, 99), st.booleans())
def test_mis_is_that_of_the_paper(config, lengths, seed, per_token):
    batch = Batch(lengths, seed, per_token=per_token)
    inputs = batch.whole["sequence"]
    factor, metrics = mis_weights(config, **inputs, weight_sums=mis_weight_sums(config, **inputs))
    expected, expected_metrics = mis_by_the_paper(batch, config)
    assert factor.tolist() == pytest.approx(expected)
    assert summed([metrics]) == pytest.approx(expected_metrics)


@given(CONFIGS, LENGTHS, st.integers(0, 99), st.booleans())
def test_weight_sums_are_those_of_a_loop(config, lengths, seed, per_token):
    """Of the mode's weights before any rejection or veto."""
    batch = Batch(lengths, seed, per_token=per_token)
    (lower, upper), expected = config.bounds, [0.0, 0.0]
    for n, t, share in batch.positions():
        ratio = batch.ratio(config.mis_level, n, t)
        weight = {
            "truncate": min(ratio, upper),
            "clip": min(max(ratio, lower), upper),
            "mask": ratio if lower <= ratio <= upper else 0.0,
            "none": 1.0,
        }[config.mis_mode]
        expected[0] += share * weight
        expected[1] += share
    assert mis_weight_sums(config, **batch.whole["sequence"]).tolist() == pytest.approx(expected)


@settings(max_examples=40)
@given(CONFIGS, LENGTHS.filter(len), st.integers(0, 99), st.integers(1, 4))
def test_any_split_into_micro_batches_gives_the_same(config, lengths, seed, count):
    batch = Batch(lengths, seed)
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    parts = [batch.part(order[k::count]) for k in range(count)]  # some may be empty
    sums = sum(mis_weight_sums(config, **part["sequence"]) for part in parts)
    whole = batch.part([n for k in range(count) for n in order[k::count]])
    pairs = [
        (lambda inputs: tis_weights(**inputs["token"])),
        (lambda inputs: icepop_weights(**inputs["token"], lower=0.5, upper=2.0)),
        (lambda inputs: mis_weights(config, **inputs["sequence"], weight_sums=sums)),
        (lambda inputs: opsm_mask(**inputs["opsm"], delta=0.1)),
    ]
    torch.testing.assert_close(sums, mis_weight_sums(config, **whole["sequence"]), rtol=1e-12, atol=1e-12)
    for compute in pairs:
        pieces, (factor, metrics) = [compute(part) for part in parts], compute(whole)
        torch.testing.assert_close(torch.cat([piece for piece, _ in pieces]), factor, rtol=1e-12, atol=1e-12)
        assert summed([part for _, part in pieces]) == pytest.approx(summed([metrics]), rel=1e-9, abs=1e-12)


def test_a_ratio_at_a_bound_is_inside():
    same = {"train_log_probs_T": torch.zeros(2), "rollout_log_probs_T": torch.zeros(2), "mask_T": torch.ones(2)}
    same["weights_T"] = torch.full((2,), 0.5)
    factor, metrics = icepop_weights(**same, lower=1.0, upper=1.0)
    assert (factor.tolist(), metrics["icepop_clipfrac"].item()) == ([1, 1], 0)
    config = MisConfig(mis_mode="mask", mis_upper_bound=1.0, mis_rs_level="token", mis_rs_upper_bound=1.0)
    factor, metrics = mis_weights(dataclasses.replace(config, mis_veto_threshold=1.0), **same, lengths=[2])
    assert factor.tolist() == [1, 1]
    assert {name for name, value in metrics.items() if value.item()} == {"mis_ratio", "mis_weight"}


def test_batch_normalisation_gives_a_mean_of_one_before_rejection():
    batch = Batch([4, 1, 5, 3], seed=3)
    config = MisConfig(mis_level="sequence", mis_mode="clip", mis_batch_normalize=True)
    sums = mis_weight_sums(config, **batch.whole["sequence"])
    assert sums[0] / sums[1] != pytest.approx(1.0, abs=0.01)
    _, metrics = mis_weights(config, **batch.whole["sequence"], weight_sums=sums)
    assert metrics["mis_weight"].item() == pytest.approx(sums[1].item())
    with pytest.raises(ConfigError, match="--mis-batch-normalize needs the step's weight sums"):
        mis_weights(config, **batch.whole["sequence"])


def test_batch_normalisation_of_weights_that_are_all_masked_leaves_them():
    batch = Batch([3, 2], seed=1)
    batch.rollout = [[value - 5 for value in row] for row in batch.train]
    config = MisConfig(mis_mode="mask", mis_batch_normalize=True)
    sums = mis_weight_sums(config, **batch.whole["sequence"])
    factor, _ = mis_weights(config, **batch.whole["sequence"], weight_sums=sums)
    assert factor.tolist() == [0.0] * 5


def test_batch_normalisation_of_many_tokens_that_are_all_rejected_is_not_0_times_infinity():
    """Weights that sum to more than 4, over a mean of 0, would be beyond float32."""
    same = {"train_log_probs_T": torch.zeros(8), "rollout_log_probs_T": torch.full((8,), -5.0)}
    config = MisConfig(mis_mode="mask", mis_batch_normalize=True)
    shapes = {"mask_T": torch.ones(8), "weights_T": torch.ones(8), "lengths": [5, 3]}
    sums = mis_weight_sums(config, **same, **shapes)
    assert sums.tolist() == [0.0, 8.0]
    factor, metrics = mis_weights(config, **same, **shapes, weight_sums=sums)
    assert factor.tolist() == [0.0] * 8
    assert metrics["mis_weight"].item() == 0.0


@pytest.mark.parametrize("delta", [0.0, 0.5, 0.25])
def test_opsm_keeps_sequences_that_drifted_by_delta_and_no_further(delta):
    """With a delta of 0 and equal log-probs, which is on-policy, nothing is masked."""
    shapes = {"mask_T": torch.ones(4), "weights_T": torch.full((4,), 0.25), "lengths": [2, 2]}
    inputs = {"old_log_probs_T": torch.full((4,), -1.0), "advantages_T": torch.full((4,), -1.0), **shapes}
    factor, metrics = opsm_mask(log_probs_T=torch.full((4,), -1.0 - delta), **inputs, delta=delta)
    assert factor.tolist() == [1.0] * 4
    assert metrics["opsm_clipfrac"].item() == 0.0
    factor, metrics = opsm_mask(
        log_probs_T=torch.tensor([-1.0 - delta, -1.25 - delta, -1.0, -1.0]), **inputs, delta=delta
    )
    assert factor.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert metrics["opsm_clipfrac"].item() == 0.5


def test_the_denominator_stays_that_of_the_original_mask():
    """Of four tokens one is kept, at ratio 1: it counts a quarter, not as much as all four."""
    rollout = torch.tensor([-1.0, -9.0, -9.0, -9.0])
    inputs = {"train_log_probs_T": torch.full((4,), -1.0), "rollout_log_probs_T": rollout, "mask_T": torch.ones(4)}
    weights = token_weights([[1, 1, 1, 1]], global_samples=1, global_tokens=4)
    factor, metrics = icepop_weights(**inputs, weights_T=weights, lower=0.5, upper=2.0)
    token_loss = torch.tensor([8.0, 1.0, 1.0, 1.0])
    assert (token_loss * factor * weights).sum().item() == 2.0
    assert metrics["icepop_clipfrac"].item() == 0.75


@given(LENGTHS, st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.5]))
def test_opsm_is_that_of_the_paper(lengths, seed, delta):
    """DeepSeek-V3.2, equation 9: here the old policy is the batch's first, the new one its second."""
    batch = Batch(lengths, seed)
    kept, clipped = {}, 0.0
    for n, t, share in batch.positions():
        trained = [batch.log_ratio(n, k) for k, mask in enumerate(batch.masks[n]) if mask]
        masked = batch.advantages[n][t] < 0 and sum(trained) / len(trained) > delta
        kept[n, t] = 0.0 if masked else 1.0
        clipped += share * masked
    factor, metrics = opsm_mask(**batch.whole["opsm"], delta=delta)
    assert factor.tolist() == batch.flat(kept)
    assert summed([metrics]) == pytest.approx({"opsm_clipfrac": clipped})


def test_opsm_only_masks_sequences_that_became_less_likely():
    """The drift has a sign: a sequence that the policy now finds more likely is kept whatever its advantage."""
    for change, kept in ((-1.0, [0.0, 0.0, 1.0, 1.0]), (1.0, [1.0] * 4)):
        factor, _ = opsm_mask(
            log_probs_T=torch.full((4,), change), old_log_probs_T=torch.zeros(4), mask_T=torch.ones(4),
            advantages_T=torch.tensor([-1.0, -1.0, 1.0, 1.0]), weights_T=torch.full((4,), 0.25), lengths=[2, 2],
            delta=0.5,
        )  # fmt: skip
        assert factor.tolist() == kept


def test_one_token_vetoes_its_sequence_and_no_other():
    train = torch.tensor([-1.0, -12.0, -1.0, -1.0, -12.0])
    config = MisConfig(mis_veto_threshold=1e-4)
    mask = torch.tensor([1, 1, 1, 1, 0])  # the last token would veto the second sequence, were it trained on
    factor, metrics = mis_weights(
        config, train_log_probs_T=train, rollout_log_probs_T=torch.full((5,), -1.0), mask_T=mask,
        weights_T=mask / 4, lengths=[2, 3],
    )  # fmt: skip
    assert factor.tolist() == [0, 0, 1, 1, 0]
    assert (metrics["mis_veto_token_fraction"].item(), metrics["mis_veto_fraction"].item()) == (0.25, 0.5)


def test_a_veto_threshold_below_the_bounded_ratios_still_works():
    config = MisConfig(mis_veto_threshold=1e-12)
    for log_probs, kept in ((-27.0, 1), (-28.0, 0)):  # log 1e-12 = -27.6, and exp(-20) = 2e-9
        factor, _ = mis_weights(
            config, train_log_probs_T=torch.tensor([log_probs]), rollout_log_probs_T=torch.zeros(1),
            mask_T=torch.ones(1), weights_T=torch.ones(1), lengths=[1],
        )  # fmt: skip
        assert bool(factor > 0) == bool(kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", MIS_LEVELS)
@pytest.mark.parametrize("mode", MIS_MODES)
def test_huge_and_tiny_ratios_stay_finite(mode, level, dtype):
    train = torch.tensor([d for first in HUGE for d in (first, 1.0)], dtype=dtype)
    inputs = {
        "train_log_probs_T": train, "rollout_log_probs_T": torch.zeros_like(train), "mask_T": torch.ones(len(train)),
        "weights_T": torch.full((len(train),), 1 / len(train)), "lengths": [2] * len(HUGE),
    }  # fmt: skip
    config = MisConfig().adapted(
        mis_level=level, mis_mode=mode, mis_rs_level=level, mis_rs_upper_bound=1e30, mis_rs_lower_bound=0.0,
        mis_upper_bound=1e30, mis_lower_bound=0.0, mis_batch_normalize=True, mis_veto_threshold=1e-6,
    )  # fmt: skip
    factor, metrics = mis_weights(config, **inputs, weight_sums=mis_weight_sums(config, **inputs))
    assert factor.dtype == torch.float32
    assert factor.isfinite().all()
    assert all(value.isfinite() for value in metrics.values())
    del inputs["lengths"]
    for factor, metrics in (tis_weights(**inputs, upper=math.inf), icepop_weights(**inputs, lower=0, upper=math.inf)):
        assert factor.isfinite().all()
        assert all(value.isfinite() for value in metrics.values())


def test_bf16_log_probs_are_subtracted_in_fp32():
    """Their difference, 0.0156, would be lost in a sum of a thousand if that were kept in bf16."""
    train = torch.full((1000,), -2.0, dtype=torch.bfloat16)
    rollout = torch.full((1000,), -2.015625, dtype=torch.bfloat16)
    factor, _ = mis_weights(
        MisConfig(mis_level="sequence", mis_upper_bound=1e8), train_log_probs_T=train, rollout_log_probs_T=rollout,
        mask_T=torch.ones(1000), weights_T=torch.full((1000,), 1e-3), lengths=[1000],
    )  # fmt: skip
    assert factor[0].item() == pytest.approx(math.exp(15.625), rel=1e-4)


def test_factors_carry_no_gradient():
    train = torch.zeros(2, requires_grad=True)
    common = {"mask_T": torch.ones(2), "weights_T": torch.full((2,), 0.5)}
    ratio = {"train_log_probs_T": train, "rollout_log_probs_T": torch.ones(2), **common}
    outcomes = [
        tis_weights(**ratio),
        icepop_weights(**ratio, lower=0.1, upper=2.0),
        mis_weights(MisConfig(), **ratio, lengths=[2]),
        opsm_mask(
            log_probs_T=train, old_log_probs_T=torch.ones(2), advantages_T=-train, lengths=[2], delta=0.1, **common
        ),
    ]
    for factor, metrics in outcomes:
        assert not factor.requires_grad
        assert not any(value.requires_grad for value in metrics.values())


def test_what_cannot_be_is_said():
    inputs = Batch([2, 3], seed=1).whole
    with pytest.raises(ConfigError, match=r"between 3.0 and 2.0: need 0 ≤ lower ≤ upper"):
        tis_weights(**inputs["token"], lower=3.0)
    with pytest.raises(ConfigError, match=r"between -1.0 and 2.0"):
        icepop_weights(**inputs["token"], lower=-1.0, upper=2.0)
    with pytest.raises(ConfigError, match=r"delta -0.1 of OPSM must be 0 or more"):
        opsm_mask(**inputs["opsm"], delta=-0.1)
    with pytest.raises(DataError, match=r"must have one shape.*weights_T \[1\]"):
        tis_weights(**{**inputs["token"], "weights_T": torch.ones(1)})
    with pytest.raises(DataError, match=r"must have one shape.*log_probs_T \[5\]"):
        tis_weights(**{**inputs["token"], "rollout_log_probs_T": torch.zeros(1)})
    with pytest.raises(DataError, match=r"must have one shape.*advantages_T"):
        opsm_mask(**{**inputs["opsm"], "advantages_T": torch.zeros(2)}, delta=0.1)
    with pytest.raises(DataError, match="add up to 4 but there are 5 tokens"):
        mis_weights(MisConfig(), **{**inputs["sequence"], "lengths": [2, 2]})


OWN = """
import torch

def truncate(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    assert [len(mask) for mask in loss_masks] == response_lengths == total_lengths
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    kept = [mask * (length > 2) for mask, length in zip(loss_masks, response_lengths)]
    return pg_loss * ratio.clamp(max=args.tis_clip), kept, {"own": list(ratio.split(response_lengths)), "ones": 1.0}

def endless(*, pg_loss, loss_masks, **_):
    return pg_loss / 0, loss_masks, {}

def short(*, pg_loss, loss_masks, **_):
    return pg_loss[1:], loss_masks, {}

def nothing(**_):
    return None
"""


def own_factors(path, name):
    """The factors of a user-defined function for responses of 2 and 3 tokens, of which the fourth is masked."""
    path.write_text(OWN)
    train, rollout = torch.tensor([-1.0, -2.0, -0.5, math.nan, -1.0]), torch.tensor([-2.0, -1.0, -1.0, -1.0, -1.5])
    weights = torch.tensor([0.25, 0.25, 0.25, 0.0, 0.25])
    config = AlgorithmConfig(use_tis=True, tis_clip=1.5, custom_tis_function_path=f"{path}:{name}")
    factor, metrics = correction_factors(
        config,
        log_probs_T=train,
        old_log_probs_T=train,
        advantages_T=torch.ones(5),
        weights_T=weights,
        lengths=[2, 3],
        rollout_log_probs_T=rollout,
    )
    return factor, metrics


def test_a_function_of_the_users_weighs_and_masks(tmp_path):
    factor, metrics = own_factors(tmp_path / "own.py", "truncate")
    assert factor.tolist() == pytest.approx([0.0, 0.0, 1.5, 0.0, 1.5])
    expected = 0.25 * (math.e + math.exp(-1) + 2 * math.exp(0.5))
    assert metrics["own"].item() == pytest.approx(expected) and metrics["ones"].item() == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("endless", "not finite"),
        ("short", "other shapes than it got"),
        ("nothing", "returned NoneType; return pg_loss"),
    ],
)
def test_what_a_function_of_the_users_may_not_return(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        own_factors(tmp_path / "own.py", name)


def test_a_function_of_the_users_needs_tis():
    with pytest.raises(ConfigError, match="truncate has no effect without --use-tis; give --use-tis"):
        AlgorithmConfig(custom_tis_function_path="own.py:truncate")
