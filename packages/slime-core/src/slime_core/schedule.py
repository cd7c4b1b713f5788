"""From a scored rollout to what each data-parallel rank trains on. Plain numbers; no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.micro_batches import MicroBatchLimits
from slime_core.rewards import estimator_rewards
from slime_core.step_plan import Cost, StepPlanner, token_count
from slime_core.types import RolloutBatch, Sample, Status, TrainSample, TrainShard, TrainStep

# A sample that failed before it was tokenized gets this one prompt token, so that no rank meets an empty sequence.
_PLACEHOLDER_TOKENS = [0]
_UNTRAINED = (Status.ABORTED, Status.FAILED)
FILLER_INDEX = -1
"""``index`` and ``group_index`` of a sample that only fills a micro-batch: one token, no response, nothing trained."""


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
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    context_parallel_size: int = 1,
    virtual_pipeline_group: int = 1,
    cost: Cost = token_count,
) -> list[TrainShard]:
    """Normalise rewards and split a rollout into optimizer steps, ranks and micro-batches.

    Every sample is in exactly one micro-batch. Steps take whole trajectories in the rollout's order,
    ``global_batch_size`` each; mostly a trajectory is one sample. Within a step the ranks are balanced by ``cost`` and
    have equally many micro-batches, the costliest first. The same rollout gives the same shards.

    Aborted and failed samples are counted as samples but train nothing: their loss mask is zeros, their reward is 0 and
    takes no part in their group's mean.

    Where a step has too few samples for equally many micro-batches (trajectories of several samples, or a token limit
    that most samples fill alone), a micro-batch left empty gets a filler: see :data:`FILLER_INDEX`.

    Args:
        batch: The rollout.
        algorithm: Says how rewards are normalised.
        temperature: The sampling temperature, handed on to the trainer.
        data_parallel_size: Number of shards.
        micro_batch_size: Most samples in a micro-batch; not used with ``use_dynamic_batch_size``.
        global_batch_size: Trajectories in an optimizer step, over all ranks.
        reward_key: Which entry of a reward given by name.
        keep_groups_together: Keep the samples of a prompt in one micro-batch, as far as they fit, so that the trainer
            can compute their prompt once. Ranks may then differ in their number of samples. Where there are too few
            samples for that, the step falls back to single samples. A group that exceeds a limit is cut, and its pieces
            may go to several ranks.
        use_dynamic_batch_size: Limit a micro-batch by its tokens instead of its samples.
        max_tokens_per_gpu: That limit, per context-parallel rank. A sample above it gets a micro-batch to itself.
        context_parallel_size: Number of ranks that share each sequence; a micro-batch holds as many times the tokens.
        virtual_pipeline_group: What the number of micro-batches must be a multiple of; 1 without a virtual pipeline.
        cost: What computing a sequence of so many tokens costs, such as ``FlopsModel(...).training``.

    Returns:
        One shard per rank.

    Raises:
        ConfigError: The sizes do not divide, or there is no token limit to go by.
        DataError: There are no samples, or one has no reward, a reward that is not finite, or a response without a
            prompt.
    """
    samples = batch.samples
    if not samples:
        raise DataError(f"rollout {batch.rollout_id} has no samples")
    trajectories = _trajectories(samples)
    check_batch_sizes(
        num_samples=len(trajectories),
        global_batch_size=global_batch_size,
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
        use_dynamic_batch_size=use_dynamic_batch_size,
        max_tokens_per_gpu=max_tokens_per_gpu,
        context_parallel_size=context_parallel_size,
        virtual_pipeline_group=virtual_pipeline_group,
    )
    max_tokens = max_tokens_per_gpu if use_dynamic_batch_size else None
    planner = StepPlanner(
        samples=_train_samples(samples, algorithm, reward_key),
        ranks=data_parallel_size,
        limits=_limits(micro_batch_size, max_tokens, context_parallel_size, virtual_pipeline_group),
        by_group=keep_groups_together,
        cost=cost,
        context_parallel_size=context_parallel_size,
    )
    return _place(planner, trajectories, global_batch_size, rollout_id=batch.rollout_id, temperature=temperature)


def _limits(micro_batch_size: int, max_tokens: int | None, context_parallel_size: int, group: int) -> MicroBatchLimits:
    if max_tokens is None:
        return MicroBatchLimits(samples=micro_batch_size, multiple=group)
    return MicroBatchLimits(tokens=max_tokens * context_parallel_size, multiple=group)


def _trajectories(samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples of each trajectory, in the order in which the trajectories begin."""
    members: dict[int, list[int]] = {}
    for position, sample in enumerate(samples):
        members.setdefault(sample.trajectory, []).append(position)
    return list(members.values())


def _place(
    planner: StepPlanner,
    trajectories: Sequence[list[int]],
    global_batch_size: int,
    *,
    rollout_id: int,
    temperature: float,
) -> list[TrainShard]:
    """The ranks' shards, filled step by step."""
    shards = [
        TrainShard(rollout_id=rollout_id, temperature=temperature, samples=[], steps=[]) for _ in range(planner.ranks)
    ]
    for start in range(0, len(trajectories), global_batch_size):
        step = trajectories[start : start + global_batch_size]
        members = sorted(position for trajectory in step for position in trajectory)
        tokens = sum(planner.samples[trajectory[0]].trajectory_tokens for trajectory in step)
        for shard, micro_batches in zip(shards, planner.plan(members), strict=True):
            placed: list[list[int]] = []
            for positions in micro_batches:
                first = len(shard.samples)
                shard.samples.extend([planner.samples[position] for position in positions] or [_filler()])
                placed.append(list(range(first, len(shard.samples))))
            shard.steps.append(TrainStep(micro_batches=placed, global_trajectories=len(step), global_tokens=tokens))
    return shards


def _filler() -> TrainSample:
    return TrainSample(
        index=FILLER_INDEX,
        group_index=FILLER_INDEX,
        tokens=_PLACEHOLDER_TOKENS,
        response_length=0,
        loss_mask=[],
        trajectory_tokens=0,
        reward=0.0,
        raw_reward=0.0,
    )


def check_batch_sizes(
    *,
    num_samples: int,
    global_batch_size: int,
    data_parallel_size: int,
    micro_batch_size: int,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    context_parallel_size: int = 1,
    virtual_pipeline_group: int = 1,
) -> None:
    """Check that a rollout splits into whole steps, ranks and micro-batches. Can be asked before a run starts.

    Args:
        num_samples: Samples in a rollout; trajectories, where one may yield several samples.
        global_batch_size: As in :func:`build_shards`, like the others.
        data_parallel_size: Number of ranks.
        micro_batch_size: Most samples in a micro-batch.
        use_dynamic_batch_size: Whether tokens limit a micro-batch instead.
        max_tokens_per_gpu: That limit.
        context_parallel_size: Number of ranks that share each sequence.
        virtual_pipeline_group: What the number of micro-batches must be a multiple of.

    Raises:
        ConfigError: It does not, with the sizes and what to set.
    """
    for name, value in (
        ("--global-batch-size", global_batch_size),
        ("data-parallel size", data_parallel_size),
        ("--micro-batch-size", micro_batch_size),
        ("--max-tokens-per-gpu", max_tokens_per_gpu),
        ("context-parallel size", context_parallel_size),
        ("virtual-pipeline group", virtual_pipeline_group),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be 1 or more")
    if use_dynamic_batch_size and max_tokens_per_gpu is None:
        raise ConfigError("--use-dynamic-batch-size needs a limit to go by; set --max-tokens-per-gpu")
    if num_samples % global_batch_size:
        divisor = max(size for size in range(1, min(num_samples, global_batch_size) + 1) if num_samples % size == 0)
        raise ConfigError(
            f"a rollout of {num_samples} samples does not split into steps of --global-batch-size {global_batch_size}; "
            f"set it to a divisor of {num_samples}, such as {divisor}"
        )
    if use_dynamic_batch_size:
        _check_dynamic(global_batch_size, data_parallel_size, virtual_pipeline_group)
    else:
        _check_fixed(global_batch_size, data_parallel_size, micro_batch_size, virtual_pipeline_group)


def _check_fixed(global_batch_size: int, ranks: int, micro_batch_size: int, group: int) -> None:
    unit = ranks * micro_batch_size * group
    if global_batch_size % unit:
        pipeline = f" × virtual-pipeline group {group}" if group > 1 else ""
        raise ConfigError(
            f"--global-batch-size {global_batch_size} must be a multiple of data-parallel size {ranks} × "
            f"--micro-batch-size {micro_batch_size}{pipeline} = {unit}; set it to "
            f"{(global_batch_size // unit + 1) * unit}, or change the micro-batch size"
        )


def _check_dynamic(global_batch_size: int, ranks: int, group: int) -> None:
    if global_batch_size < ranks * group:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} leaves some micro-batches without a sample: there are "
            f"{ranks} data-parallel ranks × {group} micro-batches or more; set it to {ranks * group} or more"
        )


def _train_samples(samples: Sequence[Sample], algorithm: AlgorithmConfig, reward_key: str | None) -> list[TrainSample]:
    trained = [position for position, sample in enumerate(samples) if sample.status not in _UNTRAINED]
    raw = {position: samples[position].scalar_reward(reward_key) for position in trained}
    processed = estimator_rewards(
        algorithm.advantage_estimator,
        [raw[position] for position in trained],
        [samples[position].group_index for position in trained],
        normalize=not algorithm.disable_rewards_normalization,
        divide_by_std=not algorithm.disable_grpo_std_normalization,
        sample_indices=[samples[position].index for position in trained],
        trajectory_ids=[samples[position].trajectory for position in trained],
    )
    rewards = dict(zip(trained, processed, strict=True))
    tokens: dict[int, int] = defaultdict(int)
    for position, sample in enumerate(samples):
        tokens[sample.trajectory] += sample.trained_tokens if position in rewards else 0
    result = []
    for position, sample in enumerate(samples):
        if sample.response_length and sample.response_length == len(sample.tokens):
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
                trajectory_tokens=tokens[sample.trajectory],
                reward=rewards.get(position, 0.0),
                raw_reward=raw.get(position, 0.0),
                rollout_log_probs=sample.rollout_log_probs,
                teacher_log_probs=sample.teacher_log_probs,
            )
        )
    return result
