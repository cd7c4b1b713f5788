"""The whole loss of a policy step, put together as an `AlgorithmConfig` says. T tokens of N responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.ops.aggregate import token_weights, token_weights_by_constant, token_weights_per_trajectory
from slime_core.ops.kl import kl_penalty
from slime_core.ops.losses import cispo_loss, gspo_loss, policy_loss
from slime_core.ops.masking import masked
from slime_core.ops.needed import needed, needed_lengths
from slime_core.ops.off_policy import correction_factors


def loss_weights(
    config: AlgorithmConfig,
    loss_masks: Sequence[Sequence[int] | Tensor],
    *,
    trajectory_tokens: Sequence[int],
    global_trajectories: int,
    global_tokens: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The tokens' weights in the loss of a step, which is then a plain sum over micro-batches and ranks.

    The mean over trajectories of each trajectory's mean over its trained tokens; with ``calculate_per_token_loss`` the
    mean over all trained tokens of the step; with a ``loss_divisor`` the mean over trajectories of each one's sum
    divided by that constant. See :mod:`slime_core.ops.aggregate`.

    Args:
        config: Which of the three.
        loss_masks: Per sample, R numbers that are 1 where the token is trained on.
        trajectory_tokens: Per sample, the trained tokens of its whole trajectory.
        global_trajectories: Trajectories in the step over all ranks.
        global_tokens: Trained tokens in the step over all ranks.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Weights [T], T being the length of all masks together.

    Raises:
        DataError: ``global_trajectories`` is below 1, or there are not as many ``trajectory_tokens`` as masks.
    """
    if config.calculate_per_token_loss:
        return token_weights(
            loss_masks,
            global_samples=global_trajectories,
            global_tokens=global_tokens,
            per_token=True,
            dtype=dtype,
            device=device,
        )
    if config.loss_divisor is not None:
        return token_weights_by_constant(
            loss_masks, divisor=config.loss_divisor, global_samples=global_trajectories, dtype=dtype, device=device
        )
    return token_weights_per_trajectory(
        loss_masks, trajectory_tokens, global_trajectories=global_trajectories, dtype=dtype, device=device
    )


def policy_objective(
    config: AlgorithmConfig,
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    ref_log_probs_T: Tensor | None = None,
    rollout_log_probs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    mis_sums: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss − entropy_coef · entropy + kl_loss_coef · KL, each summed under the tokens' weights.

    The policy loss is that of ``advantage_estimator``: :func:`slime_core.ops.gspo_loss` for gspo,
    :func:`slime_core.ops.cispo_loss` for cispo, :func:`slime_core.ops.policy_loss` for the others. Off-policy
    corrections multiply it token by token; they leave the KL and the entropy alone.

    Args:
        config: Clip ranges, coefficients, the KL estimator, off-policy corrections.
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs that the ratio compares with [T]; for the corrections, those under the policy that
            the update starts from.
        advantages_T: Advantages [T].
        weights_T: From :func:`loss_weights` [T]. Where a weight is 0, the other tensors may hold anything, NaN too.
        lengths: Tokens of each response, N numbers that add up to T. Needed by gspo, MIS and OPSM, which look at whole
            responses.
        ref_log_probs_T: Log-probs under the reference [T]; needed with ``use_kl_loss``.
        rollout_log_probs_T: The engine's log-probs [T]; needed with ``use_tis`` and ``use_mis``. OPSM compares with
            these where they are given, else with ``old_log_probs_T``.
        entropy_T: Entropies (nats) [T]; needed with an ``entropy_coef``, else only a metric.
        mis_sums: :func:`slime_core.ops.mis_weight_sums` over the step [2]; needed with ``mis_batch_normalize``.
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
    masked(None, log_probs_T=log_probs_T.detach(), weights_T=weights_T)  # an error that names the weights as such
    token_loss_T, clipped_T = _policy_loss(
        config, log_probs_T, old_log_probs_T, advantages_T, weights_T, lengths, context_group
    )
    old_T, new_T = masked(weights_T, old_log_probs_T=old_log_probs_T, log_probs_T=log_probs_T.detach())
    metrics = {"pg_clipfrac": (clipped_T * weights_T).sum(), "ppo_kl": ((old_T - new_T) * weights_T).sum()}
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
    if factor_T is not None:
        token_loss_T = token_loss_T * factor_T
    loss = metrics["pg_loss"] = (token_loss_T * weights_T).sum()
    if entropy_T is not None:
        (kept_T,) = masked(weights_T, entropy_T=entropy_T)
        metrics["entropy_loss"] = (kept_T * weights_T).sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * metrics["entropy_loss"]
    elif config.entropy_coef:
        raise ConfigError(f"--entropy-coef {config.entropy_coef} needs entropies, and none were given")
    if config.use_kl_loss:
        ref_T = needed(ref_log_probs_T, "--use-kl-loss", "the reference's log-probs").detach()
        kind, sampled_T = config.kl_loss_type or "k3", old_log_probs_T if config.use_unbiased_kl else None
        kl_T = kl_penalty(log_probs_T, ref_T, kind, old_log_probs_T=sampled_T, mask_T=weights_T)
        metrics["kl_loss"] = (kl_T * weights_T).sum()
        loss = loss + config.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach() for name, value in {"loss": loss, **metrics, **found}.items()}


def _policy_loss(
    config: AlgorithmConfig,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    lengths: Sequence[int] | Tensor | None,
    context_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    given = (log_probs_T, old_log_probs_T, advantages_T, config.eps_clip, config.clip_high)
    match config.advantage_estimator:
        case "gspo":
            # Advantages that differ within a response (a KL penalty, distillation) need the form for tokens.
            return gspo_loss(
                *given,
                mask_T=weights_T,
                lengths=needed_lengths(lengths, "--advantage-estimator gspo"),
                token_form=config.advantages_need_log_probs or config.custom_advantage_function_path is not None,
                eps_clip_c=config.eps_clip_c,
                context_group=context_group,
            )
        case "cispo":
            return cispo_loss(*given, mask_T=weights_T)
        case _:
            return policy_loss(*given, mask_T=weights_T, eps_clip_c=config.eps_clip_c)
