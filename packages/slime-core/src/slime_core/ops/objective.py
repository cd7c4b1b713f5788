"""The whole loss of a policy step, put together as an `AlgorithmConfig` says. T tokens."""

from __future__ import annotations

from torch import Tensor

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.ops.kl import kl_penalty
from slime_core.ops.losses import policy_loss


def policy_objective(
    config: AlgorithmConfig,
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    ref_log_probs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss − entropy_coef · entropy + kl_loss_coef · KL, each summed under the tokens' weights.

    Args:
        config: Clip ranges, coefficients and the KL estimator.
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs that the ratio compares with [T].
        advantages_T: Advantages [T].
        weights_T: From :func:`slime_core.ops.token_weights` [T].
        ref_log_probs_T: Log-probs under the reference [T]; needed with ``use_kl_loss``.
        entropy_T: Entropies (nats) [T]; needed with an ``entropy_coef``, else only a metric.

    Returns:
        The scalar loss, and detached scalars by name: ``loss``, ``pg_loss``, ``pg_clipfrac``, ``ppo_kl``, and
        ``entropy_loss`` and ``kl_loss`` where given. All of them add up over micro-batches and ranks.

    Raises:
        ConfigError: The configuration needs an input that is missing.
    """
    token_loss_T, clipped_T = policy_loss(log_probs_T, old_log_probs_T, advantages_T, config.eps_clip, config.clip_high)
    loss = pg_loss = (token_loss_T * weights_T).sum()
    metrics = {
        "pg_loss": pg_loss,
        "pg_clipfrac": (clipped_T * weights_T).sum(),
        "ppo_kl": ((old_log_probs_T - log_probs_T) * weights_T).sum(),
    }
    if entropy_T is not None:
        metrics["entropy_loss"] = (entropy_T * weights_T).sum()
        if config.entropy_coef:
            loss = loss - config.entropy_coef * metrics["entropy_loss"]
    elif config.entropy_coef:
        raise ConfigError(f"--entropy-coef {config.entropy_coef} needs entropies, and none were given")
    if config.use_kl_loss:
        if ref_log_probs_T is None:
            raise ConfigError("--use-kl-loss needs the reference's log-probs, and none were given")
        kl_T = kl_penalty(log_probs_T, ref_log_probs_T.detach(), config.kl_loss_type)
        metrics["kl_loss"] = (kl_T * weights_T).sum()
        loss = loss + config.kl_loss_coef * metrics["kl_loss"]
    return loss, {name: value.detach() for name, value in {"loss": loss, **metrics}.items()}
