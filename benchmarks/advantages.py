"""GAE and discounted returns over ragged responses, and group-relative rewards, against loops: how many times as fast.

Lengths are from 1 to the longest, uniform (`ragged`), or all the longest (`filled`). `loop` walks over the steps of a
padded batch and computes each equation there, which is how trainers commonly do it; `lean loop` has everything but
the recurrence taken out of the loop, and its input laid out for it. Goal: five times as fast as the loop on large
batches, and nowhere slower. Group rewards: 65,536 samples in groups of 8, `loop` takes one group after the other; the
goal is fifty times as fast. `chunked` GAE is one matrix product for all chunks of 128 steps of a padded batch, in
fp32, as other trainers have it; never slower than that, either. The losses of 262,144 tokens, forward and backward,
against the few lines of plain torch that a trainer has for them: GRPO's as in its paper; GSPO's by token, as trainers
write it, and `by sequence`, which is the least that can be done. Goal: 0.8 of plain torch. CPU times of one thread,
the least of several, the sides alternating.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from _records import Record
from torch import Tensor

from slime_core.ops import discounted_returns, gae_advantages, grpo_loss, gspo_loss
from slime_core.rewards import normalize_group_rewards

GOALS = {(64, 8192): 5.0, (256, 2048): 5.0, (1024, 64): 1.0}
GROUP_GOAL = 50.0
GOALS_BY_SIDE = {"chunked": 1.0, "plain torch": 0.8}
ROWS, LENGTH, EPS = 64, 4096, (3e-4, 4e-4)
GAMMA, LAMBDA = 0.99, 0.95
SAMPLES, GROUP = 65_536, 8


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure every case.

    Args:
        out: Not used.
        quick: Four rounds instead of eight.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    learn_to_keep_memory()
    try:
        rounds = 4 if quick else 8
        records = [
            record
            for (count, longest), goal in GOALS.items()
            for filled in (False, True)
            for record in over_time(count, longest, filled=filled, rounds=rounds, goal=goal)
        ]
        return records + group_rewards(rounds) + losses(rounds)
    finally:
        torch.set_num_threads(before)


def learn_to_keep_memory() -> None:
    """Free 32 MiB once, from when on glibc keeps freed memory of that size, as in any process that has trained.

    Before that, the times of all sides are those of page faults.
    """
    torch.zeros((32 << 20) - (4 << 10), dtype=torch.uint8)


def over_time(count: int, longest: int, *, filled: bool, rounds: int, goal: float) -> list[Record]:
    """GAE and returns on one shape."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    lengths[0] = longest
    if filled:
        lengths.fill_(longest)
    rewards_T, values_T = torch.randn(2, int(lengths.sum()), generator=generator)
    mask_T = torch.ones_like(rewards_T)
    rows = [torch.nn.utils.rnn.pad_sequence(x.split(lengths.tolist()), batch_first=True) for x in (rewards_T, values_T)]
    columns = [row.T.contiguous() for row in rows]
    gae = {
        "loop": lambda: step_by_step(*rows),
        "lean loop": lambda: recurrence_only(*columns),
        "chunked": lambda: chunked_gae(rows[0], rows[1]),
        "ours": lambda: gae_advantages(
            rewards_T=rewards_T, values_T=values_T, mask_T=mask_T, lengths=lengths, gamma=GAMMA, lambd=LAMBDA
        ),
    }
    returns = {
        "loop": lambda: returns_step_by_step(rows[0]),
        "ours": lambda: discounted_returns(rewards_T=rewards_T, mask_T=mask_T, lengths=lengths, gamma=GAMMA),
    }
    shape = f"{count} × {longest}, {'filled' if filled else 'ragged'}"
    return [*compare(f"GAE {shape}", gae, rounds, goal), *compare(f"returns {shape}", returns, rounds)]


def group_rewards(rounds: int) -> list[Record]:
    """Group-relative rewards."""
    rewards_N = torch.rand(SAMPLES, generator=torch.Generator().manual_seed(0))
    groups_N = torch.arange(SAMPLES) // GROUP
    sides = {
        "loop": lambda: group_by_group(rewards_N, groups_N),
        "ours": lambda: normalize_group_rewards(rewards_N, groups_N),
    }
    return compare(f"{SAMPLES} group rewards", sides, rounds, GROUP_GOAL)


def losses(rounds: int) -> list[Record]:
    """GRPO's and GSPO's loss, forward and backward, on rows with padding."""
    generator = torch.Generator().manual_seed(0)
    old_BS = -3 * torch.rand(ROWS, LENGTH, generator=generator)
    new_BS = (old_BS + 0.1 * torch.randn(ROWS, LENGTH, generator=generator)).requires_grad_()
    advantages_B = torch.randn(ROWS, generator=generator)
    lengths_B = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS,), generator=generator)
    mask_BS = (torch.arange(LENGTH) < lengths_B.unsqueeze(1)).float()

    def backward(loss: Tensor) -> None:
        new_BS.grad = None
        loss.backward()  # type: ignore[no-untyped-call]

    def mean(values_BS: Tensor) -> Tensor:
        return ((values_BS * mask_BS).sum(1) / mask_BS.sum(1)).mean()

    def clipped(ratio_BS: Tensor, low: float, high: float) -> Tensor:
        weights_B1 = advantages_B.unsqueeze(1)
        return -torch.min(ratio_BS * weights_B1, ratio_BS.clamp(1 - low, 1 + high) * weights_B1)

    def log_ratio() -> Tensor:
        return ((new_BS - old_BS) * mask_BS).sum(1, keepdim=True) / mask_BS.sum(1, keepdim=True)

    def by_token() -> Tensor:
        return (new_BS - new_BS.detach() + log_ratio().detach()).exp()

    grpo = {
        "plain torch": lambda: backward(mean(clipped((new_BS - old_BS).exp(), 0.2, 0.2))),
        "ours": lambda: backward(grpo_loss(new_BS, mask_BS, advantages=advantages_B, old_log_probs=old_BS).loss),
    }
    gspo = {
        "plain torch": lambda: backward(mean(clipped(by_token(), *EPS))),
        "by sequence": lambda: backward(clipped(log_ratio().exp(), *EPS).mean()),
        "ours": lambda: backward(gspo_loss(new_BS, mask_BS, advantages=advantages_B, old_log_probs=old_BS).loss),
    }
    size = ROWS * LENGTH
    return [*compare(f"GRPO loss, {size} tokens", grpo, rounds), *compare(f"GSPO loss, {size} tokens", gspo, rounds)]


def compare(
    case: str, sides: Mapping[str, Callable[[], object]], rounds: int, goal: float | None = None
) -> list[Record]:
    """Milliseconds of ours, and the other sides' over ours; the goal is for the loop's."""
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.process_time()
            side()
            best[name] = min(best[name], time.process_time() - start)
    ratios = [
        Record(case, f"{name} / ours", seconds / best["ours"], "x", True, {"loop": goal, **GOALS_BY_SIDE}.get(name))
        for name, seconds in best.items()
        if name != "ours"
    ]
    return [Record(case, "ours", best["ours"] * 1e3, "ms", more_is_better=False), *ratios]


def step_by_step(rewards_BS: Tensor, values_BS: Tensor) -> tuple[Tensor, Tensor]:
    """The equations of GAE, one step of a padded batch after the other."""
    following_B, reverse = torch.zeros(len(rewards_BS)), []
    next_B = torch.zeros(len(rewards_BS))
    for t in range(rewards_BS.shape[1] - 1, -1, -1):
        delta_B = rewards_BS[:, t] + GAMMA * next_B - values_BS[:, t]
        following_B = delta_B + GAMMA * LAMBDA * following_B
        next_B = values_BS[:, t]
        reverse.append(following_B)
    advantages_BS = torch.stack(reverse[::-1], dim=1)
    return advantages_BS, advantages_BS + values_BS


def returns_step_by_step(rewards_BS: Tensor) -> Tensor:
    """Discounted returns, one step of a padded batch after the other."""
    following_B, reverse = torch.zeros(len(rewards_BS)), []
    for t in range(rewards_BS.shape[1] - 1, -1, -1):
        following_B = rewards_BS[:, t] + GAMMA * following_B
        reverse.append(following_B)
    return torch.stack(reverse[::-1], dim=1)


def recurrence_only(rewards_SB: Tensor, values_SB: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with the steps in front and nothing but the recurrence in the loop."""
    deltas_SB = rewards_SB - values_SB
    deltas_SB[:-1] += GAMMA * values_SB[1:]
    advantages_SB, following_B = torch.empty_like(deltas_SB), torch.zeros_like(deltas_SB[0])
    for t in range(len(deltas_SB) - 1, -1, -1):
        following_B = deltas_SB[t] + GAMMA * LAMBDA * following_B
        advantages_SB[t] = following_B
    return advantages_SB, advantages_SB + values_SB


def chunked_gae(rewards_BS: Tensor, values_BS: Tensor, size: int = 128) -> tuple[Tensor, Tensor]:
    """One matrix product for all chunks of a padded batch, then one chunk after the other."""
    decay, (count, longest) = GAMMA * LAMBDA, rewards_BS.shape
    deltas_BS = rewards_BS + GAMMA * torch.nn.functional.pad(values_BS[:, 1:], (0, 1)) - values_BS
    deltas_BS = torch.nn.functional.pad(deltas_BS.flip(1), (0, -longest % size))
    step_C = torch.arange(size)
    powers_CC = torch.pow(decay, (step_C - step_C.unsqueeze(1)).clamp(min=0).float()).triu()
    local_BKC = (deltas_BS.reshape(-1, size) @ powers_CC).view(count, -1, size)
    carried_C, before_B = decay ** torch.arange(1, size + 1), torch.zeros(count)
    result_BKC = torch.empty_like(local_BKC)
    for chunk in range(local_BKC.shape[1]):
        result_BKC[:, chunk] = local_BKC[:, chunk] + before_B.unsqueeze(1) * carried_C
        before_B = result_BKC[:, chunk, -1]
    advantages_BS = result_BKC.view(count, -1)[:, :longest].flip(1)
    return advantages_BS, advantages_BS + values_BS


def group_by_group(rewards_N: Tensor, groups_N: Tensor) -> Tensor:
    """The loop that one writes first: the members of each group, then one group after the other."""
    members: dict[int, list[int]] = {}
    for position, group in enumerate(groups_N.tolist()):
        members.setdefault(group, []).append(position)
    result_N = torch.empty_like(rewards_N)
    for positions in map(torch.tensor, members.values()):
        mine = rewards_N[positions]
        result_N[positions] = (mine - mine.mean()) / (mine.std() + 1e-6)
    return result_N
