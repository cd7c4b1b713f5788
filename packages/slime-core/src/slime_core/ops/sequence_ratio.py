"""Ratios of whole sequences. T tokens of N sequences, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from slime_core.ops.masking import masked
from slime_core.ops.ragged import expand, lengths_tensor, sequence_mean


def sequence_log_ratio(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    *,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """log s of each sequence: the mean over its unmasked tokens of log π − log π_old.

    s is the ratio of the sequences' likelihoods with its length-th root taken, GSPO's importance ratio (Zheng et al.
    2025, equation 7).

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that s compares with [T]; taken as constants.
        mask_T: 0 where a token does not count [T]; there the log-probs may be anything, NaN too.
        lengths: Tokens of each sequence, N numbers that add up to T; 0 is allowed.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Returns:
        log s in nats per token [N], with gradient to ``log_probs_T``; 0 for a sequence without an unmasked token.

    Raises:
        DataError: The shapes or the lengths do not match.
    """
    new_T, old_T = masked(mask_T, log_probs_T=log_probs_T, old_log_probs_T=old_log_probs_T)
    lengths_N = lengths_tensor(lengths, len(new_T), new_T.device)
    return sequence_mean(new_T - old_T.detach(), mask_T != 0, lengths_N, context_group)


def gspo_log_ratio(
    log_probs_T: Tensor,
    old_log_probs_T: Tensor,
    *,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    token_form: bool = False,
    context_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The log of GSPO's ratio at every token: one value per sequence, in one of two forms that differ in the gradient.

    - Sequence form: log s, whose gradient goes to all unmasked tokens of the sequence, 1/|y| to each (Zheng et al.
      2025, equations 5 and 7).
    - Token form: ``sg[log s] + log π − sg[log π]`` (sg: no gradient), whose gradient goes to the token itself
      (GSPO-token, equation 14).

    Under weights and advantages that are equal over a sequence's unmasked tokens the two give the same loss and the
    same gradient. Where advantages differ from token to token, the token form lets each token learn from its own.

    Args:
        log_probs_T: Log-probs (nats) under the policy being trained [T].
        old_log_probs_T: Log-probs under the policy that the ratio compares with [T]; taken as constants.
        mask_T: 0 where a token does not count [T]; there the log-probs may be anything, NaN too.
        lengths: Tokens of each sequence, N numbers that add up to T; 0 is allowed.
        token_form: Which of the two.
        context_group: Ranks that hold the other tokens of the same N sequences (context parallelism); every one of them
            must call this. ``None`` if sequences are here whole.

    Returns:
        Log-ratios [T], those of masked tokens included: they too have their sequence's value.

    Raises:
        DataError: The shapes or the lengths do not match.
    """
    log_ratio_N = sequence_log_ratio(
        log_probs_T, old_log_probs_T, mask_T=mask_T, lengths=lengths, context_group=context_group
    )
    log_ratio_T = expand(log_ratio_N, lengths_tensor(lengths, len(log_probs_T), log_ratio_N.device))
    if not token_form:
        return log_ratio_T
    (new_T,) = masked(mask_T, log_probs_T=log_probs_T)
    return log_ratio_T.detach() + (new_T - new_T.detach())
