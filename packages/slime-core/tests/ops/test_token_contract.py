"""What every function of tokens promises: masked places may hold anything, nothing overflows, bf16 only stores."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_core.config import KL_LOSS_TYPES, MIS_LEVELS, MIS_MODES, MisConfig
from slime_core.ops import (
    cispo_token_loss,
    distilled_advantages,
    dpo_pair_loss,
    drift_statistics,
    gspo_log_ratio,
    gspo_token_loss,
    icepop_weights,
    kl_penalty,
    mis_weight_sums,
    mis_weights,
    opsm_mask,
    outcome_advantages,
    policy_statistics,
    policy_token_loss,
    sft_objective,
    tis_weights,
    token_weights,
    value_loss,
    value_objective,
    weight_statistics,
    whiten,
)

JUNK = [math.nan, math.inf, -math.inf, 3e38]
LOG_RATIO = st.sampled_from([0.0, 0.125, -0.5, 19.0, 21.0, -21.0, 88.0, 90.0, -90.0, 1e3, -1e3])
TOKEN = st.tuples(st.integers(0, 1), LOG_RATIO, st.sampled_from([-8.0, 0.0, 1.5]), st.sampled_from(JUNK))
SEQUENCES = st.lists(st.lists(TOKEN, max_size=4), max_size=4).filter(lambda rows: len(rows) % 2 == 0)


@dataclasses.dataclass
class Batch:
    """Columns [T] of pairs of sequences: ``new`` is what the gradient goes to."""

    new: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, sequences, *, junk):
        """Masked places hold 0, or else the junk that was drawn."""
        rows = [token for sequence in sequences for token in sequence]
        mask = torch.tensor([kept for kept, *_ in rows], dtype=torch.int64)
        spoil = torch.tensor([what for *_, what in rows], dtype=torch.float32)

        def column(values):
            column = torch.tensor(values, dtype=torch.float32)
            return torch.where(mask == 0, spoil if junk else torch.zeros_like(spoil), column)

        return cls(
            new=column([ratio - 1 for _, ratio, _, _ in rows]).requires_grad_(),
            old=column([-1.0] * len(rows)),
            ref=column([-1 - ratio / 2 for _, ratio, _, _ in rows]),
            advantages=column([advantage for *_, advantage, _ in rows]),
            mask=mask,
            weights=token_weights(
                [[kept for kept, *_ in sequence] for sequence in sequences],
                global_samples=max(len(sequences), 1),
                global_tokens=1,
            ),
            lengths=[len(sequence) for sequence in sequences],
        )

    def stored(self, dtype):
        """The same with its numbers in another type; the values and not the gradient go over."""
        given = {name: getattr(self, name).detach().to(dtype) for name in ("new", "old", "ref", "advantages")}
        given["new"].requires_grad_()
        return dataclasses.replace(self, **given)


def policy(batch, **options):
    return policy_token_loss(batch.new, batch.old, batch.advantages, 0.2, 0.28, mask_T=batch.mask, **options)


def gspo(batch, **options):
    return gspo_token_loss(
        batch.new, batch.old, batch.advantages, 0.2, 0.28, mask_T=batch.mask, lengths=batch.lengths, **options
    )


def penalty(kind, unbiased):
    return lambda batch: [
        kl_penalty(batch.new, batch.ref, kind, old_log_probs_T=batch.old if unbiased else None, mask_T=batch.mask)
    ]


def scalars(objective):
    loss, metrics = objective
    return [loss, *metrics.values()]


def sequence_ratio(function, **options):
    return lambda batch: [function(batch.new, batch.old, mask_T=batch.mask, lengths=batch.lengths, **options)]


WITH_GRADIENT = {
    "policy_token_loss": policy,
    "policy_token_loss, dual clip": lambda batch: policy(batch, eps_clip_c=3.0),
    "gspo_token_loss": gspo,
    "gspo_token_loss, token form": lambda batch: gspo(batch, token_form=True, eps_clip_c=3.0),
    "cispo_token_loss": lambda batch: cispo_token_loss(
        batch.new, batch.old, batch.advantages, 0.2, 4.0, mask_T=batch.mask
    ),
    **{f"kl_penalty, {kind}": penalty(kind, False) for kind in KL_LOSS_TYPES},
    **{f"kl_penalty, unbiased {kind}": penalty(kind, True) for kind in KL_LOSS_TYPES},
    "gspo_log_ratio": sequence_ratio(gspo_log_ratio),
    "gspo_log_ratio, token form": sequence_ratio(gspo_log_ratio, token_form=True),
    "value_loss": lambda batch: value_loss(batch.new, batch.old, batch.ref, 0.2, mask_T=batch.mask),
    "value_objective": lambda batch: scalars(
        value_objective(
            values_T=batch.new, old_values_T=batch.old, returns_T=batch.ref, weights_T=batch.weights, value_clip=0.2
        )
    ),
    "sft_objective": lambda batch: scalars(sft_objective(batch.new, batch.weights)),
    "dpo_pair_loss": lambda batch: dpo_pair_loss(
        batch.new, batch.ref, mask_T=batch.mask, lengths=batch.lengths, beta=0.5, label_smoothing=0.1
    ),
}


def two_policies(batch):
    return {
        "train_log_probs_T": batch.new,
        "rollout_log_probs_T": batch.old,
        "mask_T": batch.mask,
        "weights_T": batch.weights,
    }


def factors(result):
    factor, metrics = result
    return [factor, *metrics.values()]


def mis(config):
    def outputs(batch):
        given = {**two_policies(batch), "lengths": batch.lengths}
        sums = mis_weight_sums(config, **given)
        return [*factors(mis_weights(config, **given, weight_sums=sums)), sums]

    return outputs


def moved(batch):
    return {
        "log_probs_T": batch.new,
        "old_log_probs_T": batch.old,
        "advantages_T": batch.advantages,
        "mask_T": batch.mask,
        "weights_T": batch.weights,
    }


CONSTANTS = {
    "tis_weights": lambda batch: factors(tis_weights(**two_policies(batch))),
    "tis_weights, unbounded": lambda batch: factors(tis_weights(**two_policies(batch), upper=math.inf)),
    "icepop_weights": lambda batch: factors(icepop_weights(**two_policies(batch), lower=0.5, upper=math.inf)),
    **{
        f"mis_weights, {level} {mode}": mis(
            MisConfig(
                mis_level=level, mis_mode=mode, mis_rs_level=level, mis_rs_upper_bound=3.0, mis_veto_threshold=1e-3,
                **({} if mode == "none" else {"mis_upper_bound": 1e30, "mis_batch_normalize": True}),
            )
        )
        for level in MIS_LEVELS
        for mode in MIS_MODES
    },
    "opsm_mask": lambda batch: factors(opsm_mask(**moved(batch), lengths=batch.lengths, delta=0.1)),
    "policy_statistics": lambda batch: list(
        policy_statistics(**moved(batch), eps_clip=0.2, eps_clip_high=0.28, eps_clip_c=3.0).metrics().values()
    ),
    "drift_statistics": lambda batch: list(
        drift_statistics(**two_policies(batch), lengths=batch.lengths).metrics().values()
    ),
    "weight_statistics": lambda batch: list(
        weight_statistics("w", batch.advantages + 8, batch.mask, batch.weights).metrics().values()
    ),
    "outcome_advantages": lambda batch: [
        outcome_advantages(
            rewards_N=torch.arange(len(batch.lengths), dtype=batch.new.dtype),
            mask_T=batch.mask, lengths=batch.lengths, kl_T=batch.new, kl_coef=0.1,
        )
    ],
    "distilled_advantages": lambda batch: [
        distilled_advantages(
            advantages_T=batch.advantages, student_log_probs_T=batch.new, teacher_log_probs_T=batch.ref,
            mask_T=batch.mask, coef=0.5,
        )
    ],
    "whiten": lambda batch: [whiten(batch.new, batch.mask)],
}  # fmt: skip
FUNCTIONS = WITH_GRADIENT | CONSTANTS
PER_TOKEN = (
    "policy_token_loss",
    "gspo_token_loss",
    "cispo",
    "kl_",
    "value_loss",
    "tis",
    "icepop",
    "mis",
    "opsm",
    "out",
    "dis",
    "whi",
)
"""Beginnings of the names of those whose first result is a number per token, 0 where masked."""


def gradient(outputs, batch):
    return torch.autograd.grad(sum(output.sum() for output in outputs if output.requires_grad), batch.new)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=40)
@given(sequences=SEQUENCES)
def test_masked_places_may_hold_anything_and_all_is_finite(name, sequences):
    """Log-ratios of up to ±1,000 where a token counts; no sequences, empty and wholly masked ones included."""
    clean, dirty = Batch.of(sequences, junk=False), Batch.of(sequences, junk=True)
    outputs, expected = FUNCTIONS[name](dirty), FUNCTIONS[name](clean)
    for output, other in zip(outputs, expected, strict=True):
        assert output.equal(other)
        assert output.isfinite().all()
    if name.startswith(PER_TOKEN):
        assert not outputs[0][dirty.mask == 0].any()
    if name in CONSTANTS:
        assert not any(output.requires_grad for output in outputs)
        return
    slopes = gradient(outputs, dirty)
    assert slopes.equal(gradient(expected, clean))
    assert slopes.isfinite().all()
    assert not slopes[dirty.mask == 0].any()


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=20)
@given(sequences=SEQUENCES)
def test_bf16_inputs_give_what_the_same_numbers_give_in_fp32(name, sequences):
    narrow = Batch.of(sequences, junk=True).stored(torch.bfloat16)
    wide = narrow.stored(torch.float32)
    outputs, expected = FUNCTIONS[name](narrow), FUNCTIONS[name](wide)
    for output, other in zip(outputs, expected, strict=True):
        assert output.dtype == other.dtype
        assert output.dtype != torch.bfloat16
        assert output.equal(other)
    if name in WITH_GRADIENT:
        assert gradient(outputs, narrow).equal(gradient(expected, wide).bfloat16())
