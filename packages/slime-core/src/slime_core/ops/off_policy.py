"""Corrections for tokens that another policy sampled than the one that trains on them: a factor on each token's loss.

Shapes: T tokens of N sequences, one sequence after the other; a sequence is never split over two calls, other than over
the ranks of a ``context_group``, which must all make the call then.

The engine that sampled the tokens (π_rollout) and the trainer (π_train, the policy that the update starts from) see
them differently: kernels and precisions differ, and the engine's weights may be older. With d = log π_train −
log π_rollout, ρ = exp(d) is the importance ratio. The loss becomes ``Σ weights_T · factor_T · loss_T``.

**Denominators stay those of the original mask.** ``weights_T`` comes from :func:`slime_core.ops.token_weights` with the
loss masks as they were, also where a factor is 0. The identity behind all of this, E_rollout[ρ f] = E_train[f], is a
mean over everything that was sampled. If rejected tokens left the denominator too, those that remain would count for
more: one surviving token of a thousand would weigh as much as a whole response, and a step that rejects most of its
data would be as large as one that rejects none. The denominators would also depend on the policies' numbers, and could
no longer be known before the step is split into micro-batches.

Ratios are taken within exp(±20), so that no weight overflows. Factors are constants: no gradient passes through them.
Where ``mask_T`` is 0, inputs may hold anything, NaN too, and the factor is 0. All metrics are sums under ``weights_T``,
which add up over micro-batches and ranks. Functions raise DataError if shapes or lengths do not match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.config import MisConfig, OffPolicyConfig
from slime_core.errors import ConfigError, DataError
from slime_core.hooks import HookArgs
from slime_core.ops.tokens import (
    LIMIT,
    Lengths,
    expand,
    masked,
    needed,
    needed_lengths,
    sequence_lengths,
    sequence_mean,
    sequence_sum,
)
from slime_core.user_functions import load_function

Metrics = dict[str, Tensor]


def log_ratio(log_probs_T: Tensor, other_log_probs_T: Tensor, mask_T: Tensor) -> Tensor:
    """``log_probs_T − other_log_probs_T`` [T] as a constant in fp32 or better; 0 where the mask is 0."""
    ours_T, others_T = masked(mask_T, log_probs_T=log_probs_T.detach(), other_log_probs_T=other_log_probs_T.detach())
    return ours_T - others_T


def bounded_ratio(log_ratio_X: Tensor) -> Tensor:
    """``exp`` of a log-ratio of any shape, taken within ±20."""
    return log_ratio_X.clamp(-LIMIT, LIMIT).exp()


def weighted_sum(values_X: Tensor, mask_X: Tensor, weights_X: Tensor) -> Tensor:
    """``Σ weights · values`` as a constant in fp32 or better; what is masked may be NaN."""
    kept_X, kept_weights_X = masked(mask_X, values_T=values_X.detach(), weights_T=weights_X.detach())
    return (kept_X * kept_weights_X).sum()


def per_token(values_X: Tensor, like_T: Tensor, lengths: Lengths | None) -> Tensor:
    """Numbers per token as they are; numbers per sequence [N] at each of its tokens [T]."""
    if values_X.shape == like_T.shape or lengths is None:
        return values_X
    lengths_N = sequence_lengths(lengths, like_T)
    count = len(like_T) // lengths_N if isinstance(lengths_N, int) else len(lengths_N)
    if values_X.shape != (count,):
        raise DataError(
            f"advantages_T has shape {list(values_X.shape)}, must be {list(like_T.shape)}, one number per token, or "
            f"[{count}], one per response"
        )
    return expand(values_X, lengths_N)


def correction_factors(
    config: OffPolicyConfig,
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths | None = None,
    rollout_log_probs_T: Tensor | None = None,
    mis_sums: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor | None, Metrics]:
    """The factor on each token's policy loss: TIS, IcePop or MIS, and OPSM, by configuration.

    The arguments and errors are those of :func:`slime_core.ops.policy_objective`. Returns the factors [T], ``None``
    without a correction; and the corrections' metrics.
    """
    factor_T: Tensor | None = None
    metrics: Metrics = {}
    if not (config.use_mis or config.use_tis or config.use_opsm):
        return factor_T, metrics
    mask_T = weights_T != 0
    if config.use_mis:
        factor_T, metrics = mis_weights(
            config,
            train_log_probs_T=old_log_probs_T,
            rollout_log_probs_T=needed(rollout_log_probs_T, "--use-mis", "the engine's log-probs"),
            mask_T=mask_T,
            weights_T=weights_T,
            lengths=needed_lengths(lengths, "--use-mis"),
            weight_sums=mis_sums,
            context_group=context_group,
        )
    elif config.custom_tis_function_path is not None:
        factor_T, metrics = custom_weights(
            config,
            train_log_probs_T=old_log_probs_T,
            rollout_log_probs_T=needed(rollout_log_probs_T, "--use-tis", "the engine's log-probs"),
            weights_T=weights_T,
            lengths=needed_lengths(lengths, "--custom-tis-function-path"),
            context_group=context_group,
        )
    elif config.use_tis:
        factor_T, metrics = (icepop_weights if config.tis_mode == "icepop" else tis_weights)(
            train_log_probs_T=old_log_probs_T,
            rollout_log_probs_T=needed(rollout_log_probs_T, "--use-tis", "the engine's log-probs"),
            mask_T=mask_T,
            weights_T=weights_T,
            lower=config.tis_clip_low,
            upper=config.tis_clip,
        )
    if config.use_opsm:
        kept_T, found = opsm_mask(
            log_probs_T=log_probs_T,
            old_log_probs_T=old_log_probs_T if rollout_log_probs_T is None else rollout_log_probs_T,
            advantages_T=per_token(advantages_T, weights_T, lengths),
            mask_T=mask_T,
            weights_T=weights_T,
            lengths=needed_lengths(lengths, "--use-opsm"),
            delta=config.opsm_delta,
            context_group=context_group,
        )
        factor_T, metrics = kept_T if factor_T is None else factor_T * kept_T, metrics | found
    return factor_T, metrics


def custom_weights(
    config: OffPolicyConfig,
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """The factors of ``--custom-tis-function-path``, a function of the upstream system's form.

    It is called with ``args`` (the algorithm's flags), ``pg_loss`` (ones, which it multiplies), and lists with an entry
    per response: ``train_log_probs``, ``rollout_log_probs`` and ``loss_masks`` (tensors), ``response_lengths`` and
    ``total_lengths`` (numbers, here the same). It returns ``pg_loss``, the masks as they are to be, and metrics. With a
    ``context_group`` responses are gathered from its ranks, the tokens of one rank after those of the other.

    Returns:
        The factors [T], 0 where its masks are; and its metrics, each a number per token, per response, or one.

    Raises:
        ConfigError: It cannot be used.
        DataError: It returned something else, or weights that are not finite.
    """
    path, flag = str(config.custom_tis_function_path), "--custom-tis-function-path"
    count = sequence_lengths(lengths, weights_T)
    own_N = [count] * (len(weights_T) // count) if isinstance(count, int) else [int(one) for one in count]
    mask_T = (weights_T != 0).to(torch.promote_types(weights_T.dtype, torch.float32))
    given = masked(mask_T, train=train_log_probs_T.detach(), rollout=rollout_log_probs_T.detach())
    places_T, whole_N = _places(own_N, weights_T.device, context_group)
    train_W, rollout_W, mask_W = (_gathered(one_T, places_T, sum(whole_N), context_group) for one_T in (*given, mask_T))
    found = load_function(path, flag)(
        args=HookArgs.from_configs(config),
        pg_loss=torch.ones_like(mask_W),
        train_log_probs=list(torch.split(train_W, whole_N)),
        rollout_log_probs=list(torch.split(rollout_W, whole_N)),
        loss_masks=list(torch.split(mask_W, whole_N)),
        total_lengths=list(whole_N),
        response_lengths=list(whole_N),
    )
    if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[2], Mapping):
        raise DataError(f"{flag} {path} returned {type(found).__name__}; return pg_loss, masks and metrics")
    factor_W, kept_W = found[0], _flat(found[1], mask_W)
    if not isinstance(factor_W, Tensor) or factor_W.shape != mask_W.shape or kept_W.shape != mask_W.shape:
        raise DataError(f"{flag} {path} returned other shapes than it got; return pg_loss [T] and a mask per response")
    factor_W = torch.where((kept_W != 0) & (mask_W != 0), factor_W.detach(), 0.0)
    if not bool(torch.isfinite(factor_W).all()):
        raise DataError(f"{flag} {path} returned weights that are not finite")
    metrics = {}
    for name, values in found[2].items():
        values_X = _flat(values, mask_W)
        if values_X.shape == mask_W.shape:
            values_T = values_X[places_T]
        else:
            values_T = expand(values_X, count) if len(values_X) == len(own_N) else values_X.mean() * mask_T
        metrics[str(name)] = weighted_sum(values_T, mask_T, weights_T)
    return factor_W[places_T], metrics


def _places(own_N: list[int], device: torch.device, group: dist.ProcessGroup | None) -> tuple[Tensor, list[int]]:
    """Where this rank's tokens are among those of all ranks, response by response; and the whole responses' lengths."""
    if group is None:
        return torch.arange(sum(own_N), device=device), own_N
    rank, own = dist.get_rank(group), torch.tensor(own_N, device=device, dtype=torch.int64)
    counts_RN = torch.zeros(dist.get_world_size(group), len(own_N), device=device, dtype=torch.int64)
    counts_RN[rank] = own
    dist.all_reduce(counts_RN, group=group)
    whole = counts_RN.sum(0)
    before = whole.cumsum(0) - whole + counts_RN[:rank].sum(0) - (own.cumsum(0) - own)
    return torch.arange(sum(own_N), device=device) + torch.repeat_interleave(before, own), whole.tolist()


def _gathered(values_T: Tensor, places_T: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """The numbers of all ranks at their places."""
    if group is None:
        return values_T
    values_W = values_T.new_zeros(size)
    values_W[places_T] = values_T
    dist.all_reduce(values_W, group=group)
    return values_W


def _flat(values: Any, like: Tensor) -> Tensor:
    """A number, a tensor, or a list of them, as one tensor."""
    parts = values if isinstance(values, list | tuple) else [values]
    if not parts:
        return like.new_zeros(0)
    return torch.cat([torch.as_tensor(part, device=like.device).flatten().to(like.dtype) for part in parts])


def tis_weights(
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    upper: float = 2.0,
    lower: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Truncated importance sampling, TIS: ``min(ρ, upper)`` per token.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". A ``lower`` above 0
    also raises the small weights, which TIS as published does not.

    Args:
        train_log_probs_T: Log-probs (nats) under the policy that the update starts from [T].
        rollout_log_probs_T: Log-probs under the policy that sampled the tokens [T].
        mask_T: 1 where a token is trained on [T].
        weights_T: From :func:`slime_core.ops.token_weights` [T]; for the metrics alone.
        upper: Largest weight (``--tis-clip``).
        lower: Smallest weight (``--tis-clip-low``).

    Returns:
        The factors [T]; and ``tis`` (ρ), ``tis_abs`` (|ρ − 1|), ``tis_clipfrac`` (weights that were cut).

    Raises:
        ConfigError: ``0 ≤ lower ≤ upper`` does not hold.
    """
    ratio_T = _token_ratio(train_log_probs_T, rollout_log_probs_T, mask_T, lower, upper)
    return _bounded("tis", ratio_T, ratio_T.clamp(lower, upper), mask_T, weights_T)


def icepop_weights(
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    lower: float,
    upper: float,
) -> tuple[Tensor, Metrics]:
    """IcePop, double-sided masking: ρ where ``lower ≤ ρ ≤ upper``, else 0, per token. Otherwise as :func:`tis_weights`.

    Ling Team 2025, the Ring-1T report "Every Step Evolves", equations 1 and 2; it trains with bounds of α = 0.5 and
    β = 5. The metrics are ``icepop`` (ρ), ``icepop_abs`` (|ρ − 1|), ``icepop_clipfrac`` (tokens left out).
    """
    ratio_T = _token_ratio(train_log_probs_T, rollout_log_probs_T, mask_T, lower, upper)
    factor_T = ratio_T.masked_fill((ratio_T < lower) | (ratio_T > upper), 0)
    return _bounded("icepop", ratio_T, factor_T, mask_T, weights_T)


def mis_weights(
    config: MisConfig,
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths,
    weight_sums: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """Masked importance sampling, MIS, in its variants.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch";
    rejection apart from the weights, the veto and the normalisation are as its authors later put them into public
    trainers (verl, "rollout correction").

    The ratio is that of the ``token``, exp(d_t); of the whole ``sequence``, exp(Σ m d); or its ``geometric`` mean over
    the trained tokens, exp(Σ m d / Σ m). Then, in this order:

    1. The mode makes weights of the ratios: ``truncate`` min(ρ, upper), ``clip`` to [lower, upper], ``mask`` 0 outside
       [lower, upper], ``none`` 1 everywhere.
    2. ``mis_batch_normalize`` divides them by their mean over the step, under the loss's own weights, so that the
       correction does not change the size of the loss.
    3. Tokens whose ratio at the rejection level is outside the rejection bounds get 0.
    4. All tokens of a sequence get 0 if one trained token has exp(d_t) below ``mis_veto_threshold``.

    Args, besides those of :func:`tis_weights`:
        config: Levels, mode and bounds.
        lengths: N token counts, one per sequence.
        weight_sums: With ``mis_batch_normalize``: :func:`mis_weight_sums` added up over all micro-batches and ranks of
            the step [2].
        context_group: Ranks that hold the other tokens of the same N sequences.

    Returns:
        The factors [T]; and ``mis_ratio`` (the ratio at the level), ``mis_weight`` (the factor), ``mis_low_fraction``
        and ``mis_high_fraction`` (ratios below and above the mode's bounds), ``mis_dropped_fraction`` (factor 0); with
        rejection ``mis_rejected_fraction``; with a veto ``mis_veto_token_fraction`` (tokens below the threshold) and
        ``mis_veto_fraction`` (tokens of their sequences).

    Raises:
        ConfigError: ``mis_batch_normalize`` is on and ``weight_sums`` is missing.
    """
    log_ratio_T = log_ratio(train_log_probs_T, rollout_log_probs_T, mask_T)
    lengths_N = sequence_lengths(lengths, log_ratio_T)
    ratio_T = _ratio_at(config.mis_level, log_ratio_T, mask_T, lengths_N, context_group)
    factor_T, low_T, high_T = _apply_mode(config, ratio_T)
    shares = {"mis_low_fraction": low_T, "mis_high_fraction": high_T}
    if config.mis_batch_normalize:
        factor_T = factor_T * _scale(weight_sums)
    if config.mis_rs_level is not None:
        lower, upper = config.rejection_bounds
        compared_T = _ratio_at(config.mis_rs_level, log_ratio_T, mask_T, lengths_N, context_group)
        shares["mis_rejected_fraction"] = rejected_T = (compared_T < lower) | (compared_T > upper)
        factor_T = factor_T.masked_fill(rejected_T, 0)
    if config.mis_veto_threshold is not None:
        # Compared as logarithms: the threshold may lie below the smallest bounded ratio.
        shares["mis_veto_token_fraction"] = below_T = log_ratio_T < math.log(config.mis_veto_threshold)
        shares["mis_veto_fraction"] = vetoed_T = (
            expand(sequence_sum(below_T.to(ratio_T), lengths_N, context_group), lengths_N) > 0
        )
        factor_T = factor_T.masked_fill(vetoed_T, 0)
    factor_T = _masked(factor_T, mask_T)
    shares["mis_dropped_fraction"] = factor_T == 0
    values = {"mis_ratio": ratio_T, "mis_weight": factor_T, **shares}
    return factor_T, {name: weighted_sum(value_T, mask_T, weights_T) for name, value_T in values.items()}


def mis_weight_sums(
    config: MisConfig,
    *,
    train_log_probs_T: Tensor,
    rollout_log_probs_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The sums that :func:`mis_weights` needs for ``mis_batch_normalize``, from the same arguments.

    Add the result up over the micro-batches and ranks of the step: a mean over each micro-batch alone would make the
    loss depend on how the step is split.

    Returns:
        Σ weights_T · w and Σ weights_T over the trained tokens [2], w being the weights that the mode gives, before any
        rejection.
    """
    log_ratio_T = log_ratio(train_log_probs_T, rollout_log_probs_T, mask_T)
    lengths_N = sequence_lengths(lengths, log_ratio_T)
    factor_T, _, _ = _apply_mode(config, _ratio_at(config.mis_level, log_ratio_T, mask_T, lengths_N, context_group))
    ones_T = torch.ones_like(factor_T)
    return torch.stack([weighted_sum(factor_T, mask_T, weights_T), weighted_sum(ones_T, mask_T, weights_T)])


def opsm_mask(
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths,
    delta: float,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Metrics]:
    """Off-policy sequence masking, OPSM: 0 where the advantage is negative and the sequence has drifted, else 1.

    DeepSeek-AI 2025, DeepSeek-V3.2, equation 9. A sequence has drifted if its mean over trained tokens of log π_old −
    log π is above ``delta``. The advantage is the token's, as in the equation: when it is one number per sequence, as
    in GRPO, the whole sequence is kept or masked; when it differs by token, tokens with an advantage of 0 or more stay.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that it is compared with [T]; the paper takes the engine's.
        advantages_T: Advantages [T].
        mask_T: As in :func:`mis_weights`, like the others.
        delta: δ, the largest drift allowed (nats per token, ``--opsm-delta``).

    Returns:
        The factors [T]; and ``opsm_clipfrac``, the masked tokens.

    Raises:
        ConfigError: ``delta`` is negative or no number.
    """
    if not delta >= 0:
        raise ConfigError(f"delta {delta} of OPSM must be 0 or more nats per token")
    drift_T = log_ratio(old_log_probs_T, log_probs_T, mask_T)
    (kept_advantages_T,) = masked(mask_T, advantages_T=advantages_T)
    lengths_N = sequence_lengths(lengths, drift_T)
    drifted_T = expand(sequence_mean(drift_T, mask_T, lengths_N, context_group), lengths_N) > delta
    dropped_T = drifted_T & (kept_advantages_T < 0)
    factor_T = _masked((~dropped_T).to(drift_T.dtype), mask_T)
    return factor_T, {"opsm_clipfrac": weighted_sum(dropped_T, mask_T, weights_T)}


def _ratio_at(
    level: str, log_ratio_T: Tensor, mask_T: Tensor, lengths_N: Tensor | int, group: dist.ProcessGroup | None
) -> Tensor:
    match level:
        case "sequence":
            log_ratio_T = expand(sequence_sum(log_ratio_T, lengths_N, group), lengths_N)
        case "geometric":
            log_ratio_T = expand(sequence_mean(log_ratio_T, mask_T, lengths_N, group), lengths_N)
    return bounded_ratio(log_ratio_T)


def _apply_mode(config: MisConfig, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights, and which ratios are below and above the bounds that the mode has."""
    lower, upper = config.bounds
    low_T, high_T = ratio_T < lower, ratio_T > upper
    match config.mis_mode:
        case "truncate":
            return ratio_T.clamp(max=upper), torch.zeros_like(low_T), high_T
        case "clip":
            return ratio_T.clamp(lower, upper), low_T, high_T
        case "mask":
            return ratio_T.masked_fill(low_T | high_T, 0), low_T, high_T
        case _:
            return torch.ones_like(ratio_T), torch.zeros_like(low_T), torch.zeros_like(high_T)


def _scale(weight_sums: Tensor | None) -> Tensor:
    """1 / mean weight; 1 where no weight is left that could be scaled."""
    if weight_sums is None:
        raise ConfigError("--mis-batch-normalize needs the step's weight sums; add up mis_weight_sums and give them")
    weighted, total = weight_sums.unbind()
    return torch.where(weighted > 0, total / weighted.clamp(min=torch.finfo(weighted.dtype).tiny), 1.0)


def _masked(factor_T: Tensor, mask_T: Tensor) -> Tensor:
    return factor_T.masked_fill(mask_T == 0, 0)


def _token_ratio(train_T: Tensor, rollout_T: Tensor, mask_T: Tensor, lower: float, upper: float) -> Tensor:
    if not 0 <= lower <= upper:
        raise ConfigError(f"importance weights between {lower} and {upper}: need 0 ≤ lower ≤ upper")
    return bounded_ratio(log_ratio(train_T, rollout_T, mask_T))


def _bounded(name: str, ratio_T: Tensor, factor_T: Tensor, mask_T: Tensor, weights_T: Tensor) -> tuple[Tensor, Metrics]:
    """The factors, and the metrics of bounding the ratios to them."""
    values = {name: ratio_T, f"{name}_abs": (ratio_T - 1).abs(), f"{name}_clipfrac": factor_T != ratio_T}
    metrics = {name: weighted_sum(value_T, mask_T, weights_T) for name, value_T in values.items()}
    return _masked(factor_T, mask_T), metrics
