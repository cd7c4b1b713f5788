"""From a scored rollout to what each data-parallel rank trains on. Arrays; no torch."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError, DataError
from slime_core.micro_batches import MicroBatchLimits
from slime_core.rewards import estimator_rewards
from slime_core.step_plan import Cost, StepPlanner, token_count
from slime_core.types import RolloutBatch, RolloutColumns, Status, TrainSample, TrainShard, TrainStep
from slime_core.types.arrays import (
    KEPT,
    ROUTED,
    SAMPLE_COLUMNS,
    STATUSES,
    Columns,
    Ragged,
    json_rows,
    numbers,
    read_kept,
)
from slime_core.types.routed import routed_rows
from slime_core.types.sample import scalar_reward
from slime_core.types.train import KEPT_COUNTS, KEPT_IDS, ROUTED_EXPERTS

# A sample that failed before it was tokenized gets this one prompt token, so that no rank meets an empty sequence.
_PLACEHOLDER_TOKENS = np.zeros(1, np.int32)
_UNTRAINED = [STATUSES.index(status) for status in (Status.ABORTED, Status.FAILED)]
_CARRIED = ("weight_versions",)  # fields of a sample that the trainer does not need to understand
RAW_REWARDS, TRAIN_REWARDS = "post_processed_raw_reward", "post_processed_reward"
"""Extra columns of a rollout whose rewards a user-defined function has made; they are not normalised again."""
_NOT_EXTRA = SAMPLE_COLUMNS - {*_CARRIED} | {KEPT, ROUTED, RAW_REWARDS, TRAIN_REWARDS}
Postprocess = Callable[[int, Sequence[TrainSample]], list[TrainSample]]
"""From a rollout's number and its samples to the samples to train on: the same ones, in the same order."""
FILLER_INDEX = -1
"""``index`` of samples that filled empty micro-batches in shards of earlier versions; it goes with the next release."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """How each rollout of a run is split; made once.

    Attributes:
        algorithm: Says how rewards are normalised.
        temperature: The sampling temperature, handed on to the trainer.
        data_parallel_size: Number of shards.
        micro_batch_size: Most samples in a micro-batch; not used with ``use_dynamic_batch_size``.
        global_batch_size: Trajectories in an optimizer step, over all ranks.
        reward_key: Which entry of a reward given by name.
        keep_groups_together: Keep the samples of a prompt in one micro-batch where they fit, so it is computed once.
        pairs: Groups are preference pairs, which stay in one micro-batch and get their metadata's ``margin`` as extra.
        use_dynamic_batch_size: Limit a micro-batch by ``max_tokens_per_gpu`` instead.
        max_tokens_per_gpu: Most tokens, per context-parallel rank; a longer sample gets a micro-batch to itself.
        context_parallel_size: Number of ranks that share each sequence; a micro-batch holds as many times the tokens.
        cost: What computing a sequence of so many tokens costs, such as ``FlopsModel(...).training``.
        drop_untrained: Leave out samples that cannot change the weights, before ranks are balanced; they are counted.
        drop_rest: Leave out the last trajectories, which fill no step, where this would refuse; fewer are one step.
        needs_kept: Tokens were sampled under top-p, top-k or min-p, so every trained one needs its kept tokens.
        needs_experts: The trainer is to choose the engine's experts, so it must know them up to each trained token.
    """

    algorithm: AlgorithmConfig
    temperature: float
    data_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    reward_key: str | None = None
    keep_groups_together: bool = False
    pairs: bool = False
    use_dynamic_batch_size: bool = False
    max_tokens_per_gpu: int | None = None
    context_parallel_size: int = 1
    cost: Cost = token_count
    drop_untrained: bool = False
    drop_rest: bool = False
    needs_kept: bool = False
    needs_experts: bool = False


def build_shards(
    batch: RolloutBatch | RolloutColumns,
    spec: ShardSpec | None = None,
    *,
    postprocess: Postprocess | None = None,
    **former: Any,
) -> list[TrainShard]:
    """Normalise rewards and split a rollout into a shard per rank, in optimizer steps and micro-batches.

    Every sample is in exactly one micro-batch, unless ``drop_untrained`` leaves it out. Steps take whole trajectories
    in the rollout's order, ``global_batch_size`` each. In a step, ranks are balanced by ``cost`` and have equally many
    micro-batches, the costliest first; the trainer fills empty ones. Aborted and failed samples
    are counted but train nothing, also not by their group's mean. The same rollout gives the same shards.

    Args:
        spec: How to split it.
        postprocess: Changes masks, rewards, log-probs or extras of the samples before they are split.
        former: The fields of ``spec``, one by one, with a `DeprecationWarning`: the earlier signature.

    Raises:
        ConfigError: The sizes do not divide, or the token limit is missing.
        DataError: The rollout is empty, a group is not a pair, or a sample lacks a reward, a prompt or what it needs.
    """
    if spec is None:
        warnings.warn(
            "build_shards(batch, algorithm=…, …) is now build_shards(batch, ShardSpec(algorithm=…, …)); the old "
            "signature goes with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        former.pop("virtual_pipeline_group", None)  # it had no effect on what ranks compute
        spec = ShardSpec(**former)
    elif former:
        raise TypeError(f"build_shards takes {', '.join(former)} as a part of its ShardSpec")
    trajectories = _trajectories(columns := (batch.columns() if isinstance(batch, RolloutBatch) else batch).samples)
    samples = _prepared(columns, spec, batch.rollout_id, trajectories, postprocess)
    if spec.needs_kept:
        _check_kept(samples)
    if spec.needs_experts:
        _check_experts(samples)
    trajectories, num_samples = _stepped(trajectories, spec.global_batch_size, spec.drop_rest)
    check_batch_sizes(
        num_samples=num_samples,
        global_batch_size=spec.global_batch_size,
        data_parallel_size=spec.data_parallel_size,
        micro_batch_size=spec.micro_batch_size,
        use_dynamic_batch_size=spec.use_dynamic_batch_size,
        max_tokens_per_gpu=spec.max_tokens_per_gpu,
        context_parallel_size=spec.context_parallel_size,
        pairs=spec.pairs,
    )
    samples = _pairs(columns, samples) if spec.pairs else samples
    planner = StepPlanner(
        samples=samples,
        ranks=spec.data_parallel_size,
        limits=_limits(spec),
        by_group=spec.keep_groups_together,
        pairs=spec.pairs,
        cost=spec.cost,
        context_parallel_size=spec.context_parallel_size,
    )
    leaves_out = spec.drop_untrained and not spec.pairs
    chosen = _trainable(samples, spec.algorithm) if leaves_out else range(len(samples))
    return _place(planner, trajectories, spec.global_batch_size, chosen, batch.rollout_id, spec.temperature)


def _stepped(trajectories: list[list[int]], size: int, drop_rest: bool) -> tuple[list[list[int]], int]:
    """The trajectories for steps of ``size``, and the number of them that must be a multiple of it."""
    if not drop_rest or size < 1:
        return trajectories, len(trajectories)
    kept = trajectories[: whole_steps(len(trajectories), size)]
    return kept, max(len(kept), size)


def whole_steps(trajectories: int, global_batch_size: int) -> int:
    """How many of a rollout's trajectories fill steps: a multiple of a step's, or all where one step takes more."""
    return trajectories // global_batch_size * global_batch_size or trajectories


def beyond_whole_steps(rollout: RolloutColumns, global_batch_size: int) -> list[int]:
    """Positions of the samples that ``drop_rest`` leaves out."""
    trajectories = _trajectories(rollout.samples)
    return [at for parts in trajectories[whole_steps(len(trajectories), global_batch_size) :] for at in parts]


def _limits(spec: ShardSpec) -> MicroBatchLimits:
    """Samples of a micro-batch, or its tokens on all ranks that share a sequence."""
    tokens = spec.max_tokens_per_gpu if spec.use_dynamic_batch_size else None
    return MicroBatchLimits(
        samples=None if tokens else spec.micro_batch_size,
        tokens=None if tokens is None else tokens * spec.context_parallel_size,
    )


def _trainable(samples: Sequence[TrainSample], algorithm: AlgorithmConfig) -> set[int]:
    """Positions of the samples that can change the policy's weights."""
    ignored = algorithm.zero_rewards_add_nothing
    return {at for at, one in enumerate(samples) if one.loss_mask.any() and not (ignored and one.reward == 0)}


def _prepared(
    columns: Columns,
    spec: ShardSpec,
    rollout_id: int,
    trajectories: Sequence[list[int]],
    postprocess: Postprocess | None,
) -> list[TrainSample]:
    """The samples as ``postprocess`` leaves them, with the number of trained tokens of their trajectory."""
    samples = train_samples(columns, spec.algorithm, spec.reward_key, with_experts=spec.needs_experts)
    if not samples:
        raise DataError(f"rollout {rollout_id} has no samples")
    if postprocess is None:
        return samples
    samples = postprocess(rollout_id, samples)
    counts = {at: sum(int(samples[part].loss_mask.sum()) for part in parts) for parts in trajectories for at in parts}
    return [dataclasses.replace(sample, trajectory_tokens=counts[at]) for at, sample in enumerate(samples)]


def _pairs(columns: Columns, samples: list[TrainSample]) -> list[TrainSample]:
    """The samples with their margins, if they are pairs one after the other."""
    _check_pairs(samples)
    given = [values or {} for values in json_rows(columns, "train_metadata")]
    margins = [float(values.get("margin") or 0.0) for values in given]
    return [
        dataclasses.replace(sample, extras=sample.extras | {"margin": margin})
        for sample, margin in zip(samples, margins, strict=True)
    ]


def check_pairs(rollout: RolloutColumns, algorithm: AlgorithmConfig, *, reward_key: str | None = None) -> None:
    """Check that a rollout consists of preference pairs.

    Raises:
        DataError: A group is none: the message has its number.
    """
    _check_pairs(train_samples(rollout.samples, algorithm, reward_key))


def _check_pairs(samples: Sequence[TrainSample]) -> None:
    sizes = Counter(sample.group_index for sample in samples)
    for one, other in zip_longest(samples[::2], samples[1::2]):
        together = other is not None and one.group_index == other.group_index and sizes[one.group_index] == 2
        if not together or one.raw_reward == other.raw_reward:
            raise DataError(
                f"group {one.group_index} is not a preference pair: give it two samples, one after the other, the "
                "preferred one with the larger reward"
            )


def _trajectories(columns: Columns) -> list[list[int]]:
    """Positions of the samples of each trajectory, in the order in which the trajectories begin."""
    members: dict[int, list[int]] = {}
    for position, trajectory in enumerate(_trajectory_ids(columns)):
        members.setdefault(trajectory, []).append(position)
    return list(members.values())


def _trajectory_ids(columns: Columns) -> list[int]:
    ids, index = numbers(columns, "trajectory_id"), numbers(columns, "index")
    return [own if given < 0 else given for given, own in zip(ids, index, strict=True)]


def _place(
    planner: StepPlanner,
    trajectories: Sequence[list[int]],
    global_batch_size: int,
    chosen: Container[int],
    rollout_id: int,
    temperature: float,
) -> list[TrainShard]:
    """The ranks' shards of the chosen samples, filled step by step."""
    samples: list[list[TrainSample]] = [[] for _ in range(planner.ranks)]
    steps: list[list[TrainStep]] = [[] for _ in range(planner.ranks)]
    for start in range(0, len(trajectories), global_batch_size):
        step = trajectories[start : start + global_batch_size]
        members = sorted(position for trajectory in step for position in trajectory if position in chosen)
        tokens = sum(planner.samples[trajectory[0]].trajectory_tokens for trajectory in step)
        for rank, micro_batches in enumerate(planner.plan(members)):
            placed: list[list[int]] = []
            for positions in micro_batches:
                first = len(samples[rank])
                samples[rank].extend(planner.samples[position] for position in positions)
                placed.append(list(range(first, len(samples[rank]))))
            steps[rank].append(TrainStep(micro_batches=placed, global_trajectories=len(step), global_tokens=tokens))
    return [
        TrainShard.of(rollout_id=rollout_id, temperature=temperature, samples=own, steps=own_steps)
        for own, own_steps in zip(samples, steps, strict=True)
    ]


def check_batch_sizes(
    *,
    num_samples: int,
    global_batch_size: int,
    data_parallel_size: int,
    micro_batch_size: int,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    context_parallel_size: int = 1,
    pairs: bool = False,
) -> None:
    """Check that a rollout splits into whole steps, ranks and micro-batches. Can be asked before a run starts.

    ``num_samples`` counts trajectories, of one sample or several; the others are those of :class:`ShardSpec`.

    Raises:
        ConfigError: It does not, with the sizes and what to set.
    """
    for name, value in (
        ("--global-batch-size", global_batch_size),
        ("data-parallel size", data_parallel_size),
        ("--micro-batch-size", micro_batch_size),
        ("--max-tokens-per-gpu", max_tokens_per_gpu),
        ("context-parallel size", context_parallel_size),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be 1 or more")
    if use_dynamic_batch_size and max_tokens_per_gpu is None:
        raise ConfigError("--use-dynamic-batch-size needs a limit to go by; set --max-tokens-per-gpu")
    micro_batch = 2 if use_dynamic_batch_size else micro_batch_size
    for flag, size in (("--global-batch-size", global_batch_size), ("--micro-batch-size", micro_batch)):
        if pairs and size % 2:
            raise ConfigError(
                f"{flag} {size} counts samples, and preference pairs are two each; give an even number, such as "
                f"{size + 1}"
            )
    if num_samples % global_batch_size:
        divisor = max(size for size in range(1, min(num_samples, global_batch_size) + 1) if num_samples % size == 0)
        raise ConfigError(
            f"a rollout of {num_samples} samples does not split into steps of --global-batch-size {global_batch_size}; "
            f"set it to a divisor of {num_samples}, such as {divisor}"
        )
    ranks, unit = data_parallel_size, data_parallel_size * micro_batch_size
    if use_dynamic_batch_size and global_batch_size < ranks:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} leaves some micro-batches without a sample: there are "
            f"{ranks} data-parallel ranks × 1 micro-batches or more; set it to {ranks} or more"
        )
    if not use_dynamic_batch_size and global_batch_size % unit:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} must be a multiple of data-parallel size {ranks} × "
            f"--micro-batch-size {micro_batch_size} = {unit}; set it to {(global_batch_size // unit + 1) * unit}, or "
            "change the micro-batch size"
        )


def train_samples(
    columns: Columns, algorithm: AlgorithmConfig, reward_key: str | None, *, with_experts: bool = False
) -> list[TrainSample]:
    """A view of each sample, with its reward as the estimator takes it; a `DataError` for one without a reward."""
    index, groups = numbers(columns, "index"), numbers(columns, "group_index")
    trajectories, given = _trajectory_ids(columns), json_rows(columns, "reward")
    trained = [at for at, status in enumerate(numbers(columns, "status")) if status not in _UNTRAINED]
    raw = {at: scalar_reward(index[at], given[at], reward_key) for at in trained}
    if TRAIN_REWARDS in columns:
        made, given_raw = _rows(columns, TRAIN_REWARDS), _rows(columns, RAW_REWARDS)
        processed, raw = [float(made[at]) for at in trained], {at: float(given_raw[at]) for at in trained}
    else:
        processed = estimator_rewards(
            algorithm.advantage_estimator,
            [raw[at] for at in trained],
            [groups[at] for at in trained],
            normalize=not algorithm.disable_rewards_normalization,
            divide_by_std=not algorithm.disable_grpo_std_normalization,
            sample_indices=[index[at] for at in trained],
            trajectory_ids=[trajectories[at] for at in trained],
        )
    rewards = dict(zip(trained, processed, strict=True))
    masks = _trained_masks(columns, rewards.keys())
    counts: dict[int, int] = defaultdict(int)
    for trajectory, mask in zip(trajectories, masks, strict=True):
        counts[trajectory] += int(np.count_nonzero(mask))
    known = {name: _rows(columns, name) for name in ("tokens", "rollout_log_probs", "teacher_log_probs")}
    lengths = numbers(columns, "response_length")
    _check_prompts(index, lengths, known["tokens"])
    extras = {name: _rows(columns, name) for name in columns if name not in _NOT_EXTRA}
    if KEPT in columns:
        extras |= _kept_extras(index, _rows(columns, KEPT))
    if with_experts and ROUTED in columns:
        extras[ROUTED_EXPERTS] = _expert_rows(index, _rows(columns, ROUTED))
    return [
        TrainSample(
            index=index[at],
            group_index=groups[at],
            tokens=tokens if len(tokens) else _PLACEHOLDER_TOKENS,
            response_length=lengths[at],
            loss_mask=masks[at],
            trajectory_tokens=counts[trajectories[at]],
            reward=rewards.get(at, 0.0),
            raw_reward=raw.get(at, 0.0),
            rollout_log_probs=known["rollout_log_probs"][at],
            teacher_log_probs=known["teacher_log_probs"][at],
            extras={name: rows[at] for name, rows in extras.items()},
        )
        for at, tokens in enumerate(known["tokens"])
    ]


def _trained_masks(columns: Columns, trained: Container[int]) -> list[NDArray[np.uint8]]:
    """The loss masks written out: zeros for samples that are not in ``trained`` or marked ``remove_sample``."""
    masks = []
    removed, lengths = numbers(columns, "remove_sample"), numbers(columns, "response_length")
    for at, mask in enumerate(_rows(columns, "loss_mask")):
        if removed[at] or at not in trained:
            masks.append(np.zeros(lengths[at], np.uint8))
        else:
            masks.append(np.ones(lengths[at], np.uint8) if mask is None else mask)
    return masks


def _kept_extras(index: Sequence[int], texts: Sequence[NDArray[np.uint8] | None]) -> dict[str, list[Any]]:
    """The kept tokens of each sample as two arrays."""
    read = [
        (None, None) if text is None else read_kept(f"sample {number}", text)
        for number, text in zip(index, texts, strict=True)
    ]
    ids, counts = zip(*read, strict=True)
    return {KEPT_IDS: list(ids), KEPT_COUNTS: list(counts)}


def _check_kept(samples: Sequence[TrainSample]) -> None:
    for sample in samples:
        counts, mask = sample.extras.get(KEPT_COUNTS), sample.loss_mask.astype(bool)
        if mask.any() and (counts is None or not counts[mask].all()):
            raise DataError(
                f"sample {sample.index} does not say which tokens each of its own was sampled from, which "
                "--rollout-top-p, --rollout-top-k and --rollout-min-p need for training; generate it with Trajectory "
                "or generate_single, set sample.kept_tokens, or leave these flags out"
            )


def _expert_rows(index: Sequence[int], texts: Sequence[NDArray[np.uint8] | None]) -> list[Any]:
    """The experts of each sample's tokens. Raises DataError if samples differ in the numbers of a token."""
    found = [
        None if text is None else routed_rows(f"sample {number}", text.tobytes().decode(errors="replace"))
        for number, text in zip(index, texts, strict=True)
    ]
    widths = sorted({rows.shape[1] for rows in found if rows is not None})
    if len(widths) > 1:
        raise DataError(f"samples have {widths} numbers per token in routed_experts; one model made all of them")
    return found


def _check_experts(samples: Sequence[TrainSample]) -> None:
    for sample in samples:
        trained, rows = np.flatnonzero(sample.loss_mask), sample.extras.get(ROUTED_EXPERTS)
        known = 0 if rows is None else len(rows)
        wanted = sample.prompt_length + int(trained[-1]) if len(trained) else 0
        if known < wanted:
            raise DataError(
                f"sample {sample.index} names the engine's experts for {known} tokens, and "
                f"--use-rollout-routing-replay needs them for the {wanted} before its last trained one; generate it "
                "with Trajectory or generate_single, set sample.routed_experts, or leave the flag out"
            )


def _check_prompts(index: Sequence[int], lengths: Sequence[int], tokens: Sequence[NDArray[Any]]) -> None:
    for number, length, row in zip(index, lengths, tokens, strict=True):
        if length and length == len(row):
            raise DataError(
                f"sample {number} has a response but no prompt tokens, so nothing predicts its first token; "
                "give every prompt a token, such as the tokenizer's first one"
            )


def _rows(columns: Columns, name: str) -> list[Any]:
    """A row per sample, or its value."""
    column = columns[name]
    return column.rows if isinstance(column, Ragged) else [*column]
