"""Statistics of the ratios and log-probs of a step, in scalars that add up over micro-batches and ranks.

Shapes: T tokens of N sequences, one sequence after the other; a sequence is never split over two calls.

Sums under the loss's token weights add up over micro-batches and data-parallel ranks. Not everything is such a sum:
standard deviations and effective sample sizes are functions of three sums, a minimum or maximum has to be taken as one,
and medians cannot be had this way. `Statistics` holds each in the form that can be combined, and makes metrics of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.ops.off_policy import bounded_ratio, log_ratio, weighted_sum
from slime_core.ops.tokens import Lengths, bounded_expm1_minus, masked, sequence_lengths, sequence_mean, sequence_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of a part of a step, in the form in which parts can be combined.

    Attributes:
        sums: ``Σ a x`` under the token weights a, by metric name: they add up.
        moments: By name, ``Σ a``, ``Σ a w`` and ``Σ a w²`` of a weight or ratio w, float64 [3]: they add up. In fp32
            a deviation would drown where w is near 1.
        minima: By name; the smallest of the parts' counts. Infinity where a part is empty.
        maxima: By name; the largest of the parts' counts. Minus infinity where a part is empty.
    """

    sums: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    moments: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    minima: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    maxima: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def merged(cls, parts: Iterable[Statistics]) -> Statistics:
        """Several parts as one. Parts with different names are laid side by side."""
        whole = cls()
        for part in parts:
            _merge(whole.sums, part.sums, torch.add)
            _merge(whole.moments, part.moments, torch.add)
            _merge(whole.minima, part.minima, torch.minimum)
            _merge(whole.maxima, part.maxima, torch.maximum)
        return whole

    def reduced(self, group: dist.ProcessGroup | None = None) -> Statistics:
        """The statistics of all ranks, the same on each. Two collectives, which every rank must take part in.

        A rank without tokens takes part too: the functions below give the same names for empty tensors. ``group`` are
        the ranks among which the tokens are split; ``None`` means all.
        """
        whole = Statistics.merged([self])
        negated = {name: -value for name, value in self.minima.items()}
        _all_reduce((whole.sums, whole.moments), dist.ReduceOp.SUM, group)
        _all_reduce((whole.maxima, negated), dist.ReduceOp.MAX, group)
        return dataclasses.replace(whole, minima={name: -value for name, value in negated.items()})

    def metrics(self) -> dict[str, Tensor]:
        """Scalars by name, once all parts are combined. These do not add up any more.

        Each of the ``sums``; of each of the ``moments`` ``<name>_mean``, ``<name>_std`` and ``<name>_ess``, in float64;
        of the extremes ``<name>_min`` and ``<name>_max``. Where no token counted, the last five are 0.

        ``_ess`` is the effective sample size as a share of the samples, ``(Σ a w)² / (Σ a · Σ a w²)`` (Kish 1965, here
        under the weights a): 1 when all w are equal, 1/n when one of n equally weighted tokens has it all.
        """
        values = dict(self.sums)
        for name, moments_3 in self.moments.items():
            total = moments_3[0]
            mean, square = (moments_3[1:] / total.where(total > 0, 1)).unbind()
            found = {
                "mean": mean,
                "std": (square - mean.square()).clamp(min=0).sqrt(),
                "ess": mean.square() / square.where(square != 0, 1),
            }
            values |= {f"{name}_{kind}": value.where(total > 0, 0) for kind, value in found.items()}
        for kind, extremes, empty in (("min", self.minima, torch.inf), ("max", self.maxima, -torch.inf)):
            values |= {f"{name}_{kind}": value.where(value != empty, 0) for name, value in extremes.items()}
        return values


def policy_statistics(
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> Statistics:
    """How far the policy has moved from the one that its ratio ρ = π/π_old compares with, and what the clip does.

    ρ is the token's; the sequence ratio that GSPO clips is not seen here.

    Args, besides those of :func:`slime_core.ops.policy_token_loss`:
        mask_T: 1 where a token is trained on [T].
        weights_T: From :func:`slime_core.ops.token_weights` [T].

    Returns:
        Sums ``pg_clipfrac_low`` (A < 0 and ρ < 1 − ε) and ``pg_clipfrac_high`` (A > 0 and ρ > 1 + ε_high), together the
        clip fraction of PPO; ``pg_clipfrac_dual`` (A < 0 and ρ > c) with a c; ``ppo_kl_k1``, ``ppo_kl_k2`` and
        ``ppo_kl_k3``, estimates of KL(π_old ‖ π) from tokens of π_old: −log ρ, (log ρ)²/2 and ρ − 1 − log ρ (Schulman
        2020). Moments and extremes of ``ratio``.

    Raises:
        DataError: The shapes differ.
    """
    log_ratio_T = log_ratio(log_probs_T, old_log_probs_T, mask_T)
    (signs_T,) = masked(mask_T, advantages_T=advantages_T.detach())
    ratio_T = bounded_ratio(log_ratio_T)
    values = {
        "pg_clipfrac_low": (signs_T < 0) & (ratio_T < 1 - eps_clip),
        "pg_clipfrac_high": (signs_T > 0) & (ratio_T > 1 + eps_clip_high),
        "ppo_kl_k1": -log_ratio_T,
        "ppo_kl_k2": log_ratio_T.square() / 2,
        "ppo_kl_k3": bounded_expm1_minus(log_ratio_T),
    }
    if eps_clip_c is not None:
        values["pg_clipfrac_dual"] = (signs_T < 0) & (ratio_T > eps_clip_c)
    moved = Statistics(sums={name: weighted_sum(value_T, mask_T, weights_T) for name, value_T in values.items()})
    return Statistics.merged([moved, _spread("ratio", bounded_ratio(log_ratio_T.double()), mask_T, weights_T)])


def weight_statistics(name: str, values_T: Tensor, mask_T: Tensor, weights_T: Tensor) -> Statistics:
    """Moments and extremes, called ``name``, of any numbers of 0 or more per token, such as a correction's factors [T].

    ``weights_T`` is from :func:`slime_core.ops.token_weights`; what is masked may be NaN.
    """
    return _spread(name, values_T.detach(), mask_T, weights_T)


def drift_statistics(
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths,
    context_group: dist.ProcessGroup | None = None,
) -> Statistics:
    """How differently the trainer and the engine see the tokens that the engine sampled.

    With d = log π_train − log π_rollout. A sequence counts with the sum of its tokens' weights: each alike under
    per-sample weights, by its trained tokens under per-token weights.

    Args:
        train_log_probs_T: Log-probs (nats) under the policy that the update starts from [T].
        rollout_log_probs_T: Log-probs that the engine gave [T].
        mask_T: 1 where a token is trained on [T].
        weights_T: From :func:`slime_core.ops.token_weights` [T].
        lengths: N token counts, one per sequence.
        context_group: Ranks that hold the other tokens of the same N sequences; every one of them must call this.

    Returns:
        Sums ``train_rollout_logprob_abs_diff`` (|d|); ``mismatch_kl`` (−d) and ``mismatch_k3_kl`` (exp(d) − 1 − d),
        estimates of KL(π_rollout ‖ π_train) (Schulman 2020); ``mismatch_training_log_ppl`` and
        ``mismatch_rollout_log_ppl`` (−log π); of each sequence's mean of −d, its size ``mismatch_log_ppl_abs_diff`` and
        its exponential ``mismatch_ppl_ratio``, the trainer's perplexity over the engine's; ``mismatch_chi2_token`` and
        ``mismatch_chi2_seq``, estimates of χ²(π_train ‖ π_rollout) = E[ρ²] − 1 with ρ of the token and of the sequence
        (Liu, Li et al. 2025, "When Speed Kills Stability", part 1). The maximum ``train_rollout_logprob_abs_diff``.
        Moments and extremes of ``mismatch_ratio`` and ``mismatch_seq_ratio``, the two ρ, taken within exp(±20).

    Raises:
        DataError: The shapes differ, or the lengths do not add up to T.
    """
    d_T = log_ratio(train_log_probs_T, rollout_log_probs_T, mask_T)
    lengths_N = sequence_lengths(lengths, d_T)
    trained_T = mask_T != 0
    counted_N = sequence_sum(trained_T.to(d_T), lengths_N) > 0
    weights_N = sequence_sum(weights_T.detach().to(d_T).masked_fill(~trained_T, 0), lengths_N)
    mean_N = sequence_mean(d_T, trained_T, lengths_N, context_group)
    token = _spread("mismatch_ratio", bounded_ratio(d_T.double()), trained_T, weights_T)
    ratio_N = bounded_ratio(sequence_sum(d_T, lengths_N, context_group).double())
    sequence = _spread("mismatch_seq_ratio", ratio_N, counted_N, weights_N)
    per_token = {
        "train_rollout_logprob_abs_diff": d_T.abs(),
        "mismatch_kl": -d_T,
        "mismatch_k3_kl": bounded_expm1_minus(d_T),
        "mismatch_training_log_ppl": -train_log_probs_T,
        "mismatch_rollout_log_ppl": -rollout_log_probs_T,
    }
    per_sequence = {"mismatch_log_ppl_abs_diff": mean_N.abs(), "mismatch_ppl_ratio": bounded_ratio(-mean_N)}
    sums = {name: weighted_sum(value_T, trained_T, weights_T) for name, value_T in per_token.items()}
    sums |= {name: weighted_sum(value_N, counted_N, weights_N) for name, value_N in per_sequence.items()}
    sums["mismatch_chi2_token"] = _square_less_one(token.moments["mismatch_ratio"])
    sums["mismatch_chi2_seq"] = _square_less_one(sequence.moments["mismatch_seq_ratio"])
    largest = {"train_rollout_logprob_abs_diff": _extremes(d_T.abs(), trained_T)[1]}
    return Statistics.merged([Statistics(sums=sums, maxima=largest), token, sequence])


def _spread(name: str, values_X: Tensor, mask_X: Tensor, weights_X: Tensor) -> Statistics:
    values_X = values_X.double()
    powers = (torch.ones_like(values_X), values_X, values_X.square())
    smallest, largest = _extremes(values_X, mask_X)
    return Statistics(
        moments={name: torch.stack([weighted_sum(power_X, mask_X, weights_X) for power_X in powers])},
        minima={name: smallest},
        maxima={name: largest},
    )


def _extremes(values_X: Tensor, mask_X: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum; ∞ and −∞ of nothing, so that nothing changes no other part's."""
    end = values_X.new_full((1,), torch.inf)
    return (
        torch.cat([values_X.masked_fill(mask_X == 0, torch.inf), end]).amin(),
        torch.cat([values_X.masked_fill(mask_X == 0, -torch.inf), -end]).amax(),
    )


def _square_less_one(moments_3: Tensor) -> Tensor:
    """``Σ a (w² − 1)``, which still adds up."""
    return moments_3[2] - moments_3[0]


def _merge(whole: dict[str, Tensor], part: dict[str, Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> None:
    for name, value in part.items():
        whole[name] = combine(whole[name], value) if name in whole else value


def _all_reduce(
    parts: Iterable[dict[str, Tensor]], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
) -> None:
    """Reduce values in place, by one collective, in the order of their names whatever the order they came in."""
    places = [(part, name) for part in parts for name in sorted(part)]
    if not places:
        return
    flat = torch.cat([part[name].reshape(-1) for part, name in places])
    dist.all_reduce(flat, operation, group=group)
    pieces = torch.split(flat, [part[name].numel() for part, name in places])
    for (part, name), piece in zip(places, pieces, strict=True):
        part[name] = piece.reshape(part[name].shape)
