"""The loss of an optimizer step: token weights, and the losses summed under them. T tokens of N responses.

Weights carry the denominators of the whole step, so a step's loss is a plain sum over its tokens, micro-batches and
ranks, and splitting the step differently changes nothing. Where a weight is 0, other tensors may hold anything,
NaN too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.ops.off_policy import correction_factors, per_token
from slime_core.ops.token_losses import cispo_token_loss, clipped_surrogate, gspo_log_ratio, kl_penalty, value_loss
from slime_core.ops.tokens import (
    Lengths,
    check_shapes,
    masked,
    needed,
    needed_lengths,
    sequence_lengths,
    sequence_sum,
    total,
    weighable,
    weighted_sequences,
    widen,
)
from slime_core.user_functions import load_function

Masks = Sequence[Sequence[int] | Tensor]


def policy_objective(
    config: AlgorithmConfig,
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    lengths: Lengths | None = None,
    ref_log_probs_T: Tensor | None = None,
    rollout_log_probs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    mis_sums: Tensor | None = None,
    pg_weights_T: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss − entropy_coef · entropy + kl_loss_coef · KL, each summed under the tokens' weights.

    The policy loss is that of ``advantage_estimator``: :func:`slime_core.ops.gspo_token_loss` for gspo,
    :func:`slime_core.ops.cispo_token_loss` for cispo, :func:`slime_core.ops.policy_token_loss` for the others.
    Off-policy corrections multiply it token by token; they leave the KL and the entropy alone.

    Args:
        config: Clip ranges, coefficients, the KL estimator, off-policy corrections.
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs that the ratio compares with [T], and under the policy that the update starts from.
        advantages_T: Advantages [T], or one per response [N] if ``lengths`` are given.
        weights_T: From :func:`loss_weights` [T].
        lengths: Tokens of each response, N numbers that add up to T, or one that all have. Needed by gspo, MIS and
            OPSM, which look at whole responses.
        ref_log_probs_T: Log-probs under the reference [T]; needed with ``use_kl_loss``.
        rollout_log_probs_T: The engine's log-probs [T]; needed with ``use_tis`` and ``use_mis``, and with
            ``use_rollout_logprobs``, which takes them in place of ``old_log_probs_T``. OPSM compares with these where
            they are given, else with ``old_log_probs_T``.
        entropy_T: Entropies (nats) [T]; needed with an ``entropy_coef``, else only a metric.
        mis_sums: :func:`slime_core.ops.mis_weight_sums` over the step [2]; needed with ``mis_batch_normalize``.
        pg_weights_T: From :func:`reducer_weights` [T], in place of ``weights_T`` for the policy loss alone.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Returns:
        The scalar loss, and detached scalars by name: ``loss``, ``pg_loss``, ``pg_clipfrac``, ``ppo_kl``,
        ``entropy_loss`` and ``kl_loss`` where given, and those of the corrections. All of them add up over
        micro-batches and ranks.

    Raises:
        ConfigError: The configuration needs an input that is missing.
        DataError: The shapes or the lengths do not match.
    """
    check_shapes(log_probs_T=log_probs_T, weights_T=weights_T)
    if config.use_rollout_logprobs:
        old_log_probs_T = needed(rollout_log_probs_T, "--use-rollout-logprobs", "the engine's log-probs")
    factor_T, found = correction_factors(
        config,
        log_probs_T=log_probs_T,
        old_log_probs_T=old_log_probs_T,
        advantages_T=advantages_T,
        weights_T=weights_T,
        lengths=lengths,
        rollout_log_probs_T=rollout_log_probs_T,
        mis_sums=mis_sums,
        context_group=context_group,
    )
    summed_T = weights_T if pg_weights_T is None else pg_weights_T
    counted_T = summed_T if factor_T is None else factor_T * summed_T
    given = (log_probs_T, old_log_probs_T.detach(), advantages_T.detach())
    loss, metrics = _policy_loss(config, *given, weights_T, counted_T, lengths, context_group)
    if entropy_T is not None:
        (kept_T,) = weighable(weights_T, entropy_T=entropy_T)
        metrics["entropy_loss"] = (kept_T * weights_T).sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * metrics["entropy_loss"]
    elif config.entropy_coef:
        raise ConfigError(f"--entropy-coef {config.entropy_coef} needs entropies, and none were given")
    if config.use_kl_loss:
        kl_T = _kl(config, log_probs_T, old_log_probs_T, ref_log_probs_T, weights_T)
        metrics["kl_loss"] = (kl_T * weights_T).sum()
        loss = loss + config.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach() for name, value in {"loss": loss, **metrics, **found}.items()}


def _kl(config: AlgorithmConfig, new_T: Tensor, old_T: Tensor, ref_T: Tensor | None, weights_T: Tensor) -> Tensor:
    """The KL loss of each token, before its coefficient [T]."""
    ref_T = needed(ref_T, "--use-kl-loss", "the reference's log-probs").detach()
    new_T, ref_T = weighable(weights_T, log_probs_T=new_T, ref_log_probs_T=ref_T)
    sampled_T = None
    if config.use_unbiased_kl:
        (sampled_T,) = weighable(weights_T, old_log_probs_T=old_T)
    return kl_penalty(new_T, ref_T, config.kl_loss_type or "k3", old_log_probs_T=sampled_T)


def _policy_loss(
    config: AlgorithmConfig,
    new_T: Tensor,
    old_T: Tensor,
    advantages_X: Tensor,
    weights_T: Tensor,
    counted_T: Tensor,
    lengths: Lengths | None,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy's loss under ``counted_T``, and its metrics under ``weights_T``."""
    check_shapes(log_probs_T=new_T, old_log_probs_T=old_T, weights_T=weights_T)
    log_ratio_X = widen(new_T) - widen(old_T)
    counted_X, weights_X = counted_T, weights_T
    # Advantages that differ within a response (a KL penalty, distillation) need GSPO's form for tokens.
    token_form = config.advantages_need_log_probs or config.custom_advantage_function_path is not None
    estimator, asks = config.estimator, f"--advantage-estimator {config.advantage_estimator}"
    if estimator.sequence_ratio and not token_form and advantages_X.shape != weights_T.shape:
        # Weights are equal within a response, so that the mean under them is the plain one.
        lengths_N = sequence_lengths(needed_lengths(lengths, asks), new_T)
        log_ratio_X, weights_X = weighted_sequences(log_ratio_X, weights_T, lengths_N, group)
        counted_X = weights_X if counted_T is weights_T else sequence_sum(counted_T, lengths_N)
        advantages_X = widen(advantages_X)
        metrics = {"ppo_kl": -total(log_ratio_X, weights_X)}
    else:
        (log_ratio_X,) = weighable(weights_T, log_ratio_T=log_ratio_X)
        metrics = {"ppo_kl": -total(log_ratio_X, weights_T)}
        (advantages_X,) = weighable(weights_T, advantages_T=per_token(advantages_X, weights_T, lengths))
        if estimator.sequence_ratio:
            log_ratio_X = gspo_log_ratio(
                new_T,
                old_T,
                mask_T=weights_T,
                lengths=needed_lengths(lengths, asks),
                token_form=token_form,
                context_group=group,
            )
    given = _Tokens(new_T, old_T, log_ratio_X, advantages_X, weights_T)
    loss_X, clipped_X = TOKEN_LOSSES[estimator.token_loss](config, given)
    metrics |= {"pg_loss": (loss_X * counted_X).sum(), "pg_clipfrac": total(clipped_X, weights_X)}
    return metrics["pg_loss"], metrics


class _Tokens(NamedTuple):
    """Inputs of the token losses. X is N, a number per response, where a response has one ratio, else T."""

    log_probs_T: Tensor
    old_log_probs_T: Tensor
    log_ratio_X: Tensor
    advantages_X: Tensor
    weights_T: Tensor


def _clipped_ratio(config: AlgorithmConfig, given: _Tokens) -> tuple[Tensor, Tensor]:
    """:func:`slime_core.ops.policy_token_loss`, or of one ratio per response."""
    bounds = (config.eps_clip, config.clip_high, config.eps_clip_c)
    return clipped_surrogate(given.log_ratio_X, given.advantages_X, *bounds)


def _clipped_weight(config: AlgorithmConfig, given: _Tokens) -> tuple[Tensor, Tensor]:
    """:func:`slime_core.ops.cispo_token_loss`."""
    log_probs = {"log_probs_T": given.log_probs_T, "old_log_probs_T": given.old_log_probs_T}
    new_T, old_T = weighable(given.weights_T, **log_probs)
    return cispo_token_loss(new_T, old_T, given.advantages_X, config.eps_clip, config.clip_high)


TOKEN_LOSSES = {"clipped_ratio": _clipped_ratio, "clipped_weight": _clipped_weight}
"""The functions that :class:`slime_core.algorithms.EstimatorType` names: the losses [X], and where a clip decides."""


def value_objective(
    *, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, value_clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's loss of a step: :func:`slime_core.ops.value_loss` summed under the tokens' weights.

    Returns:
        The scalar loss, and the detached scalars ``value_loss`` and ``value_clipfrac`` (the weighted share of tokens
        without gradient because of the clip). Both add up over micro-batches and ranks.
    """
    loss_T, clipped_T = value_loss(values_T, old_values_T, returns_T, value_clip, mask_T=weights_T)
    loss = (loss_T * weights_T).sum()
    return loss, {"value_loss": loss.detach(), "value_clipfrac": (clipped_T * weights_T).sum().detach()}


def sft_objective(log_probs_T: Tensor, weights_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy of the demonstrated tokens: ``−Σ w log π`` (Ouyang et al. 2022, section 3.5, the SFT model).

    Under :func:`token_weights` with ``per_token`` it is the mean negative log-likelihood of the step's trained tokens.
    Returns the scalar loss in nats, and the detached scalar ``loss``; it adds up over micro-batches and ranks.
    """
    (log_probs_T,) = masked(weights_T, log_probs_T=log_probs_T)
    loss = -(log_probs_T * weights_T).sum()
    return loss, {"loss": loss.detach()}


def loss_weights(
    config: AlgorithmConfig,
    loss_masks: Masks,
    *,
    trajectory_tokens: Sequence[int],
    global_trajectories: int,
    global_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """:func:`token_weights` by configuration: per trajectory, per token, or by the ``loss_divisor`` [T]."""
    return token_weights(
        loss_masks,
        global_samples=global_trajectories,
        global_tokens=global_tokens,
        per_token=config.calculate_per_token_loss,
        trajectory_tokens=trajectory_tokens,
        divisor=config.loss_divisor,
        dtype=dtype,
        device=device,
    )


def reducer_weights(
    config: AlgorithmConfig, mask_T: Tensor, lengths: Lengths, *, global_trajectories: int, global_tokens: int
) -> Tensor | None:
    """The weights under which ``--custom-pg-loss-reducer-function-path`` sums the policy loss [T]; ``None`` without it.

    The function has the upstream system's form. It is called with the responses' ``total_lengths`` and
    ``response_lengths`` (numbers, here the same), their loss masks (tensors) and whether the loss is per token, and
    returns what makes one number of the losses of all tokens [T]. That is divided as the mean over samples is, by the
    step's trajectories, or by its tokens. The weights are its gradient, so that corrections, micro-batches and ranks do
    not change the result. It is called for each micro-batch, without responses that add nothing to the loss, and so has
    to treat every response by itself.

    Raises:
        ConfigError: It cannot be used.
        DataError: It returned something other than a weighted sum over the tokens.
    """
    path, flag = config.custom_pg_loss_reducer_function_path, "--custom-pg-loss-reducer-function-path"
    if path is None:
        return None
    count = sequence_lengths(lengths, mask_T)
    own_N = [count] * (len(mask_T) // count) if isinstance(count, int) else [int(one) for one in count]
    masks = list(torch.split((mask_T != 0).to(torch.promote_types(mask_T.dtype, torch.float32)), own_N))
    reduce = load_function(path, flag)(list(own_N), list(own_N), masks, config.calculate_per_token_loss)
    if not callable(reduce):
        raise DataError(
            f"{flag} {path} returned {type(reduce).__name__}; return a function from losses [T] to a number"
        )
    with torch.enable_grad():
        ones_T = torch.ones(len(mask_T), dtype=torch.float64, device=mask_T.device, requires_grad=True)
        total = torch.as_tensor(reduce(ones_T))
        if total.dim() or not total.requires_grad:
            raise DataError(f"{flag} {path}: its function must return one number, computed from the losses [T]")
        (weights_T,) = torch.autograd.grad(total, ones_T)
    others_T = torch.arange(len(mask_T), dtype=torch.float64, device=mask_T.device) % 7 - 2
    for losses_T in (ones_T.detach(), others_T):
        expected = (weights_T * losses_T).sum()
        if not torch.allclose(torch.as_tensor(reduce(losses_T)).double(), expected, rtol=1e-4, atol=1e-6):
            raise DataError(f"{flag} {path}: its function is not a weighted sum of the losses; return one")
    denominator = max(global_tokens if config.calculate_per_token_loss else global_trajectories, 1)
    return (weights_T * torch.cat(masks) / denominator).to(mask_T.dtype)


def token_weights(
    loss_masks: Masks,
    *,
    global_samples: int,
    global_tokens: int,
    per_token: bool = False,
    trajectory_tokens: Sequence[int] | None = None,
    divisor: float | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Weights [T] under which a step's loss is a mean, computed from the loss masks m.

    - Per sample: ``m / max(Σ m, 1) / global_samples``, the sum running over the token's own sample: the mean over
      samples of each sample's mean over its trained tokens (GRPO; Shao et al. 2024, equation 3).
    - Per trajectory, with ``trajectory_tokens`` D: ``m / max(D, 1) / global_samples``. An interaction that was cut into
      several samples (by sub-agents or a rewritten context) weighs as much as one that was not, and its samples may lie
      in different micro-batches and on different ranks.
    - By a constant, the ``divisor``: ``m / divisor / global_samples``. Dr.GRPO (Liu et al. 2025, section 3.2 and
      listing 1): a mean over the sample's tokens favours short right answers and long wrong ones. The paper takes the
      largest response length. With 1 a sample counts with the sum over its tokens, as in RLOO (Ahmadian et al. 2024).
    - Per token: ``m / max(global_tokens, 1)``: the mean over all trained tokens of the step. DAPO (Yu et al. 2025,
      equation 8) and CISPO (MiniMax 2025, equation 4) write it over the tokens of one prompt's group, and the mean over
      prompts; here, as in public trainers, it is over the step, so that long groups weigh more.

    Args:
        loss_masks: Per sample, R numbers that are 1 where the token is trained on.
        global_samples: Samples in the step over all ranks; trajectories, where these are counted.
        global_tokens: Trained tokens in the step over all ranks. Used only with ``per_token``.
        per_token: Take the mean per token, whatever else is given.
        trajectory_tokens: Per sample, the trained tokens of its trajectory, from :func:`trajectory_tokens`.
        divisor: A number of tokens above 0, which goes before ``trajectory_tokens``.
        dtype: Type of the result.
        device: Device of the result.

    Raises:
        DataError: ``global_samples`` is below 1, the divisor is not a finite number above 0, or there are not as many
            ``trajectory_tokens`` as masks.
    """
    if global_samples < 1:
        raise DataError(f"global_samples {global_samples} must be 1 or more: those of the step over all ranks")
    # In fp32 or better: bf16 counts tokens to 256 and no further.
    wide = torch.promote_types(dtype, torch.float32)
    masks = [torch.as_tensor(mask, dtype=wide, device=device) for mask in loss_masks]
    denominators: Iterable[float | Tensor]
    if per_token:
        denominators = repeat(max(global_tokens, 1), len(masks))
    elif divisor is not None:
        if not 0 < divisor < math.inf:
            raise DataError(f"divisor {divisor} must be a finite number of tokens above 0")
        denominators = repeat(divisor * global_samples, len(masks))
    elif trajectory_tokens is not None:
        if len(masks) != len(trajectory_tokens):
            raise DataError(f"{len(masks)} loss masks and {len(trajectory_tokens)} token counts; give one per sample")
        denominators = [max(count, 1) * global_samples for count in trajectory_tokens]
    else:
        denominators = [mask.sum().clamp(min=1) * global_samples for mask in masks]
    parts = [mask / denominator for mask, denominator in zip(masks, denominators, strict=True)]
    return torch.cat(parts).to(dtype) if parts else torch.zeros(0, dtype=dtype, device=device)


def trajectory_tokens(loss_masks: Masks, trajectory_ids: Sequence[int] | Tensor) -> list[int]:
    """Per sample, the trained tokens of its whole trajectory: Σ m over all samples with the same trajectory id.

    Give the masks of all samples of all trajectories, before they are split over micro-batches and ranks.
    """
    if len(loss_masks) != len(trajectory_ids):
        raise DataError(f"{len(loss_masks)} loss masks and {len(trajectory_ids)} trajectory ids; give one per sample")
    ids = [int(trajectory) for trajectory in trajectory_ids]  # a tensor's elements hash by identity
    totals: dict[int, int] = {}
    for mask, trajectory in zip(loss_masks, ids, strict=True):
        totals[trajectory] = totals.get(trajectory, 0) + int(torch.as_tensor(mask).sum())
    return [totals[trajectory] for trajectory in ids]
