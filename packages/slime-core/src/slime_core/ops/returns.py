"""Rewards per token, and the returns they add up to. T tokens of N responses, K of them trained."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_core.errors import ConfigError, DataError
from slime_core.ops.ragged import lengths_tensor
from slime_core.ops.scan import Trained, blocks, check_finite, check_tokens, reverse_scan_


@torch.no_grad()
def token_rewards(
    *,
    rewards_N: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int] | Tensor,
    kl_T: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """``−kl_coef · KL_t`` at every trained token, plus the response's reward at the last one.

    The modified reward of Ziegler et al. 2019, R = r − β log(π/ρ), token by token as in Ouyang et al. 2022. The last
    trained token is the last with mask 1: what an environment appended behind it was no action, and earns nothing. A
    response without a trained token has zeros only.

    Args:
        rewards_N: One reward per response [N].
        mask_T: 1 where a token is trained on, else 0 [T].
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed.
        kl_T: Estimates of KL(policy ‖ reference), nats [T], from :func:`slime_core.ops.kl_penalty` on the log-probs
            from before the update. What is masked may be anything, NaN too.
        kl_coef: Coefficient of the KL penalty. At 0, ``kl_T`` is not looked at.

    Returns:
        Rewards [T], 0 where masked, without gradient; in the rewards' type or, below that, float32.

    Raises:
        ConfigError: ``kl_coef`` is not finite, or not 0 with no ``kl_T``.
        DataError: The shapes do not fit, or a number that counts is not finite.
    """
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    check_rewards(rewards_N, lengths_N)
    token_rewards_T = kl_penalties(mask_T, kl_T, kl_coef)
    place_T = torch.arange(len(mask_T), device=mask_T.device).masked_fill_(mask_T == 0, -1).double()
    last_N = torch.segment_reduce(place_T, "max", lengths=lengths_N, axis=0, unsafe=True, initial=-1).long()
    earns_N = last_N >= 0
    token_rewards_T[last_N[earns_N]] += rewards_N.detach().double()[earns_N]
    return token_rewards_T.to(torch.promote_types(rewards_N.dtype, torch.float32))


@torch.no_grad()
def discounted_returns(
    *, rewards_T: Tensor, mask_T: Tensor, lengths: Sequence[int] | Tensor, gamma: float = 1.0
) -> Tensor:
    """``G_t = Σ_{k ≥ t} γ^{k − t} r_k`` over the trained tokens of a response.

    With γ = 1 the unnormalised advantage of REINFORCE++ (Hu et al. 2025, version 9, equation 4).

    Time is counted in trained tokens: between two of them nothing is discounted, because the tokens of an environment
    that lie there are part of the step from one action to the next. With γ = 1 this makes no difference.

    Args:
        rewards_T: From :func:`token_rewards` [T]. What is masked may be anything, NaN too.
        mask_T: 1 where a token is trained on, else 0 [T].
        lengths: Tokens of each response, N numbers that add up to T; 0 is allowed. Responses must be whole: with
            context parallelism, gather first.
        gamma: γ, 0 to 1.

    Returns:
        Returns [T], 0 where masked, without gradient; in the rewards' type or, below that, float32.

    Raises:
        ConfigError: ``gamma`` is not between 0 and 1.
        DataError: The shapes do not fit, or a number that counts is not finite.
    """
    check_factor("gamma", gamma)
    check_tokens(len(mask_T), rewards_T=rewards_T)
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    returns_T = torch.empty_like(rewards_T, dtype=torch.promote_types(rewards_T.dtype, torch.float32))
    for tokens, sequences in blocks(lengths_N):
        trained = Trained.of(lengths_N[sequences], mask_T[tokens])
        rewards_K = trained.pick("rewards_T", rewards_T[tokens], tokens.start)
        trained.write(reverse_scan_(rewards_K, trained.lengths_N, gamma), returns_T[tokens])
    return returns_T


def kl_penalties(mask_T: Tensor, kl_T: Tensor | None, kl_coef: float) -> Tensor:
    """``−kl_coef · KL_t`` where the mask is 1, else 0, float64 [T].

    Raises:
        ConfigError: ``kl_coef`` is not finite, or not 0 with no ``kl_T``.
        DataError: ``kl_T`` has another shape, or is not finite where the mask is 1.
    """
    if not math.isfinite(kl_coef):
        raise ConfigError(f"kl_coef {kl_coef} must be a finite number")
    if kl_coef == 0:
        return torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    if kl_T is None:
        raise ConfigError(f"kl_coef {kl_coef} needs the divergence from the reference, kl_T, and none was given")
    check_tokens(len(mask_T), kl_T=kl_T)
    penalty_T = (-kl_coef * kl_T.detach().double()).masked_fill_(mask_T == 0, 0)
    check_finite("kl_T", penalty_T)
    return penalty_T


def check_rewards(rewards_N: Tensor, lengths_N: Tensor) -> None:
    """Check that there is one finite reward per response.

    Raises:
        DataError: There is not; names the responses whose reward is not finite.
    """
    if rewards_N.shape != lengths_N.shape:
        raise DataError(f"rewards have shape {list(rewards_N.shape)} but there are {len(lengths_N)} responses")
    if not bool(rewards_N.isfinite().all()):
        broken = (~rewards_N.isfinite()).nonzero().flatten().tolist()
        raise DataError(f"rewards must be finite numbers; not so for responses {broken}: mend the reward")


def check_factor(name: str, value: float) -> None:
    """Check a discount.

    Raises:
        ConfigError: It is not between 0 and 1.
    """
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} {value} must be between 0 and 1")
