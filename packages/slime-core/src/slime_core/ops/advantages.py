"""From rewards to one advantage per response token.

R is the number of response tokens of one response; T tokens of N responses. Where responses are discounted or a critic
takes part: `returns.py` and `gae.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_core.errors import ConfigError, DataError
from slime_core.ops.kl import kl_penalty
from slime_core.ops.ragged import expand, lengths_tensor
from slime_core.ops.returns import check_rewards, kl_penalties
from slime_core.ops.scan import check_finite, check_tokens


def grpo_advantages(
    reward: float,
    response_length: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Every token of a response has the response's group-relative reward (GRPO; Shao et al. 2024, section 4.1.2).

    Args:
        reward: The reward after :func:`slime_core.rewards.normalize_group_rewards`.
        response_length: R, 0 or more.
        dtype: Type of the result.
        device: Device of the result.

    Returns:
        Advantages [R].

    Raises:
        DataError: ``response_length`` is negative.
    """
    if response_length < 0:
        raise DataError(f"response_length {response_length} is negative; give the number of response tokens")
    return torch.full((response_length,), reward, dtype=dtype, device=device)


@torch.no_grad()
def outcome_advantages(
    *,
    rewards_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """``A_t = r − kl_coef · KL_t``: the response's reward at each of its tokens, less the token's own KL penalty.

    Advantages of grpo (Shao et al. 2024, section 4.1.2), gspo (Zheng et al. 2025, equation 6), cispo (MiniMax 2025,
    equation 2), rloo (Ahmadian et al. 2024, section 2.3) and reinforce_plus_plus_baseline (Hu et al. 2025, version 9,
    equation 6). They differ in how r comes from the rewards of a group: see
    :func:`slime_core.rewards.estimator_rewards`. The penalty stays at its token and counts in units of the normalised
    reward; none of these papers has it there. They put the KL divergence into the loss or leave it out, except RLOO,
    which takes it off the reward of the whole response.

    Args:
        rewards_N: One reward per response, after group normalisation [N].
        mask_T: 1 where a token is trained on, else 0 [T].
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed.
        kl_T: Estimates of KL(policy ‖ reference), nats [T], from :func:`slime_core.ops.kl_penalty` on the log-probs
            from before the update. What is masked may be anything, NaN too.
        kl_coef: Coefficient of the KL penalty. At 0, ``kl_T`` is not looked at.

    Returns:
        Advantages [T], 0 where masked, without gradient; in the rewards' type or, below that, float32.

    Raises:
        ConfigError: ``kl_coef`` is not finite, or not 0 with no ``kl_T``.
        DataError: The shapes do not fit, or a number that counts is not finite.
    """
    check_tokens(len(mask_T), mask_T=mask_T)
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    check_rewards(rewards_N, lengths_N)
    outcome_T = expand(rewards_N.detach().double(), lengths_N).masked_fill_(mask_T == 0, 0)
    outcome_T += kl_penalties(mask_T, kl_T, kl_coef)
    return outcome_T.to(torch.promote_types(rewards_N.dtype, torch.float32))


@torch.no_grad()
def distilled_advantages(
    *, advantages_T: Tensor, student_log_probs_T: Tensor, teacher_log_probs_T: Tensor, mask_T: Tensor, coef: float
) -> Tensor:
    """``A_t − coef · (log π_student − log π_teacher)``: on-policy distillation, added to any advantages.

    The added term is the negative reverse KL per token as a reward (on-policy distillation of Agarwal et al. 2024;
    Lu and Thinking Machines Lab 2025). With advantages of 0 it is distillation alone. Add it before whitening.

    Args:
        advantages_T: From any estimator [T].
        student_log_probs_T: Log-probs (nats) of the sampled tokens under the policy from before the update [T].
        teacher_log_probs_T: Those under the teacher [T].
        mask_T: 1 where a token is trained on, else 0 [T]. What is masked may be anything, NaN too.
        coef: Weight of the term.

    Returns:
        Advantages [T], 0 where masked, without gradient; in their type or, below that, float32.

    Raises:
        ConfigError: ``coef`` is not finite.
        DataError: The shapes differ, or a number is not finite where the mask is 1.
    """
    if not math.isfinite(coef):
        raise ConfigError(f"the coefficient of on-policy distillation, {coef}, must be a finite number")
    check_tokens(
        len(mask_T),
        mask_T=mask_T,
        advantages_T=advantages_T,
        student_log_probs_T=student_log_probs_T,
        teacher_log_probs_T=teacher_log_probs_T,
    )
    masked_T = mask_T == 0
    divergence_T = kl_penalty(student_log_probs_T.double(), teacher_log_probs_T.double(), "k1")
    divergence_T = divergence_T.masked_fill(masked_T, 0)
    check_finite("student_log_probs_T - teacher_log_probs_T", divergence_T)
    result_T = advantages_T.detach().double().masked_fill(masked_T, 0)
    check_finite("advantages_T", result_T)
    result_T = result_T.sub_(divergence_T, alpha=coef)
    return result_T.to(torch.promote_types(advantages_T.dtype, torch.float32))
