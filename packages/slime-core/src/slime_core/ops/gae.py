"""Generalised advantage estimation. T tokens of N responses, K of them trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_core.ops.ragged import lengths_tensor
from slime_core.ops.returns import check_factor
from slime_core.ops.scan import Trained, add_following, blocks, check_tokens, reverse_scan_


@torch.no_grad()
def gae_advantages(
    *,
    rewards_T: Tensor,
    values_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    gamma: float = 1.0,
    lambd: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of PPO (Schulman et al. 2016, equation 16).

    ``δ_t = r_t + γ V_{t+1} − V_t``, with V = 0 behind the end; ``A_t = δ_t + γλ A_{t+1}``; return ``A_t + V_t``. The
    step from t to t + 1 leads from a trained token to the next trained one: the tokens of an environment that lie
    between have no value of their own, are not discounted and take no part.

    Args:
        rewards_T: From :func:`slime_core.ops.token_rewards` [T].
        values_T: The critic's values from before its update [T]. What is masked may be anything, NaN too, here and in
            the rewards.
        mask_T: 1 where a token is trained on, else 0 [T].
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed. Responses must be whole: with
            context parallelism, gather first.
        gamma: γ, 0 to 1.
        lambd: λ, 0 to 1.

    Returns:
        Advantages and returns, each [T], 0 where masked, without gradient; computed in float64, in the wider type of
        rewards and values or, below that, float32.

    Raises:
        ConfigError: ``gamma`` or ``lambd`` is not between 0 and 1.
        DataError: The shapes do not fit, or a number that counts is not finite.
    """
    check_factor("gamma", gamma)
    check_factor("lambd", lambd)
    check_tokens(len(mask_T), rewards_T=rewards_T, values_T=values_T)
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    dtype = torch.promote_types(torch.promote_types(rewards_T.dtype, values_T.dtype), torch.float32)
    advantages_T, returns_T = torch.empty(2, len(mask_T), dtype=dtype, device=mask_T.device)
    for tokens, sequences in blocks(lengths_N):
        trained = Trained.of(lengths_N[sequences], mask_T[tokens])
        values_K = trained.pick("values_T", values_T[tokens], tokens.start)
        deltas_K = trained.pick("rewards_T", rewards_T[tokens], tokens.start).sub_(values_K)
        add_following(deltas_K, values_K, gamma, trained.lengths_N)
        advantages_K = reverse_scan_(deltas_K, trained.lengths_N, gamma * lambd)
        trained.write(advantages_K, advantages_T[tokens])
        trained.write(values_K.add_(advantages_K), returns_T[tokens])
    return advantages_T, returns_T
