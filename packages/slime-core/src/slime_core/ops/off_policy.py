"""Off-policy corrections as an `AlgorithmConfig` says. T tokens of N responses."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from slime_core.off_policy_config import OffPolicyConfig
from slime_core.ops.corrections import Metrics, icepop_weights, mis_weights, opsm_mask, tis_weights
from slime_core.ops.needed import needed, needed_lengths


def correction_factors(
    config: OffPolicyConfig,
    *,
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    lengths: Sequence[int] | Tensor | None = None,
    rollout_log_probs_T: Tensor | None = None,
    mis_sums: Tensor | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor | None, Metrics]:
    """What the policy loss of each token is multiplied by: TIS, IcePop or MIS, and OPSM. Constants.

    Args:
        config: Which of them.
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that the update starts from [T].
        advantages_T: Advantages [T].
        weights_T: From :func:`slime_core.ops.loss_weights` [T]; 0 where a token is not trained on.
        lengths: Tokens of each response, N numbers that add up to T; needed by MIS and OPSM.
        rollout_log_probs_T: The engine's log-probs [T]; needed by TIS, IcePop and MIS. OPSM compares with these where
            they are given, else with ``old_log_probs_T``.
        mis_sums: :func:`slime_core.ops.mis_weight_sums` over the step [2]; needed with ``mis_batch_normalize``.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Returns:
        The factors [T], ``None`` without a correction; and the corrections' metrics, which add up over micro-batches
        and ranks.

    Raises:
        ConfigError: The configuration needs an input that is missing.
        DataError: The shapes or the lengths do not match.
    """
    factor_T: Tensor | None = None
    metrics: Metrics = {}
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
            advantages_T=advantages_T,
            mask_T=mask_T,
            weights_T=weights_T,
            lengths=needed_lengths(lengths, "--use-opsm"),
            delta=config.opsm_delta,
            context_group=context_group,
        )
        factor_T, metrics = kept_T if factor_T is None else factor_T * kept_T, metrics | found
    return factor_T, metrics
