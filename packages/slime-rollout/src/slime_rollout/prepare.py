"""From a batch to shards that trainers fetch: it is checked, written down and split where it was made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.errors import DataError
from slime_core.hooks import HookArgs
from slime_core.metrics import pass_rates
from slime_core.schedule import RAW_REWARDS, TRAIN_REWARDS, ShardSpec, build_shards
from slime_core.step_plan import token_count
from slime_core.sums import shard_sum
from slime_core.types import RolloutBatch, RolloutColumns, TrainShard
from slime_core.types.arrays import numbers, ragged
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import BatchError
from slime_rollout.hooks.rollouts import RewardPostProcess
from slime_rollout.hooks.train_data import DataPostprocess
from slime_rollout.limits import ModelLimits
from slime_rollout.ready import ReadyRollout, reward_failures, summary, untrained
from slime_rollout.shown import mark_shown, write_shown
from slime_rollout.store import RolloutStore

Put = Callable[[TrainShard], Any]
"""Stores a shard, and returns a reference to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """How every batch of a run is checked, written down and split."""

    shards: ShardSpec  # how batches are split
    rollout: RolloutConfig  # settings of rewards and of user-defined functions
    hook_args: HookArgs = dataclasses.field(repr=False)  # of those functions; keys may be among them
    limits: ModelLimits
    checks_versions: bool  # whether tokens are checked to be of the weights that they may be of: where engines generate
    of_data: bool  # whether they are rows of a data set, which have no rewards
    trains: bool  # whether there are trainers
    log_passrate: bool = False  # whether pass rates are among the metrics
    store: RolloutStore | None = None  # where they are written down; `None` in a run that writes none
    can_resume: bool = False  # whether the data source's state is written with them
    copies: str | None = None  # path of a further copy of each, with `{rollout_id}` in it
    shown: int = 0  # how many samples of each are kept for the report
    shown_in: str | None = None  # the run's directory, for those


def prepare_rollout(
    batch: RolloutBatch, spec: BatchSpec, *, state_dict: Callable[[], dict[str, Any]], put: Put
) -> ReadyRollout:
    """Check a new rollout, write it down with the state of the data source after it, and split it.

    A restart then trains on the same samples and goes on from that state. Raises `BatchError` if tokens are of other
    weights than they may be, the first rollout has no reward, or a file cannot be written; `DataError` if a sample
    cannot be written down or trained on.
    """
    columns = batch.columns()
    if spec.checks_versions:
        may_lag = spec.rollout.may_lag
        check_versions(columns, most_behind=spec.rollout.selection.max_weight_staleness if may_lag else 0)
    if not spec.of_data:
        check_scored(columns)
        add_rewards(batch, columns, spec)
        if spec.log_passrate:
            columns.metrics.update(train_pass_rates(batch, spec.rollout.rewards.reward_key))
    try:
        if spec.store is not None:
            spec.store.write(columns, state_dict() if spec.can_resume else None)
        if spec.copies is not None:
            path = Path(spec.copies.format(rollout_id=columns.rollout_id))
            path.parent.mkdir(parents=True, exist_ok=True)
            columns.write(path)
        if spec.shown_in is not None:
            write_shown(batch, spec.rollout, spec.shown, spec.shown_in)
    except OSError as error:  # a full disk, or a directory that was taken away
        raise BatchError(f"a file of the run can't be written or read: {error}") from None
    check_limits(columns, spec.limits)
    ready, shards = _split(columns, batch, spec)
    del columns  # there is one copy less when the object store takes its own
    return _put(ready, shards, put)


def read_rollout(
    rollout_id: int, spec: BatchSpec, *, load_state_dict: Callable[[dict[str, Any]], None], put: Put
) -> ReadyRollout:
    """Split a rollout that was written down before a restart, and continue the data source after it.

    Raises `DataError` if its file is missing, torn or of an older slime, or a sample cannot be trained on.
    """
    assert spec.store is not None
    columns = spec.store.read(rollout_id)
    load_state_dict(spec.store.read_source_state(rollout_id))
    ready, shards = _split(columns, columns.batch(), spec)
    # The time that generating took was spent before the restart, not in this step.
    ready.seconds.clear()
    ready.seconds.update({"data": 0.0} if spec.of_data else {})
    del columns
    return _put(ready, shards, put)


def _split(columns: RolloutColumns, batch: RolloutBatch, spec: BatchSpec) -> tuple[ReadyRollout, list[TrainShard]]:
    """The rollout without references to its shards, and these; ``batch`` is the same rollout."""
    if spec.trains:
        mark_shown(columns, spec.shown)
    ready, shards = summary(columns, batch, of_data=spec.of_data), split_rollout(columns, spec)
    ready.untrained.update(untrained(columns, shards, spec.shards.global_batch_size))
    return ready, shards


def _put(ready: ReadyRollout, shards: list[TrainShard], put: Put) -> ReadyRollout:
    """The rollout with references to its shards. Each shard's memory here is freed once ``put`` has stored it."""
    ready.shard_sums.extend(map(shard_sum, shards))
    while shards:
        ready.shards.append(put(shards.pop(0)))
    return ready


def split_rollout(batch: RolloutBatch | RolloutColumns, spec: BatchSpec) -> list[TrainShard]:
    """The shards of a rollout, as the function of ``--rollout-data-postprocess-path`` changes them, if there is one.

    Raises `ConfigError` if the function cannot be used, `DataError` if a sample cannot be trained on.
    """
    is_given = spec.rollout.hooks.rollout_data_postprocess_path is not None
    change = DataPostprocess(spec.rollout, spec.hook_args) if is_given else None
    return build_shards(batch, spec.shards, postprocess=change)


def split_held_out(batch: RolloutBatch, spec: BatchSpec) -> list[TrainShard]:
    """The shards of a held-out set: all of its rows are one step, which is computed and not trained on.

    Raises `DataError` if there are fewer rows than data-parallel ranks.
    """
    samples, shards = batch.samples, spec.shards
    if len(samples) < shards.data_parallel_size:
        raise DataError(
            f"a held-out set has {len(batch.groups)} rows for {shards.data_parallel_size} data-parallel ranks; give it "
            "more"
        )
    longest = max(len(sample.tokens) for sample in samples)
    most_tokens = -(-longest * shards.micro_batch_size // shards.context_parallel_size)
    whole = dataclasses.replace(
        shards,
        micro_batch_size=1,
        global_batch_size=len(samples),
        keep_groups_together=False,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=shards.max_tokens_per_gpu or most_tokens,
        cost=token_count,
        drop_untrained=False,
        drop_rest=False,
    )
    return build_shards(batch, whole)


def train_pass_rates(batch: RolloutBatch, reward_key: str | None) -> dict[str, float]:
    """``passrate/pass@k`` of the samples that are trained on."""
    return {f"passrate/{name}": rate for name, rate in pass_rates(batch.samples, reward_key).items()}


def add_rewards(batch: RolloutBatch, columns: RolloutColumns, spec: BatchSpec) -> None:
    """Add the rewards that --custom-reward-post-process-path makes, as extra columns, which are written down too.

    Raises `ConfigError` if the function cannot be used, `DataError` if it did not return two numbers for each sample.
    """
    if spec.rollout.hooks.custom_reward_post_process_path is None:
        return
    raw, rewards = RewardPostProcess(spec.rollout, spec.hook_args)(batch.samples)
    columns.samples[RAW_REWARDS], columns.samples[TRAIN_REWARDS] = np.array(raw), np.array(rewards)


def check_versions(columns: RolloutColumns, *, most_behind: int | None) -> None:
    """Check that tokens are of the weights that a rollout is trained from, or ``most_behind`` versions older at most.

    ``None`` sets no limit. A `BatchError` for tokens of others: an engine missed an update, or somebody else sent it
    weights.
    """
    newest, versions = columns.weight_version, ragged(columns.samples, "weight_versions")
    oldest = None if newest is None or most_behind is None else newest - most_behind

    def not_allowed(values: NDArray[Any]) -> NDArray[Any]:
        wrong = np.full(len(values), newest is None)
        if newest is not None:
            wrong |= values > newest
        if oldest is not None:
            wrong |= values < oldest
        return np.extract(wrong & (values != -1), values)

    if not len(not_allowed(versions.values)):
        return
    allowed = f"{newest} or less" if oldest is None else str(newest) if oldest == newest else f"{oldest} to {newest}"
    for index, row in zip(numbers(columns.samples, "index"), versions.rows, strict=True):
        if row is not None and len(other := not_allowed(row)):
            raise BatchError(
                f"sample {index} of step {columns.rollout_id + 1} has tokens of weight version {other.min()} where all "
                f"must be {allowed}: an engine serves other weights than the trainer's, or a function of yours gives "
                "back what is older than --max-weight-staleness; see that nothing else sends weights to this run's "
                "engines, and start the same command again"
            )


def check_scored(columns: RolloutColumns) -> None:
    """Refuse a run whose first rollout has no reward at all: then the reward itself is wrong, not a service down."""
    if columns.rollout_id:
        return
    reasons = reward_failures(columns)
    if reasons and len(reasons) == sum(columns.group_sizes):
        raise BatchError(
            f"none of the {len(reasons)} samples of the first rollout could be scored: {reasons[0]}; correct the "
            "reward, which slime-rollout check-hooks --run tries out, and start the same command again"
        )


def check_limits(columns: RolloutColumns, limits: ModelLimits) -> None:
    """Raise `DataError` if a sample, wherever it is from, has tokens that the model lacks, or more than its context."""
    for index, row in zip(numbers(columns.samples, "index"), ragged(columns.samples, "tokens").rows, strict=True):
        tokens = [] if row is None or not len(row) else [int(row.min()), int(row.max())]
        if problem := limits.token_problem(tokens) or limits.length_problem(0 if row is None else len(row)):
            raise DataError(f"sample {index} of step {columns.rollout_id + 1} is not of this model: {problem}")
