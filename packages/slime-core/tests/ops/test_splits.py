"""However a step is split, over micro-batches or over two real ranks, loss and gradient are those of the whole."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_core.config import KL_LOSS_TYPES, MisConfig
from slime_core.ops import (
    cispo_token_loss,
    dpo_pair_loss,
    gspo_token_loss,
    icepop_weights,
    kl_penalty,
    mis_weight_sums,
    mis_weights,
    opsm_mask,
    outcome_advantages,
    policy_token_loss,
    preference_objective,
    reward_model_loss,
    sft_objective,
    tis_weights,
    token_weights,
    trajectory_tokens,
    value_objective,
)
from slime_core.rewards import normalize_group_rewards


class Step:
    """Samples of a step and a made-up model whose log-probs and values are linear in three parameters."""

    def __init__(self, lengths, seed, dtype=torch.float64):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.count = len(lengths)
        self.masks = [[int(rng.random() < 0.7) for _ in range(length)] for length in lengths]
        self.trajectories = [rng.randrange(max(self.count * 2 // 3, 1)) for _ in lengths]
        self.tokens = sum(map(sum, self.masks))
        self.trajectory_tokens = trajectory_tokens(self.masks, self.trajectories)

        def column(scale, offset=0.0):
            columns = [scale * torch.randn(len(mask), generator=generator).to(dtype) + offset for mask in self.masks]
            return [
                part.masked_fill(torch.tensor(mask, dtype=torch.bool).logical_not(), torch.nan)
                for part, mask in zip(columns, self.masks, strict=True)
            ]

        self.base, self.features = column(0.3, -1), [
            torch.randn(length, 3, generator=generator).to(dtype) for length in lengths
        ]  # fmt: skip
        self.old, self.ref, self.rollout = column(0.3, -1), column(0.3, -1), column(0.3, -1)
        self.advantages = column(1)
        self.parameters = (0.1 * torch.randn(3, generator=generator)).to(dtype).requires_grad_()

    def part(self, chosen):
        return Part(self, chosen)


class Part:
    """A micro-batch: some of the samples, one after the other."""

    def __init__(self, step, chosen):
        def flat(columns):
            empty = step.parameters.new_zeros(0, *columns[0].shape[1:]) if columns else step.parameters.new_zeros(0)
            return torch.cat([empty, *(columns[n] for n in chosen)])

        self.step, self.chosen, self.dtype = step, chosen, step.parameters.dtype
        self.masks = [step.masks[n] for n in chosen]
        self.lengths = [len(mask) for mask in self.masks]
        self.mask = torch.tensor([m for mask in self.masks for m in mask], dtype=torch.int64)
        self.old, self.ref, self.rollout = flat(step.old), flat(step.ref), flat(step.rollout)
        self.advantages = flat(step.advantages)
        self.outputs = flat(step.base) + flat(step.features) @ step.parameters

    def weights(self, aggregation):
        step, dtype = self.step, self.dtype
        match aggregation:
            case "trajectory":
                counts = [step.trajectory_tokens[n] for n in self.chosen]
                how = {"global_samples": len(set(step.trajectories)), "trajectory_tokens": counts}
            case "constant":
                how = {"global_samples": step.count, "divisor": 5}
            case _:
                how = {"global_samples": step.count, "per_token": aggregation == "token"}
        return token_weights(self.masks, global_tokens=step.tokens, dtype=dtype, **how)

    def two_policies(self, weights):
        return {
            "train_log_probs_T": self.old, "rollout_log_probs_T": self.rollout,
            "mask_T": self.mask, "weights_T": weights,
        }  # fmt: skip

    def surrogate(self):
        """The tensors that policy losses begin with, and their clip bounds."""
        return self.outputs, self.old, self.advantages, 0.1, 0.2


def penalty(kind, unbiased):
    return lambda part: kl_penalty(
        part.outputs, part.ref, kind, old_log_probs_T=part.old if unbiased else None, mask_T=part.mask
    )


TOKEN_LOSSES = {
    "policy_token_loss": lambda part: policy_token_loss(*part.surrogate(), eps_clip_c=1.5, mask_T=part.mask)[0],
    "gspo_token_loss": lambda part: gspo_token_loss(*part.surrogate(), mask_T=part.mask, lengths=part.lengths)[0],
    "gspo_token_loss, token form": lambda part: gspo_token_loss(
        *part.surrogate(), mask_T=part.mask, lengths=part.lengths, token_form=True
    )[0],
    "cispo_token_loss": lambda part: cispo_token_loss(*part.surrogate(), mask_T=part.mask)[0],
    **{f"kl_penalty, {kind}": penalty(kind, False) for kind in KL_LOSS_TYPES},
    **{f"kl_penalty, unbiased {kind}": penalty(kind, True) for kind in KL_LOSS_TYPES},
}
OBJECTIVES = {
    "value_objective": lambda part, weights: value_objective(
        values_T=part.outputs, old_values_T=part.old, returns_T=part.advantages, weights_T=weights, value_clip=0.2
    )[0],
    "sft_objective": lambda part, weights: sft_objective(part.outputs, weights)[0],
}
AGGREGATIONS = ("sample", "token", "trajectory", "constant")
MIS = {
    f"mis_weights, {level} {mode}": MisConfig(
        mis_level=level, mis_mode=mode, mis_upper_bound=1.5, mis_batch_normalize=True,
        mis_rs_level=level, mis_rs_upper_bound=3.0, mis_veto_threshold=0.3,
    )
    for level, mode in (("token", "truncate"), ("sequence", "clip"), ("geometric", "mask"))
}  # fmt: skip
CORRECTIONS = ("none", "tis_weights", "icepop_weights", "opsm_mask", *MIS)
CASES = [
    *itertools.product([*TOKEN_LOSSES, *OBJECTIVES], AGGREGATIONS, ["none"]),
    *itertools.product(["policy_token_loss"], AGGREGATIONS, CORRECTIONS[1:]),
]


def factor(part, weights, correction, sums):
    ratio = part.two_policies(weights)
    match correction:
        case "none":
            return torch.ones_like(weights)
        case "tis_weights":
            return tis_weights(**ratio, upper=1.2)[0]
        case "icepop_weights":
            return icepop_weights(**ratio, lower=0.8, upper=1.2)[0]
        case "opsm_mask":
            return opsm_mask(
                log_probs_T=part.outputs, old_log_probs_T=part.old, advantages_T=part.advantages,
                mask_T=part.mask, weights_T=weights, lengths=part.lengths, delta=0.01,
            )[0]  # fmt: skip
        case _:
            return mis_weights(MIS[correction], **ratio, lengths=part.lengths, weight_sums=sums)[0]


def outcome(step, micro_batches, case, add_up=lambda numbers: numbers):
    """Loss and gradient, one vector [4]: of these micro-batches, added up over the ranks."""
    loss_name, aggregation, correction = case
    loss, sums = 0 * step.parameters.sum(), None
    parts = [step.part(chosen) for chosen in micro_batches]
    if correction in MIS:
        mine = [
            mis_weight_sums(MIS[correction], **part.two_policies(weights), lengths=part.lengths)
            for part in parts
            for weights in [part.weights(aggregation)]
        ]
        sums = add_up(sum(mine, step.parameters.new_zeros(2)))
    for part in parts:
        weights = part.weights(aggregation)
        if loss_name in OBJECTIVES:
            loss = loss + OBJECTIVES[loss_name](part, weights)
        else:
            loss = loss + (TOKEN_LOSSES[loss_name](part) * factor(part, weights, correction, sums) * weights).sum()
    return add_up(torch.cat([loss.detach().unsqueeze(0), *torch.autograd.grad(loss, step.parameters)]))


@settings(max_examples=150)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(0, 99), st.sampled_from(CASES),
    st.integers(1, 4), st.randoms(),
)  # fmt: skip
def test_micro_batches(lengths, seed, case, count, rng):
    """Any number of them, with samples in any order; empty ones included."""
    step = Step(lengths, seed)
    order = list(range(len(lengths)))
    whole = outcome(step, [order[:]], case)
    rng.shuffle(order)
    split = outcome(step, [order[k::count] for k in range(count)], case)
    torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)


LENGTHS = [4, 2, 0, 3, 1, 4, 2, 3]
SPLITS = {
    "trajectories cut": [[[0, 5], [2, 7]], [[1, 6, 3], [4]]],
    "nothing on the second rank": [[[4, 1, 2], [7, 6], [0, 3, 5]], [[], [], []]],
}


def added_up(numbers):
    numbers = numbers.clone()
    dist.all_reduce(numbers)
    return numbers


def outcomes_of_a_rank(rank, split, dtype):
    step = Step(LENGTHS, seed=3, dtype=dtype)
    return [outcome(step, SPLITS[split][rank], case, added_up) for case in CASES]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks(two_ranks, split, dtype, tolerance):
    """Every loss under every aggregation, every correction under every aggregation."""
    step = Step(LENGTHS, seed=3)
    first, second = (set(itertools.chain(*SPLITS["trajectories cut"][rank])) for rank in range(2))
    assert {step.trajectories[n] for n in first if step.masks[n]} & {step.trajectories[n] for n in second}
    ranks = two_ranks(__file__, "outcomes_of_a_rank", split, dtype)
    for case, one, other in zip(CASES, *ranks, strict=True):
        whole = outcome(step, [range(len(LENGTHS))], case)
        assert whole[1:].abs().max() > 1e-3 or case[0] == "kl_penalty, k1", case  # there is something to compare
        assert one.equal(other)
        torch.testing.assert_close(
            one.double(), whole, rtol=tolerance, atol=tolerance, msg=lambda m, c=case: f"{c}: {m}"
        )


def pair_losses(step, pairs, kind):
    """Loss and gradient [4] of some pairs of samples, under the count of all."""
    part = step.part([n for pair in pairs for n in (2 * pair, 2 * pair + 1)])
    if kind == "dpo_pair_loss":
        triple = dpo_pair_loss(part.outputs, part.ref, mask_T=part.mask, lengths=part.lengths, beta=0.5)
    else:
        scores = torch.stack([step.features[n].sum(0) @ step.parameters for n in part.chosen]).view(-1, 2).unbind(1)
        triple = reward_model_loss(*scores), *scores
    loss, _ = preference_objective(*triple, global_pairs=len(LENGTHS) // 2)
    return torch.cat([loss.detach().unsqueeze(0), *torch.autograd.grad(loss, step.parameters)])


def pairs_of_a_rank(rank, kind):
    return added_up(pair_losses(Step(LENGTHS, seed=3), [[0, 3, 1], [2]][rank], kind))


@pytest.mark.parametrize("kind", ["dpo_pair_loss", "reward_model_loss"])
def test_two_ranks_with_pairs(two_ranks, kind):
    whole = pair_losses(Step(LENGTHS, seed=3), range(4), kind)
    for result in two_ranks(__file__, "pairs_of_a_rank", kind):
        torch.testing.assert_close(result, whole, rtol=1e-12, atol=1e-12)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(0, 99), st.randoms())
def test_the_order_of_samples_in_and_between_groups_changes_nothing(groups, seed, rng):
    """From rewards to the loss and its gradient."""
    step = Step([1 + n % 3 for n in range(len(groups))], seed)
    rewards, groups = [rng.choice([0.0, 0.5, 1.0]) for _ in groups], list(groups)

    def loss_in(order):
        part = step.part(order)
        advantages = outcome_advantages(
            rewards_N=torch.tensor(
                normalize_group_rewards([rewards[n] for n in order], [groups[n] for n in order]), dtype=torch.float64
            ),
            mask_T=part.mask, lengths=part.lengths,
        )  # fmt: skip
        loss = policy_token_loss(part.outputs, part.old, advantages, 0.1, 0.2, mask_T=part.mask)[0] @ part.weights(
            "sample"
        )
        return torch.cat([loss.detach().unsqueeze(0), *torch.autograd.grad(loss, step.parameters)])

    order = list(range(len(groups)))
    straight = loss_in(order)
    rng.shuffle(order)
    torch.testing.assert_close(loss_in(order), straight, rtol=1e-12, atol=1e-12)
