"""Rewards per token, discounted returns and generalised advantages. T tokens of N responses, K of them trained.

Time is counted in trained tokens: the step from t to t + 1 leads from a trained token to the next trained one. The
tokens of an environment that lie between are part of the transition from one action to the next (Sutton and Barto 2018,
section 3.1: a step is an action and what follows it); they have no value of their own, discount nothing and take no
part. Trainers that discount at every token, masked or not, give smaller returns in front of an environment's text for
γ < 1. With γ = 1, as is usual for language models, the returns are the same; GAE's are, if λ is 1 too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slime_core.errors import ConfigError, DataError
from slime_core.ops.tokens import lengths_tensor

CHUNK = 24
"""Most tokens in a chunk: the more, the more multiplications per token and the fewer chunks."""

CHUNK_OF_CHUNKS = 128
"""Most chunks that are one step each of a chunk in turn: they are few, so that fewer levels count for more."""

CPU_BLOCK = 2**18
"""Tokens that a CPU works on at a time: so few that its caches hold them, and that the allocator keeps the memory."""


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
    trained token is the last with mask 1: what an environment appended behind it was not an action, and earns nothing.
    A response without a trained token has zeros only.

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
    """``G_t = Σ_{k ≥ t} γ^{k − t} r_k`` over the trained tokens of a response, masked ones not counted as time.

    With γ = 1 the unnormalised advantage of REINFORCE++ (Hu et al. 2025, version 9, equation 4).

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
    returns_T = torch.empty_like(rewards_T, dtype=torch.promote_types(rewards_T.dtype, torch.float32))
    for trained, tokens in _blocks_of(lengths, mask_T):
        returns_K = reverse_scan(trained.pick(rewards_T[tokens]), trained.lengths_N, gamma)
        trained.check(trained.write(returns_K, returns_T[tokens]), tokens, rewards_T=rewards_T)
    return returns_T


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

    ``δ_t = r_t + γ V_{t+1} − V_t``, with V = 0 behind the end; ``A_t = δ_t + γλ A_{t+1}``; return ``A_t + V_t``.

    Args, besides those of :func:`discounted_returns`:
        values_T: The critic's values from before its update [T]. What is masked may be anything, NaN too.
        lambd: λ, 0 to 1.

    Returns:
        Advantages and returns, each [T], 0 where masked, without gradient; computed in float64, in the wider type of
        rewards and values or, below that, float32.
    """
    check_factor("gamma", gamma)
    check_factor("lambd", lambd)
    check_tokens(len(mask_T), rewards_T=rewards_T, values_T=values_T)
    dtype = torch.promote_types(torch.promote_types(rewards_T.dtype, values_T.dtype), torch.float32)
    advantages_T, returns_T = torch.empty(2, len(mask_T), dtype=dtype, device=mask_T.device)
    for trained, tokens in _blocks_of(lengths, mask_T):
        values_K = trained.pick(values_T[tokens])
        deltas_K = trained.pick(rewards_T[tokens]).sub_(values_K)
        _add_following(deltas_K, values_K, gamma, trained.lengths_N)
        advantages_K = reverse_scan(deltas_K, trained.lengths_N, gamma * lambd)
        found_T = trained.write(advantages_K, advantages_T[tokens])
        trained.check(found_T, tokens, values_T=values_T, rewards_T=rewards_T)
        trained.write(values_K.add_(advantages_K), returns_T[tokens])
    return advantages_T, returns_T


def kl_penalties(mask_T: Tensor, kl_T: Tensor | None, kl_coef: float) -> Tensor:
    """``−kl_coef · KL_t`` where the mask is 1, else 0, float64 [T]."""
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
    """Raise DataError unless there is one finite reward per response."""
    if rewards_N.shape != lengths_N.shape:
        raise DataError(f"rewards have shape {list(rewards_N.shape)} but there are {len(lengths_N)} responses")
    if not bool(rewards_N.isfinite().all()):
        broken = (~rewards_N.isfinite()).nonzero().flatten().tolist()
        raise DataError(f"rewards must be finite numbers; not so for responses {broken}: mend the reward")


def check_factor(name: str, value: float) -> None:
    """Raise ConfigError unless a discount is between 0 and 1."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} {value} must be between 0 and 1")


def check_tokens(total: int, **tensors_T: Tensor) -> None:
    """Raise DataError, with the name, unless tensors hold one number per token."""
    for name, tensor in tensors_T.items():
        if tensor.shape != (total,):
            raise DataError(f"{name} has shape {list(tensor.shape)}, must be [{total}]: one number per token")


def check_finite(name: str, values_T: Tensor, first: int = 0) -> None:
    """Raise DataError, with the first token, numbered from ``first``, unless what the mask left is finite."""
    if not bool(values_T.isfinite().all()):
        found = (~values_T.isfinite()).nonzero().flatten()
        raise DataError(
            f"{name} must be finite where the mask is 1; got {float(values_T[found[0]])} at token "
            f"{first + int(found[0])}, one of {len(found)}: mask them or mend them"
        )


class _Trained(NamedTuple):
    """The K trained tokens of some sequences: their places among the T (``None`` for all), and how many in each."""

    token_K: Tensor | None
    lengths_N: Tensor

    @classmethod
    def of(cls, lengths_N: Tensor, mask_T: Tensor) -> _Trained:
        if len(mask_T) == 0 or bool(mask_T.min() > 0):
            return cls(None, lengths_N)
        token_K = mask_T.nonzero().flatten()
        before_N = torch.searchsorted(token_K, lengths_N.cumsum(0))
        return cls(token_K, before_N.diff(prepend=before_N.new_zeros(1)))

    def pick(self, values_T: Tensor) -> Tensor:
        """A copy of their values without gradient, float64 [K]."""
        values_K = values_T.detach() if self.token_K is None else values_T.detach().index_select(0, self.token_K)
        return values_K.to(torch.float64, copy=True)

    def check(self, result_T: Tensor, tokens: slice, **inputs_T: Tensor) -> None:
        """Raise DataError if the result is not finite because an input is not, which names the token."""
        if not math.isfinite(float(result_T.sum())):  # one sum is quicker than a look at each token
            for name, values_T in inputs_T.items():
                kept_T = self.write(
                    self.pick(values_T[tokens]), torch.empty_like(values_T[tokens], dtype=torch.float64)
                )
                check_finite(name, kept_T, tokens.start)

    def write(self, values_K: Tensor, result_T: Tensor) -> Tensor:
        """Write their values, 0 for a masked token, to ``result_T``, in its type."""
        if self.token_K is None:
            return result_T.copy_(values_K)
        return result_T.zero_().scatter_(0, self.token_K, values_K.to(result_T.dtype))


def _blocks_of(lengths: Sequence[int] | Tensor, mask_T: Tensor) -> Iterator[tuple[_Trained, slice]]:
    """The trained tokens of whole sequences to work on at a time, and where all tokens of these lie."""
    lengths_N = lengths_tensor(lengths, len(mask_T), mask_T.device)
    for tokens, sequences in blocks(lengths_N):
        yield _Trained.of(lengths_N[sequences], mask_T[tokens]), tokens


def blocks(lengths_N: Tensor) -> list[tuple[slice, slice]]:
    """Whole sequences to work on at a time, as tokens and sequences: all at once unless on a CPU.

    A block has ``CPU_BLOCK`` tokens at most, or a single longer sequence.
    """
    count = len(lengths_N)
    ends_N = lengths_N.cumsum(0)
    total = int(ends_N[-1]) if count else 0
    if lengths_N.device.type != "cpu" or total <= CPU_BLOCK:
        return [(slice(0, total), slice(0, count))]
    result, token, sequence = [], 0, 0
    while sequence < count:
        stop = max(int(torch.searchsorted(ends_N, token + CPU_BLOCK, right=True)), sequence + 1)
        end = int(ends_N[stop - 1])
        result.append((slice(token, end), slice(sequence, stop)))
        token, sequence = end, stop
    return result


def _add_following(target_T: Tensor, values_T: Tensor, factor: float, lengths_N: Tensor) -> Tensor:
    """Add, in place, ``factor`` times the value of the next token in the same sequence, where there is one."""
    if len(target_T):
        last_N = lengths_N.cumsum(0) - 1  # of an empty sequence: the last of the one before, or at −1 of all
        kept_N = target_T[last_N]
        target_T[:-1].add_(values_T[1:], alpha=factor)
        target_T[last_N] = kept_N
    return target_T


def reverse_scan(values_T: Tensor, lengths_N: Tensor, decay: float, *, most: int = CHUNK) -> Tensor:
    """y with ``y_t = x_t + decay · y_{t+1}`` within each sequence [T].

    Instead of T steps in a row: every sequence is cut into chunks, and each of them is a row of one product with the
    powers of ``decay``. What a chunk takes over from the next one follows the same recurrence, with ``decay ** L``,
    over the chunks; and so on, until each sequence is one chunk, of ``most`` steps at most. In float64, which neither
    TF32 nor autocast touches. ``values_T``, x, may be overwritten, and what is not finite spreads within its chunk.
    """
    if len(values_T) == 0:
        return values_T
    longest = int(lengths_N.max())
    size = min(most, longest)
    count_N = (lengths_N + (size - 1)) // size
    place_T = None
    if longest * len(lengths_N) == len(values_T):  # all as long: rows, padded at their ends
        padding = -longest % size
        rows = torch.nn.functional.pad(values_T.view(-1, longest), (0, padding)) if padding else values_T
    else:
        place_T = _places(lengths_N, count_N, size, len(values_T))
        rows = values_T.new_zeros(int(count_N.sum()) * size).scatter_(0, place_T, values_T)
    powers_LL = _powers(decay, size, values_T.device)
    chunks_CL = rows.view(-1, size) @ powers_LL
    if longest > size:
        heads_C = reverse_scan(chunks_CL[:, 0].clone(), count_N, decay**size, most=CHUNK_OF_CHUNKS)
        carry_C = _add_following(torch.zeros_like(heads_C), heads_C, 1.0, count_N)
        chunks_CL.addcmul_(carry_C.unsqueeze(1), powers_LL[-1] * decay)
    if place_T is not None:
        return torch.index_select(chunks_CL.view(-1), 0, place_T, out=values_T)
    return chunks_CL.view(len(lengths_N), -1)[:, :longest].reshape(-1)


@lru_cache(maxsize=16)
def _powers(decay: float, size: int, device: torch.device) -> Tensor:
    """``decay ** (row − column)`` on and below the diagonal, else 0."""
    step_L = torch.arange(size, dtype=torch.float64, device=device)
    return torch.pow(decay, (step_L.unsqueeze(1) - step_L).clamp_(min=0)).tril_()


def _places(lengths_N: Tensor, count_N: Tensor, size: int, total: int) -> Tensor:
    """Where tokens stand if each sequence begins a chunk: one place after another, some left out before a sequence."""
    starts_N = lengths_N.cumsum(0) - lengths_N
    skipped_N = (count_N.cumsum(0) - count_N) * size - starts_N
    step_T = torch.ones(total + 1, dtype=torch.int64, device=lengths_N.device)  # the last is an empty sequence's
    step_T.index_add_(0, starts_N, skipped_N.diff(prepend=skipped_N.new_ones(1)))
    return step_T.cumsum_(0)[:-1]
