"""From a generated rollout to what the trainer's ranks take, where the rollout is: only references travel."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_convert.shape import ModelShape
from slime_core.errors import DataError
from slime_core.metrics import pass_rates
from slime_core.schedule import RAW_REWARDS, TRAIN_REWARDS, beyond_whole_steps, build_shards
from slime_core.step_plan import token_count
from slime_core.sums import sample_sums, shard_sum
from slime_core.types import Message, RolloutBatch, RolloutColumns, Sample, Span, Status, TrainShard
from slime_core.types.arrays import STATUSES, json_rows, numbers, ragged
from slime_launch.config import Settings
from slime_launch.errors import RunError
from slime_launch.shown import mark_shown, write_shown
from slime_launch.validate import global_batch_size
from slime_megatron.operations import flops_model
from slime_rollout.errors import REWARD_FAILURE
from slime_rollout.hooks import hook_args_of
from slime_rollout.hooks.rollouts import RewardPostProcess
from slime_rollout.hooks.train_data import DataPostprocess
from slime_rollout.limits import ModelLimits
from slime_rollout.store import RolloutStore

EXAMPLES = 3
ANSWER_CHARACTERS = 60  # of an answer in a conversation, by which it is found in what is trained on
EMPTY, MASKED, NO_ADVANTAGE = "no response", "loss mask 0", "advantage 0"
REMOVED, NO_STEP = "left out by a function or a filter", "more than fill a step"
REASONS = (EMPTY, MASKED, NO_ADVANTAGE, REMOVED, NO_STEP)
"""Why a sample is not trained on."""
Example = dict[str, Any]
"""A sample for people to read: the texts of its ``prompt`` and ``response``, its ``reward``, maybe its ``set``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is made of every rollout of a run.

    Attributes:
        store: Where rollouts are written down; ``None`` in a run that writes none.
        can_resume: Whether the data source's state is written with them.
    """

    settings: Settings
    shape: ModelShape
    data_parallel_size: int
    store: RolloutStore | None
    can_resume: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadyRollout:
    """A rollout that can be trained on: all that the loop needs of it, and where its shards are.

    Attributes:
        weight_version: Version of the weights that it is to be trained from; ``None`` if unknown.
        metrics: Named numbers for tracking.
        seconds: Wall time per phase.
        failures: Why samples could not be scored, a reason for each of them.
        untrained: How many samples are not trained on, by the reason.
        examples: Its first samples, for people to read.
        shards: References to the shards in Ray's object store, by data-parallel rank.
        spans: When it was generated, scored and split.
        sample_sums: :func:`slime_core.sums.sample_sums`, and each sample's number as ``index``.
        shard_sums: :func:`slime_core.sums.shard_sum` of each data-parallel rank.
    """

    rollout_id: int
    weight_version: int | None
    metrics: dict[str, float]
    seconds: dict[str, float]
    num_samples: int
    failures: list[str]
    examples: list[Example]
    shards: list[Any]
    untrained: dict[str, int] = dataclasses.field(default_factory=dict)
    spans: list[Span] = dataclasses.field(default_factory=list)
    sample_sums: dict[str, NDArray[Any]] = dataclasses.field(default_factory=dict)
    shard_sums: list[int] = dataclasses.field(default_factory=list)


def prepare_rollout(
    batch: RolloutBatch,
    recipe: Recipe,
    *,
    state_dict: Callable[[], dict[str, Any]],
    put: Callable[[TrainShard], Any],
) -> ReadyRollout:
    """Check a new rollout, write it down with the state of the data source after it, and split it.

    A restart then trains on the same samples and goes on from that state. ``put`` makes a shard a reference to it.

    Raises:
        RunError: Its tokens are of other weights than they may be, or it is the first and has no reward.
        DataError: A sample cannot be written down or trained on.
    """
    columns = batch.columns()
    settings = recipe.settings
    if settings.generates:
        rollout = settings.rollout
        check_versions(columns, most_behind=rollout.selection.max_weight_staleness if rollout.may_lag else 0)
    if settings.rows is None:
        check_scored(columns)
        add_rewards(batch, columns, settings)
        if settings.run.log_passrate:
            columns.metrics.update(train_pass_rates(batch, settings))
    if recipe.store is not None:
        with said_of_files():
            recipe.store.write(columns, state_dict() if recipe.can_resume else None)
    if settings.run.save_debug_rollout_data is not None:
        path = Path(settings.run.save_debug_rollout_data.format(rollout_id=columns.rollout_id))
        with said_of_files():
            path.parent.mkdir(parents=True, exist_ok=True)
            columns.write(path)
    with said_of_files():
        write_shown(batch, settings)
    mark_shown(columns, settings)
    check_limits(columns, recipe.shape)
    ready, shards = summary(columns, batch, recipe), split_rollout(columns, recipe)
    ready.untrained.update(untrained(columns, shards, global_batch_size(recipe.settings)))
    del columns  # there is one copy less when the object store takes its own
    return put_shards(ready, shards, put)


def train_pass_rates(batch: RolloutBatch, settings: Settings) -> dict[str, float]:
    """``passrate/pass@k`` of the samples that are trained on."""
    rates = pass_rates(batch.samples, settings.rollout.rewards.reward_key)
    return {f"passrate/{name}": rate for name, rate in rates.items()}


def add_rewards(batch: RolloutBatch, columns: RolloutColumns, settings: Settings) -> None:
    """Add the rewards that --custom-reward-post-process-path makes, as extra columns, which are written down too.

    Raises:
        ConfigError: The function cannot be used.
        DataError: It returned something else than two numbers for each sample.
    """
    if settings.rollout.hooks.custom_reward_post_process_path is None:
        return
    process = RewardPostProcess(settings.rollout, hook_args_of(settings.rollout, settings.flags()))
    raw, rewards = process(batch.samples)
    columns.samples[RAW_REWARDS], columns.samples[TRAIN_REWARDS] = np.array(raw), np.array(rewards)


@contextlib.contextmanager
def said_of_files() -> Iterator[None]:
    """Within the block, a full disk or a directory that was taken away is a `RunError`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"a file of the run can't be written or read: {error}") from None


def read_rollout(
    rollout_id: int,
    recipe: Recipe,
    *,
    load_state_dict: Callable[[dict[str, Any]], None],
    put: Callable[[TrainShard], Any],
) -> ReadyRollout:
    """Split a rollout that was written down before a restart, and continue the data source after it.

    Raises:
        DataError: Its file is missing, torn or of an older slime, or a sample cannot be trained on.
    """
    assert recipe.store is not None
    columns = recipe.store.read(rollout_id)
    load_state_dict(recipe.store.read_source_state(rollout_id))
    mark_shown(columns, recipe.settings)
    ready, shards = summary(columns, columns.batch(), recipe), split_rollout(columns, recipe)
    ready.untrained.update(untrained(columns, shards, global_batch_size(recipe.settings)))
    # The time that generating took was spent before the restart, not in this step.
    ready.seconds.clear()
    ready.seconds.update({"data": 0.0} if recipe.settings.rows is not None else {})
    del columns
    return put_shards(ready, shards, put)


def summary(columns: RolloutColumns, batch: RolloutBatch, recipe: Recipe) -> ReadyRollout:
    """What the loop needs of a rollout, without references yet; ``batch`` is the same rollout."""
    return ReadyRollout(
        rollout_id=columns.rollout_id,
        weight_version=columns.weight_version,
        metrics=columns.metrics,
        seconds=columns.seconds,
        num_samples=sum(columns.group_sizes),
        failures=reward_failures(columns),
        examples=examples(batch.samples, of_data=recipe.settings.rows is not None),
        shards=[],
        sample_sums=sample_sums(columns.samples) | {"index": np.asarray(columns.samples["index"])},
    )


def examples(samples: Sequence[Sample], *, of_data: bool = False, most: int = EXAMPLES) -> list[Example]:
    """The first sample of each of the first ``most`` groups; rows ``of_data`` have no reward."""
    first: dict[int, Sample] = {}
    for sample in samples:
        if len(first) < most:
            first.setdefault(sample.group_index, sample)
    return [
        {
            "prompt": one.prompt if isinstance(one.prompt, str) else _asked(one.prompt or [], one.response),
            "response": one.response,
            "reward": None if of_data else one.reward,
        }
        for one in first.values()
    ]


def _asked(messages: Sequence[Message], response: str) -> str:
    """What the last message before the response says that is not an answer.

    A conversation to train on holds its answers; the first of them that is in the response is where that begins.
    """
    answers = [
        place
        for place, message in enumerate(messages)
        if message.get("role") == "assistant" and (text := str(message.get("content") or "").strip())
        if text[:ANSWER_CHARACTERS] in response
    ]
    before = messages[: answers[0]] if answers else messages
    asked = [message for message in before if message.get("role") != "assistant"] or before or messages
    return str(asked[-1].get("content", "")) if asked else ""


def put_shards(ready: ReadyRollout, shards: list[TrainShard], put: Callable[[TrainShard], Any]) -> ReadyRollout:
    """The rollout with references to its shards. Each shard's memory here is freed once ``put`` has stored it."""
    ready.shard_sums.extend(map(shard_sum, shards))
    while shards:
        ready.shards.append(put(shards.pop(0)))
    return ready


def check_versions(columns: RolloutColumns, *, most_behind: int | None) -> None:
    """Every token comes from the weights that the rollout is to be trained from, or from older ones that it may be of.

    ``most_behind`` is by how many versions; ``None`` sets no limit.

    Raises:
        RunError: A token has another version; an engine missed an update, or somebody else sent it weights.
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
            raise RunError(
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
        raise RunError(
            f"none of the {len(reasons)} samples of the first rollout could be scored: {reasons[0]}; correct the "
            "reward, which slime-rollout check-hooks --run tries out, and start the same command again"
        )


def check_limits(columns: RolloutColumns, shape: ModelShape) -> None:
    """Every sample is of the model's tokens, and no longer than its context, wherever it comes from.

    Raises:
        DataError: One is not.
    """
    limits = ModelLimits(vocab_size=shape.vocab_size, context=shape.max_position_embeddings)
    for index, row in zip(numbers(columns.samples, "index"), ragged(columns.samples, "tokens").rows, strict=True):
        tokens = [] if row is None or not len(row) else [int(row.min()), int(row.max())]
        if problem := limits.token_problem(tokens) or limits.length_problem(0 if row is None else len(row)):
            raise DataError(f"sample {index} of step {columns.rollout_id + 1} is not of this model: {problem}")


def untrained(columns: RolloutColumns, shards: Sequence[TrainShard], batch_size: int) -> dict[str, int]:
    """How many samples of a rollout none of its shards has, by the reason: one of :data:`REASONS`."""
    samples, found = columns.samples, Counter[str]()
    trained = {int(index) for shard in shards for index in numbers(shard.columns, "index")}
    rest, masks = set(beyond_whole_steps(columns, batch_size)), ragged(samples, "loss_mask").rows
    names = ("index", "response_length", "status", "remove_sample")
    for at, (index, length, status, removed) in enumerate(
        zip(*(numbers(samples, name) for name in names), strict=True)
    ):
        mask = masks[at]
        if index in trained:
            continue
        if at in rest:
            found[NO_STEP] += 1
        elif not length:
            found[EMPTY] += 1
        elif removed or STATUSES[status] in (Status.ABORTED, Status.FAILED):
            found[REMOVED] += 1
        else:
            found[NO_ADVANTAGE if mask is None or np.any(mask) else MASKED] += 1
    return dict(found)


def reward_failures(columns: RolloutColumns) -> list[str]:
    """Why samples could not be scored, a reason for each of them."""
    metadata = json_rows(columns.samples, "metadata", containing=REWARD_FAILURE)
    return [str(values[REWARD_FAILURE]) for values in metadata if REWARD_FAILURE in values]


def split_rollout(batch: RolloutBatch | RolloutColumns, recipe: Recipe) -> list[TrainShard]:
    """:func:`slime_core.schedule.build_shards` with a run's settings.

    Raises:
        DataError: A sample cannot be trained on.
    """
    settings = recipe.settings
    megatron, algorithm = settings.megatron, settings.algorithm
    return build_shards(
        batch,
        algorithm=algorithm,
        temperature=1.0 if settings.rows is not None else settings.rollout.sampling.rollout_temperature,
        data_parallel_size=recipe.data_parallel_size,
        micro_batch_size=megatron.micro_batch_size,
        global_batch_size=global_batch_size(settings),
        reward_key=None if settings.rows is not None else settings.rollout.rewards.reward_key,
        keep_groups_together=megatron.may_share_prompts and not algorithm.on_pairs,
        pairs=algorithm.on_pairs,
        use_dynamic_batch_size=megatron.use_dynamic_batch_size,
        max_tokens_per_gpu=megatron.max_tokens_per_gpu,
        context_parallel_size=megatron.context_parallel_size,
        cost=flops_model(recipe.shape).training if megatron.balance_by_flops else token_count,
        drop_untrained=True,
        drop_rest=True,
        needs_kept=settings.rows is None and not settings.rollout.sampling.keeps_all_tokens,
        needs_experts=settings.rows is None and settings.rollout.sampling.use_rollout_routing_replay,
        postprocess=data_postprocess(settings),
    )


def data_postprocess(settings: Settings) -> DataPostprocess | None:
    """The function of --rollout-data-postprocess-path; ``None`` without it. Raises ConfigError if it cannot be used."""
    if settings.rollout.hooks.rollout_data_postprocess_path is None:
        return None
    return DataPostprocess(settings.rollout, hook_args_of(settings.rollout, settings.flags()))


def split_held_out(batch: RolloutBatch, recipe: Recipe) -> list[TrainShard]:
    """The shards of a held-out set: all of its rows are one step, which is computed and not trained on.

    Raises:
        DataError: There are fewer rows than data-parallel ranks.
    """
    settings, samples = recipe.settings, batch.samples
    megatron, ranks = settings.megatron, recipe.data_parallel_size
    if len(samples) < ranks:
        raise DataError(f"a held-out set has {len(batch.groups)} rows for {ranks} data-parallel ranks; give it more")
    longest = max(len(sample.tokens) for sample in samples)
    size = megatron.context_parallel_size
    return build_shards(
        batch,
        algorithm=settings.algorithm,
        temperature=1.0,
        data_parallel_size=ranks,
        micro_batch_size=1,
        global_batch_size=len(samples),
        pairs=settings.algorithm.on_pairs,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=megatron.max_tokens_per_gpu or -(-longest * megatron.micro_batch_size // size),
        context_parallel_size=size,
    )
