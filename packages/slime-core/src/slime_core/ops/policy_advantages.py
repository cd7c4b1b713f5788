"""Advantages as an `AlgorithmConfig` says. T tokens of N responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from slime_core.config import AlgorithmConfig
from slime_core.ops.estimators import (
    AdvantageEstimator,
    AdvantageInputs,
    Advantages,
    Distillation,
    compute_advantages,
    estimator_named,
)
from slime_core.ops.kl import kl_penalty
from slime_core.ops.needed import needed
from slime_core.ops.ragged import lengths_tensor


def policy_advantages(
    config: AlgorithmConfig,
    *,
    rewards_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    old_log_probs_T: Tensor | None = None,
    ref_log_probs_T: Tensor | None = None,
    teacher_log_probs_T: Tensor | None = None,
    values_T: Tensor | None = None,
    estimator: AdvantageEstimator | None = None,
    group: dist.ProcessGroup | None = None,
) -> Advantages:
    """Advantages and returns of a rank's responses: :func:`slime_core.ops.compute_advantages` by configuration.

    Args:
        config: The estimator and its factors, the KL penalty, distillation, whitening.
        rewards_N: From :func:`slime_core.rewards.estimator_rewards` [N].
        mask_T: 1 where a token is trained on, else 0 [T]; elsewhere the other tensors may hold anything, NaN too.
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed.
        old_log_probs_T: Log-probs (nats) from before the update [T]; needed with ``kl_coef`` and ``use_opd``.
        ref_log_probs_T: Log-probs under the reference [T]; needed with ``kl_coef``.
        teacher_log_probs_T: Log-probs under the teacher [T]; needed with ``use_opd``.
        values_T: The critic's values [T]; needed by ppo.
        estimator: One's own, instead of the one that the configuration names.
        group: Ranks to whiten over, every one of which must call this, with no responses too; see
            :func:`slime_core.ops.whiten`.

    Returns:
        Advantages and returns, each [T], 0 where masked.

    Raises:
        ConfigError: The configuration needs an input that is missing.
        DataError: The shapes do not fit, or a number that counts is not finite.
    """
    kl_T = distillation = None
    if config.kl_coef:
        old_T = needed(old_log_probs_T, "--kl-coef", "the log-probs from before the update")
        ref_T = needed(ref_log_probs_T, "--kl-coef", "the reference's log-probs")
        kl_T = kl_penalty(old_T.detach(), ref_T.detach(), config.kl_loss_type or "k1")
    if config.use_opd:
        distillation = Distillation(
            student_log_probs_T=needed(old_log_probs_T, "--use-opd", "the log-probs from before the update"),
            teacher_log_probs_T=needed(teacher_log_probs_T, "--use-opd", "the teacher's log-probs"),
            coef=config.opd_kl_coef,
        )
    return compute_advantages(
        AdvantageInputs(
            rewards_N=rewards_N,
            mask_T=mask_T,
            lengths_N=lengths_tensor(lengths, len(mask_T), mask_T.device),
            kl_T=kl_T,
            kl_coef=config.kl_coef,
            values_T=values_T,
        ),
        estimator or estimator_named(config.advantage_estimator, gamma=config.gamma, lambd=config.lambd),
        distillation=distillation,
        whitened=config.normalize_advantages,
        group=group,
    )
