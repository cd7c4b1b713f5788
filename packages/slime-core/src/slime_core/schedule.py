"""From a scored rollout to what each data-parallel rank trains on. Plain numbers; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.packing import Bin, Block, num_samples, pack, split_to
from slime_core.rewards import normalize_group_rewards
from slime_core.types import RolloutBatch, Sample, Status, TrainSample, TrainShard, TrainStep

# A sample that failed before it was tokenized gets this one prompt token, so that no rank meets an empty sequence.
_PLACEHOLDER_TOKENS = [0]
_UNTRAINED = (Status.ABORTED, Status.FAILED)

RankSteps = list[list[int]]
"""Per micro-batch of one optimizer step on one rank, positions of samples in the rollout."""


def build_shards(
    batch: RolloutBatch,
    *,
    algorithm: AlgorithmConfig,
    temperature: float,
    data_parallel_size: int,
    micro_batch_size: int,
    global_batch_size: int,
    reward_key: str | None = None,
    keep_groups_together: bool = False,
) -> list[TrainShard]:
    """Normalise rewards and split a rollout into optimizer steps, ranks and micro-batches.

    Every sample is in exactly one micro-batch. Steps take the samples in the rollout's order, ``global_batch_size``
    each. Within a step the ranks are balanced by tokens and have equally many micro-batches, the largest first. The
    same rollout gives the same shards.

    Aborted and failed samples are counted as samples but train nothing: their loss mask is zeros, their reward is 0 and
    takes no part in their group's mean.

    Args:
        batch: The rollout.
        algorithm: Says how rewards are normalised.
        temperature: The sampling temperature, handed on to the trainer.
        data_parallel_size: Number of shards.
        micro_batch_size: Most samples in a micro-batch.
        global_batch_size: Samples in an optimizer step, over all ranks.
        reward_key: Which entry of a reward given by name.
        keep_groups_together: Keep the samples of a prompt on one rank and, as far as they fit, in one micro-batch, so
            that the trainer can compute their prompt once. Ranks may then differ in their number of samples. Where
            whole groups cannot give every rank equally many micro-batches, that step falls back to single samples.

    Returns:
        One shard per rank.

    Raises:
        ConfigError: The sizes do not divide.
        DataError: There are no samples, or one has no reward, a reward that is not finite, or a response without a
            prompt.
    """
    samples = batch.samples
    if not samples:
        raise DataError(f"rollout {batch.rollout_id} has no samples")
    check_batch_sizes(
        num_samples=len(samples),
        global_batch_size=global_batch_size,
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
    )
    train_samples = _train_samples(samples, algorithm, reward_key)
    shard_samples: list[list[TrainSample]] = [[] for _ in range(data_parallel_size)]
    shard_steps: list[list[TrainStep]] = [[] for _ in range(data_parallel_size)]
    for start in range(0, len(samples), global_batch_size):
        members = range(start, start + global_batch_size)
        global_tokens = sum(sum(train_samples[position].loss_mask) for position in members)
        ranks = _plan_step(train_samples, members, data_parallel_size, micro_batch_size, keep_groups_together)
        for rank, micro_batches in enumerate(ranks):
            placed: list[list[int]] = []
            for positions in micro_batches:
                first = len(shard_samples[rank])
                shard_samples[rank] += [train_samples[position] for position in positions]
                placed.append(list(range(first, first + len(positions))))
            shard_steps[rank].append(
                TrainStep(micro_batches=placed, global_samples=global_batch_size, global_tokens=global_tokens)
            )
    return [
        TrainShard(rollout_id=batch.rollout_id, temperature=temperature, samples=rank_samples, steps=rank_steps)
        for rank_samples, rank_steps in zip(shard_samples, shard_steps, strict=True)
    ]


def check_batch_sizes(
    *, num_samples: int, global_batch_size: int, data_parallel_size: int, micro_batch_size: int
) -> None:
    """Check that a rollout splits into whole steps, ranks and micro-batches. Can be asked before a run starts.

    Raises:
        ConfigError: It does not, with the sizes and what to set.
    """
    for name, value in (
        ("--global-batch-size", global_batch_size),
        ("data-parallel size", data_parallel_size),
        ("--micro-batch-size", micro_batch_size),
    ):
        if value < 1:
            raise ConfigError(f"{name} {value} must be 1 or more")
    if num_samples % global_batch_size:
        divisor = max(size for size in range(1, min(num_samples, global_batch_size) + 1) if num_samples % size == 0)
        raise ConfigError(
            f"a rollout of {num_samples} samples does not split into steps of --global-batch-size {global_batch_size}; "
            f"set it to a divisor of {num_samples}, such as {divisor}"
        )
    unit = data_parallel_size * micro_batch_size
    if global_batch_size % unit:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} must be a multiple of data-parallel size {data_parallel_size} × "
            f"--micro-batch-size {micro_batch_size} = {unit}; set it to {(global_batch_size // unit + 1) * unit}, or "
            "change the micro-batch size"
        )


def _train_samples(samples: Sequence[Sample], algorithm: AlgorithmConfig, reward_key: str | None) -> list[TrainSample]:
    trained = [position for position, sample in enumerate(samples) if sample.status not in _UNTRAINED]
    raw = {position: samples[position].scalar_reward(reward_key) for position in trained}
    normalized = normalize_group_rewards(
        [raw[position] for position in trained],
        [samples[position].group_index for position in trained],
        subtract_mean=not algorithm.disable_rewards_normalization,
        divide_by_std=not (algorithm.disable_rewards_normalization or algorithm.disable_grpo_std_normalization),
        sample_indices=[samples[position].index for position in trained],
    )
    rewards = dict(zip(trained, normalized, strict=True))
    result = []
    for position, sample in enumerate(samples):
        if sample.response_length and not sample.prompt_tokens:
            raise DataError(
                f"sample {sample.index} has a response but no prompt tokens, so nothing predicts its first token; "
                "give every prompt a token, such as the tokenizer's first one"
            )
        result.append(
            TrainSample(
                index=sample.index,
                group_index=sample.group_index,
                tokens=sample.tokens or _PLACEHOLDER_TOKENS,
                response_length=sample.response_length,
                loss_mask=sample.trained_mask if position in rewards else [0] * sample.response_length,
                reward=rewards.get(position, 0.0),
                raw_reward=raw.get(position, 0.0),
                rollout_log_probs=sample.rollout_log_probs,
            )
        )
    return result


def _plan_step(
    samples: Sequence[TrainSample], members: Sequence[int], ranks: int, micro_batch_size: int, by_group: bool
) -> list[RankSteps]:
    """Per rank, its micro-batches as positions in ``samples``."""

    def make_block(positions: Sequence[int]) -> Block:
        return _block(samples, positions)

    plan: list[list[Bin]] = []
    if by_group:
        groups: dict[int, list[int]] = defaultdict(list)
        for position in members:
            groups[samples[position].group_index].append(position)
        plan = _spread([make_block(group) for group in groups.values()], ranks, micro_batch_size, make_block)
    count = max(map(len, plan), default=0)
    if not plan or any(sum(map(num_samples, bins)) < count for bins in plan):
        plan = _spread([make_block([position]) for position in members], ranks, micro_batch_size, make_block)
        count = len(plan[0])  # the sizes divide, so all ranks have equally many
    return [_in_order(samples, split_to(count, bins, make_block)) for bins in plan]


def _spread(
    blocks: list[Block], ranks: int, micro_batch_size: int, make_block: Callable[[Sequence[int]], Block]
) -> list[list[Bin]]:
    """Blocks to ranks, then each rank's blocks, cut to fit, to as few micro-batches as they need."""
    plan = []
    for rank_blocks in pack(blocks, bins=ranks, capacity=num_samples(blocks) // ranks):
        pieces = [
            make_block(block.positions[start : start + micro_batch_size])
            for block in rank_blocks
            for start in range(0, len(block.positions), micro_batch_size)
        ]
        fewest = -(-num_samples(pieces) // micro_batch_size)
        plan.append(pack(pieces, bins=fewest, capacity=micro_batch_size, grow=True))
    return plan


def _in_order(samples: Sequence[TrainSample], bins: list[list[Block]]) -> RankSteps:
    """Positions per micro-batch, most tokens first: memory trouble shows at once, and ranks keep pace."""
    micro_batches = [sorted(position for block in bin_ for position in block.positions) for bin_ in bins]
    return sorted(micro_batches, key=lambda positions: (-_block(samples, positions).tokens, positions))


def _block(samples: Sequence[TrainSample], positions: Sequence[int]) -> Block:
    """Samples that stay together; a prompt that several of them share counts once."""
    members = [samples[position] for position in positions]
    prompts = {(sample.group_index, tuple(sample.tokens[: sample.prompt_length])) for sample in members}
    tokens = sum(len(prompt) for _, prompt in prompts) + sum(sample.response_length for sample in members)
    return Block(tuple(positions), tokens)
