"""Whole algorithms for the tests: made-up rollouts, and each algorithm token by token from its paper in float64."""

import math
import random
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from slime_core.config import AlgorithmConfig
from slime_core.ops import drift_statistics, loss_weights, mis_weight_sums, policy_advantages, policy_objective
from slime_core.rewards import estimator_rewards

WHITENED = {"normalize_advantages": True}
CASES = {
    "grpo": {},
    "grpo, KL and entropy": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "entropy_coef": 0.05},
    "grpo, KL of no given kind": {"use_kl_loss": True, "kl_loss_coef": 0.3},
    "grpo, unbiased k1": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1", "use_unbiased_kl": True},
    "grpo, KL in the reward of no given kind": {"kl_coef": 0.1},
    "grpo, unbiased KL": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3", "use_unbiased_kl": True},
    "grpo, KL in the reward": {"kl_coef": 0.1, "kl_loss_type": "k2"},
    "dapo": {"eps_clip_high": 0.28, "calculate_per_token_loss": True, "eps_clip_c": 1.5},
    "dr.grpo": {"disable_grpo_std_normalization": True, "loss_divisor": 9.0},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.08},
    "gspo, KL in the reward": {"advantage_estimator": "gspo", "eps_clip": 0.2, "kl_coef": 0.1},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 0.3},
    "rloo": {"advantage_estimator": "rloo", "kl_coef": 0.05},
    "ppo": {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9, "kl_coef": 0.1},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.1, **WHITENED},
    "reinforce++ baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1, **WHITENED},
    "distillation": {"use_opd": True, "opd_kl_coef": 0.5},
    "tis": {"use_tis": True, "tis_clip": 1.2, "tis_clip_low": 0.3},
    "icepop": {"use_tis": True, "tis_mode": "icepop", "tis_clip": 1.3, "tis_clip_low": 0.6},
    "mis, sequence": {"use_mis": True, "mis_level": "sequence", "mis_rs_level": "token", "mis_veto_threshold": 0.6},
    "mis, normalised": {"use_mis": True, "mis_level": "geometric", "mis_mode": "clip", "mis_upper_bound": 1.1,
                        "mis_batch_normalize": True},
    "opsm": {"use_opsm": True, "opsm_delta": 0.0},
    "opsm with tis": {"use_opsm": True, "opsm_delta": 0.02, "use_tis": True},
}  # fmt: skip


PER_TOKEN = ("mask", "new", "old", "ref", "rollout", "teacher", "values", "entropy")


@dataclass
class Response:
    """What is known of one response; the lists have one entry per token."""

    group: int
    trajectory: int
    reward: float
    mask: list
    new: list
    old: list
    ref: list
    rollout: list
    teacher: list
    values: list
    entropy: list


def make_responses(lengths, seed, group_size=2):
    """Groups of responses; the last two of each group of three or more are one trajectory, with one reward."""
    rng = random.Random(seed)
    responses = []
    for number, length in enumerate(lengths):
        group, member = divmod(number, group_size)
        joined = group_size > 2 and member == group_size - 1
        old = [rng.gauss(-2, 0.7) for _ in range(length)]
        near = {name: [value + rng.gauss(0, 0.4) for value in old] for name in ("new", "ref", "rollout", "teacher")}
        responses.append(
            Response(
                group=group,
                trajectory=responses[-1].trajectory if joined else number,
                reward=responses[-1].reward if joined else rng.choice([0.0, 0.5, 1.0, 2.0]),
                mask=[int(rng.random() < 0.75) for _ in range(length)],
                old=old,
                values=[rng.gauss(0, 1) for _ in range(length)],
                entropy=[rng.random() * 2 for _ in range(length)],
                **near,
            )
        )
    return responses


def step_sizes(responses):
    """What the whole step's denominators are made of."""
    tokens = {}
    for response in responses:
        tokens[response.trajectory] = tokens.get(response.trajectory, 0) + sum(response.mask)
    return {"tokens_of": tokens, "global_trajectories": len(tokens), "global_tokens": sum(tokens.values())}


def processed_rewards(config, responses):
    """Rewards that the advantages start from, by identity of the response."""
    values = estimator_rewards(
        config.advantage_estimator,
        [response.reward for response in responses],
        [response.group for response in responses],
        divide_by_std=not config.disable_grpo_std_normalization,
        trajectory_ids=[response.trajectory for response in responses],
    )
    return {id(response): value for response, value in zip(responses, values, strict=True)}


def flat(responses, name, dtype=torch.float64):
    return torch.tensor([value for response in responses for value in getattr(response, name)], dtype=dtype)


class Part:
    """Some responses of a step, as tensors: one micro-batch, or one rank's."""

    def __init__(self, config, responses, rewards, sizes, group=None, context_group=None):
        self.config, self.responses, self.sizes = config, responses, sizes
        self.lengths = [len(response.mask) for response in responses]
        self.rewards_N = torch.tensor([rewards[id(response)] for response in responses], dtype=torch.float64)
        self.mask_T = flat(responses, "mask")
        for name in ("old", "ref", "rollout", "teacher", "values"):
            values_T = flat(responses, name)
            setattr(self, f"{name}_T", values_T.masked_fill(self.mask_T == 0, math.nan))  # masked: anything
        self.new_T = flat(responses, "new").requires_grad_()
        self.entropy_T = flat(responses, "entropy").requires_grad_()
        self.weights_T = loss_weights(
            config, [response.mask for response in responses],
            trajectory_tokens=[sizes["tokens_of"][response.trajectory] for response in responses],
            global_trajectories=sizes["global_trajectories"], global_tokens=sizes["global_tokens"], dtype=torch.float64,
        )  # fmt: skip
        self.group, self.context_group = group, context_group

    def advantages(self):
        return policy_advantages(
            self.config, rewards_N=self.rewards_N, mask_T=self.mask_T, lengths=self.lengths, old_log_probs_T=self.old_T,
            ref_log_probs_T=self.ref_T, teacher_log_probs_T=self.teacher_T, values_T=self.values_T, group=self.group,
        ).advantages_T  # fmt: skip

    def mis_sums(self):
        return mis_weight_sums(
            self.config, train_log_probs_T=self.old_T, rollout_log_probs_T=self.rollout_T, mask_T=self.mask_T,
            weights_T=self.weights_T, lengths=self.lengths, context_group=self.context_group,
        )  # fmt: skip

    def drift(self):
        return drift_statistics(
            train_log_probs_T=self.old_T, rollout_log_probs_T=self.rollout_T, mask_T=self.mask_T,
            weights_T=self.weights_T, lengths=self.lengths, context_group=self.context_group,
        )  # fmt: skip

    def objective(self, advantages_T, mis_sums=None):
        return policy_objective(
            self.config, log_probs_T=self.new_T, old_log_probs_T=self.old_T, advantages_T=advantages_T,
            weights_T=self.weights_T, lengths=self.lengths, ref_log_probs_T=self.ref_T,
            rollout_log_probs_T=self.rollout_T, entropy_T=self.entropy_T, mis_sums=mis_sums,
            context_group=self.context_group,
        )  # fmt: skip

    def gradients(self, loss):
        """Per response, the loss's gradient to its log-probs and entropies, one after the other."""
        found = torch.autograd.grad(loss, (self.new_T, self.entropy_T), allow_unused=True)
        new_T, entropy_T = [torch.zeros_like(self.new_T) if part is None else part for part in found]
        pairs = zip(new_T.split(self.lengths), entropy_T.split(self.lengths), strict=True)
        return {id(response): torch.cat(pair) for response, pair in zip(self.responses, pairs, strict=True)}


def whole(config, responses):
    """Loss, metrics and gradients of a step in one piece."""
    part = Part(config, responses, processed_rewards(config, responses), step_sizes(responses))
    loss, metrics = part.objective(part.advantages(), part.mis_sums())
    return loss, metrics, part.gradients(loss)


def by_the_papers(config, responses):
    """The same, token by token, from the algorithms' definitions; with gradients through torch's scalars."""
    rewards = reference_rewards(config, responses)
    advantages = reference_advantages(config, responses, rewards)
    trajectories = {response.trajectory for response in responses}
    all_tokens = max(sum(sum(response.mask) for response in responses), 1)
    factors = reference_factors(config, responses, advantages, trajectories, all_tokens)
    total, leaves = torch.zeros((), dtype=torch.float64), {}
    for response in responses:
        new = torch.tensor(response.new, dtype=torch.float64, requires_grad=True)
        entropy = torch.tensor(response.entropy, dtype=torch.float64, requires_grad=True)
        leaves[id(response)] = (new, entropy)
        trained = [t for t, kept in enumerate(response.mask) if kept]
        mean_log_ratio = sum((new[t] - response.old[t] for t in trained), torch.tensor(0.0)) / max(len(trained), 1)
        for t in trained:
            advantage = advantages[id(response)][t]
            loss = reference_token_loss(config, new[t], response.old[t], advantage, mean_log_ratio)
            loss = loss * factors[id(response)][t] - config.entropy_coef * entropy[t]
            if config.use_kl_loss:
                ratio = torch.exp(new[t] - response.old[t]) if config.use_unbiased_kl else 1.0
                loss = loss + config.kl_loss_coef * ratio * reference_kl(
                    config.kl_loss_type or "k3", new[t] - response.ref[t]
                )
            weight = reference_weight(config, response, responses, trajectories, all_tokens)
            total = total + weight * loss
    gradients = {}
    for key, pair in leaves.items():
        found = [None, None]
        if total.requires_grad:
            found = torch.autograd.grad(total, pair, allow_unused=True, retain_graph=True)
        gradients[key] = torch.cat(
            [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(pair, found, strict=True)]
        )
    return total, gradients


def reference_weight(config, response, responses, trajectories, all_tokens):
    if config.calculate_per_token_loss:
        return 1 / all_tokens
    if config.loss_divisor is not None:
        return 1 / config.loss_divisor / len(trajectories)
    tokens = sum(sum(other.mask) for other in responses if other.trajectory == response.trajectory)
    return 1 / max(tokens, 1) / len(trajectories)


def reference_kl(kind, d):
    k3 = torch.exp(-torch.as_tensor(d, dtype=torch.float64)) - 1 + d
    return {"k1": d, "k2": d**2 / 2, "k3": k3, "low_var_kl": torch.as_tensor(k3).clamp(-10, 10)}[kind]


def reference_rewards(config, responses):
    result = {}
    for response in responses:
        of_group = {other.trajectory: other.reward for other in responses if other.group == response.group}
        rewards, reward = list(of_group.values()), response.reward
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) if len(rewards) > 1 else 0.0
        match config.advantage_estimator:
            case "grpo" | "gspo" | "cispo":
                divide = std > 0 and not config.disable_grpo_std_normalization
                reward = (reward - mean) / (std + 1e-6 if divide else 1.0)
            case "reinforce_plus_plus_baseline":
                reward = reward - mean
            case "rloo":
                others = [r for trajectory, r in of_group.items() if trajectory != response.trajectory]
                reward = reward - sum(others) / len(others) if others else 0.0
        result[id(response)] = reward
    return result


def reference_advantages(config, responses, rewards):
    result = {}
    for response in responses:
        reward, length = rewards[id(response)], len(response.mask)
        trained = [t for t in range(length) if response.mask[t]]
        advantages = [0.0] * length
        penalty = [
            config.kl_coef * float(reference_kl(config.kl_loss_type or "k1", response.old[t] - response.ref[t]))
            for t in range(length)
        ]
        following, following_value = 0.0, 0.0
        for t in reversed(trained):
            earned = -penalty[t] + (reward if t == trained[-1] else 0.0)
            match config.advantage_estimator:
                case "ppo":
                    delta = earned + config.gamma * following_value - response.values[t]
                    following = delta + config.gamma * config.lambd * following
                    following_value = response.values[t]
                case "reinforce_plus_plus":
                    following = earned + config.gamma * following
                case _:
                    following = reward - penalty[t]
            advantages[t] = following
            if config.use_opd:
                advantages[t] -= config.opd_kl_coef * (response.old[t] - response.teacher[t])
        result[id(response)] = advantages
    if config.normalize_advantages:
        numbers = [
            value
            for response in responses
            for value, kept in zip(result[id(response)], response.mask, strict=True)
            if kept
        ]
        mean = sum(numbers) / max(len(numbers), 1)
        variance = sum((value - mean) ** 2 for value in numbers) / max(len(numbers) - 1, 1)
        result = {key: [(value - mean) / math.sqrt(variance + 1e-8) for value in row] for key, row in result.items()}
    return result


def reference_token_loss(config, new, old, advantage, mean_log_ratio):
    log_ratio = new - old
    if config.advantage_estimator == "gspo":
        # With advantages that differ by token, GSPO-token: the sequence's ratio, the token's own gradient.
        log_ratio = mean_log_ratio.detach() + new - new.detach() if config.kl_coef else mean_log_ratio
    ratio = torch.exp(log_ratio)
    low, high = 1 - config.eps_clip, 1 + config.clip_high
    if config.advantage_estimator == "cispo":
        return -ratio.detach().clamp(low, high) * advantage * new
    loss = torch.maximum(-ratio * advantage, -ratio.clamp(low, high) * advantage)
    if config.eps_clip_c is not None and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-config.eps_clip_c * advantage, dtype=loss.dtype))
    return loss


def reference_factors(config, responses, advantages, trajectories, all_tokens):
    result, weighted, total = {}, 0.0, 0.0
    for response in responses:
        trained = [t for t, kept in enumerate(response.mask) if kept]
        log_ratios = {t: response.old[t] - response.rollout[t] for t in trained}
        at_level = {
            "token": log_ratios,
            "sequence": dict.fromkeys(trained, sum(log_ratios.values())),
            "geometric": dict.fromkeys(trained, sum(log_ratios.values()) / max(len(trained), 1)),
        }
        factors = {}
        for t in trained:
            factor = 1.0
            if config.use_tis:
                ratio = math.exp(log_ratios[t])
                inside = config.tis_clip_low <= ratio <= config.tis_clip
                bounded = min(max(ratio, config.tis_clip_low), config.tis_clip)
                factor = bounded if config.tis_mode == "truncate" else ratio * inside
            if config.use_mis:
                ratio, (low, high) = math.exp(at_level[config.mis_level][t]), config.bounds
                factor = min(ratio, high) if config.mis_mode == "truncate" else min(max(ratio, low), high)
                weight = reference_weight(config, response, responses, trajectories, all_tokens)
                weighted, total = weighted + weight * factor, total + weight
                if config.mis_rs_level is not None:
                    low, high = config.rejection_bounds
                    factor *= low <= math.exp(at_level[config.mis_rs_level][t]) <= high
                if config.mis_veto_threshold is not None:
                    factor *= all(math.exp(value) >= config.mis_veto_threshold for value in log_ratios.values())
            if config.use_opsm:
                drift = sum(response.rollout[k] - response.new[k] for k in trained) / len(trained)
                factor *= not (advantages[id(response)][t] < 0 and drift > config.opsm_delta)
            factors[t] = factor
        result[id(response)] = factors
    if config.use_mis and config.mis_batch_normalize and weighted:
        result = {key: {t: value * total / weighted for t, value in row.items()} for key, row in result.items()}
    return result


def config_of(name):
    return AlgorithmConfig(**CASES[name])


RANK_LENGTHS = [4, 2, 7, 3, 5, 6, 0, 1, 2]
# Which responses the first rank has. Of trajectories of two samples, each rank has one; or one rank has nothing at all.
RANK_SPLITS = ([0, 1, 4, 5, 6], list(range(len(RANK_LENGTHS))))


def rank_differences(rank):
    """On one of two ranks: by case, the largest difference between the step and the same computed in one piece."""
    return {name: max(_difference(config_of(name), rank, split) for split in RANK_SPLITS) for name in CASES}


def _difference(config, rank, split):
    responses = make_responses(RANK_LENGTHS, seed=0, group_size=3)
    loss, metrics, gradients = whole(config, responses)
    mine = [response for number, response in enumerate(responses) if (number in split) == (rank == 0)]
    part = Part(config, mine, processed_rewards(config, responses), step_sizes(responses), group=dist.group.WORLD)
    mis_sums = part.mis_sums()
    dist.all_reduce(mis_sums)
    own_loss, own_metrics = part.objective(part.advantages(), mis_sums)
    own = part.gradients(own_loss)
    sums = torch.stack([own_loss.detach(), *own_metrics.values()])
    dist.all_reduce(sums)
    found = [(sums - torch.stack([loss.detach(), *metrics.values()])).abs().max()]
    found += [(own[id(response)] - gradients[id(response)]).abs().max() for response in mine if response.mask]
    return torch.stack(found).max().item()


def context_differences(rank):
    """The same with every response cut over the two ranks, as zig-zag slices or one rank having nothing of it."""
    configs = {name: config_of(name) for name in CASES}
    configs["a function"] = AlgorithmConfig(use_tis=True, custom_tis_function_path=f"{__file__}:geometric")
    return {name: max(_context_difference(one, rank, count) for count in (2, 3)) for name, one in configs.items()}


def geometric(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, response_lengths, **_):
    """Weights for a user-defined function: each response's mean ratio, and nothing of responses of two tokens."""
    assert [len(mask) for mask in loss_masks] == response_lengths
    means = [
        ((train - rollout) * mask).sum() / mask.sum().clamp(min=1)
        for train, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True)
    ]
    weights = torch.cat([mean.exp().expand(length) for mean, length in zip(means, response_lengths, strict=True)])
    kept = [mask * (len(mask) != 2) for mask in loss_masks]
    return pg_loss * weights, kept, {"mean": torch.stack(means), "weight": weights, "kept": torch.tensor(0.5)}


def _context_difference(config, rank, chunks):
    responses = make_responses(RANK_LENGTHS, seed=0, group_size=3)
    rewards, sizes = processed_rewards(config, responses), step_sizes(responses)
    loss, metrics, gradients = whole(config, responses)
    uncut = Part(config, responses, rewards, sizes)
    advantages = uncut.advantages().split(uncut.lengths)
    mine, kept = [], []
    for response in responses:
        # Chunk c of several goes to rank 0, 1, 1, 0, …: with three chunks of a short response, some are empty.
        length = len(response.mask)
        places = [t for t in range(length) if (t * chunks // length in (0, 3)) == (rank == 0)]
        lists = {name: [getattr(response, name)[t] for t in places] for name in PER_TOKEN}
        mine.append(replace(response, **lists))
        kept.append(places)
    part = Part(
        config, mine, {id(new): rewards[id(old)] for new, old in zip(mine, responses, strict=True)}, sizes,
        context_group=dist.group.WORLD,
    )  # fmt: skip
    mis_sums = part.mis_sums()
    dist.all_reduce(mis_sums)
    own_advantages_T = torch.cat([row[places] for row, places in zip(advantages, kept, strict=True)])
    own_loss, own_metrics = part.objective(own_advantages_T, mis_sums)
    own = part.gradients(own_loss)
    sums = torch.stack([own_loss.detach(), *own_metrics.values()])
    dist.all_reduce(sums)
    found = [(sums - torch.stack([loss.detach(), *metrics.values()])).abs().max()]
    for new, old, places in zip(mine, responses, kept, strict=True):
        expected = gradients[id(old)].view(2, -1)[:, places].flatten()
        found += [(own[id(new)] - expected).abs().max()] if places else []
    drift, whole_drift = part.drift().reduced(dist.group.WORLD).metrics(), uncut.drift().metrics()
    found += [(drift[name] - value).abs() for name, value in whole_drift.items()]
    return torch.stack(found).max().item()
