"""The loop: get a batch, train, send the weights, again. It reads from :func:`run_loop` down.

It is the same for every kind of run. What a run does not have is left out where it would be used: engines that take
weights in one on a data set or on recorded rollouts, trainers in one that only generates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from slime_convert.shape import ModelShape
from slime_core.types import Span, SyncReport, TrainReport
from slime_launch.calls import Call
from slime_launch.canary import Canary
from slime_launch.config import Settings
from slime_launch.console import RunConsole, Wait
from slime_launch.errors import RunError
from slime_launch.handover import Handover
from slime_launch.resume import RunState
from slime_launch.rollouts import RolloutWorker
from slime_launch.shards import ReadyRollout, Recipe
from slime_launch.step_metrics import (
    drift_problem,
    eval_examples,
    eval_line,
    eval_row,
    example_lines,
    held_out_line,
    held_out_row,
    rollout_row,
    step_cells,
    step_line,
    train_rows,
)
from slime_launch.tracking import Tracker
from slime_launch.trainers import TrainerGroup
from slime_rollout.engine import WeightSyncError
from slime_rollout.generation_service import ChannelSpec

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with: both halves are up, the trainers have their weights."""

    settings: Settings
    shape: ModelShape
    trainers: TrainerGroup
    rollout: RolloutWorker
    memory: Handover
    canary: Canary
    state: RunState
    tracker: Tracker
    console: RunConsole


def run_loop(parts: Parts) -> None:
    """Go from the run's current iteration to ``--num-rollout``; with 0 of them, only evaluate.

    ``--async-buffer-size`` changes none of these moves, but what the rollout worker does meanwhile: it generates the
    next rollouts while the trainers train and save, and during evaluations, so that :func:`next_batch` may only have to
    fetch one. Requests in flight stay while weights are sent, and go on with the new ones; so tokens may be up to
    ``--max-weight-staleness`` versions old.

    Engines that were replaced get the weights whenever the trainers are free: while they wait for a rollout, and before
    they train or save. With ``--async-buffer-size`` they may never have to wait for one.
    """
    restore_data_position(parts)
    if not parts.state.is_exported:
        export(parts)
    push_weights(parts, version=parts.state.weight_version)
    evaluate_if_due(parts)
    for rollout_id in range(parts.state.iteration, parts.settings.num_rollout):
        seconds: dict[str, float] = {}
        with timed(seconds, "rollout"):
            batch = next_batch(parts, rollout_id)
        commit_save(parts)
        check_weights(parts, before_training=True)
        catch_up(parts)
        with timed(seconds, "train"):
            report = train(parts, batch)
        commit_save(parts)
        version = rollout_id + 1 if push_due_at(parts, rollout_id + 1) else parts.state.weight_version
        is_due = version > parts.state.weight_version
        parts.state.trained(batch, version)
        if parts.memory.trainer_sleeps and parts.state.save_due:
            take_checkpoint(parts)  # while all that it holds is there; it counts when this rollout is recorded
        with timed(seconds, "update_weights"):
            sync = push_weights(parts, version=version) if is_due else nothing_sent(version)
        record(parts, batch, report, sync, seconds)
        catch_up(parts)
        commit_save(parts)
        save_if_due(parts)
        evaluate_if_due(parts)
    commit_save(parts, wait=True)
    record_spans(parts, max(parts.settings.num_rollout - 1, 0))


def restore_data_position(parts: Parts) -> None:
    """Continue the data where the run stands; make a new run resumable."""
    if parts.state.source_state is None:
        parts.state.begin(parts.rollout.state_dict())
    else:
        parts.rollout.load_state_dict(parts.state.source_state)


def next_batch(parts: Parts, rollout_id: int) -> ReadyRollout:
    """The rollout to train on: the one written down before a restart, or a new one, which is written down first."""
    recipe = recipe_of(parts)
    if not parts.state.is_written_down(rollout_id):
        parts.memory.to_generate()
        check_weights(parts)
    parts.trainers.finish_loading()
    with parts.console.wait(what := "generate" if parts.settings.generates else "read", phase=what) as wait:
        if not parts.state.is_written_down(rollout_id):
            return wait_for(parts, parts.rollout.prepare(rollout_id, recipe), wait)
        parts.console.line(f"step {rollout_id + 1} was generated before the restart; training on it as written down")
        return wait_for(parts, parts.rollout.read(rollout_id, recipe), wait)


def recipe_of(parts: Parts) -> Recipe:
    """What becomes of every batch."""
    return Recipe(
        settings=parts.settings,
        shape=parts.shape,
        data_parallel_size=parts.trainers.data_parallel_size,
        store=parts.state.store,
        can_resume=parts.state.can_resume,
    )


def wait_for(parts: Parts, call: Call[Result], wait: Wait) -> Result:
    """Wait for the rollout worker, and send the weights to engines that are replaced meanwhile.

    If all engines died, the rollout waits for nothing else. A trainer rank that dies ends the wait, too.
    """
    while not call.done():
        parts.trainers.check()
        commit_save(parts, shown=wait)
        progress = parts.rollout.progress()
        wait.update(progress.note, done=progress.done, total=progress.total, silent=progress.silent)
        if progress.behind:
            catch_up(parts, wait)
    [result] = call.results()
    return result


def train(parts: Parts, batch: ReadyRollout) -> TrainReport:
    """Train on the rollout; each rank fetches its own shard."""
    if not parts.settings.trains:
        batch.shards.clear()
        return TrainReport(rollout_id=batch.rollout_id, steps=[])
    parts.memory.to_train()
    with parts.console.wait("train", phase="train") as wait:
        report = parts.trainers.train(batch.shards, on_poll=watch_trainers(parts, wait))
    batch.shards.clear()  # so that the object store has room for the next ones
    return report


def push_due_at(parts: Parts, iteration: int) -> bool:
    """Whether to send the weights that ``iteration`` rollouts were trained on: every ``--update-weights-interval``.

    What is evaluated or saved is what the engines have, so that a run that continues a checkpoint goes on alike.
    """
    interval = parts.settings.rollout.selection.update_weights_interval
    return iteration % interval == 0 or parts.state.save_due_at(iteration) or eval_due_at(parts, iteration)


def nothing_sent(version: int) -> SyncReport:
    """What a push that is left out did."""
    return SyncReport(version=version, tensors=0, bytes=0, seconds=0.0)


def push_weights(parts: Parts, *, version: int) -> SyncReport:
    """Send the trainer's weights to every engine; again, if one failed meanwhile that is being replaced."""
    if not (parts.settings.generates and parts.settings.trains):
        return nothing_sent(version)
    parts.memory.to_send()
    with parts.console.wait(f"send weights, version {version}", phase="send") as wait:
        report = None
        while report is None:
            report = try_to_push(parts, parts.rollout.begin_update(), version, wait)
        return report


def try_to_push(parts: Parts, channel: ChannelSpec, version: int, wait: Wait) -> SyncReport | None:
    """Send the weights; ``None`` if an engine failed meanwhile that is being replaced."""
    poll = watch_trainers(parts, wait)
    try:
        report = parts.trainers.push_weights(channel, version, on_poll=poll)
    except WeightSyncError as error:
        if not parts.rollout.fail_update(error.silent):
            raise
        parts.console.line(f"an engine failed while version {version} was sent: {error}")
        return None
    parts.rollout.confirm_update(version)
    parts.canary.sent(channel, version, poll)
    return report


def check_weights(parts: Parts, *, before_training: bool = False) -> None:
    """Engines and trainer make the same of a few fixed tokens: before anything is generated with new weights.

    With ``--async-buffer-size`` engines are busy, and their answers are waited for before the trainers train again.
    """
    canary = parts.canary
    if not canary.is_pending or (before_training and parts.memory.engines_sleep and not canary.is_asked):
        return
    if parts.settings.rollout.selection.async_buffer_size is not None and not before_training:
        canary.ask()
        return
    with parts.console.wait("compare log-probs of fixed tokens", phase="send") as wait:
        canary.check(watch_trainers(parts, wait))


def catch_up(parts: Parts, wait: Wait | None = None) -> None:
    """Send the current weights to engines that were replaced; the trainers must have nothing else to do.

    With --update-weights-interval the trainers may no longer have those that the other engines have. Then all of them
    get the weights of now, so that a version is the same weights on every engine.
    """
    if not (parts.settings.generates and parts.settings.trains) or (parts.memory.engines_sleep and wait is None):
        return  # engines that sleep get the next weights all together, unless a rollout waits for these
    version = parts.state.iteration
    are_newer = version > parts.state.weight_version
    if are_newer and not parts.rollout.progress().behind:
        return
    channel = parts.rollout.begin_update(only_behind=not are_newer)
    if channel.engine_urls:
        what = "send weights to engines that were replaced"
        with waiting(parts, what, "send", wait) as shown:
            parts.memory.to_send(shown)
            if try_to_push(parts, channel, version, shown) is not None:
                parts.state.weight_version = version
    if wait is not None:
        parts.memory.to_generate(wait)
        parts.canary.ask()


def record(parts: Parts, batch: ReadyRollout, report: TrainReport, sync: SyncReport, seconds: dict[str, float]) -> None:
    """Write the metrics of one rollout, and its line."""
    rollout_id, steps = batch.rollout_id, train_rows(report)
    row = rollout_row(batch, report, sync, seconds) | parts.memory.row() | parts.canary.row()
    first_step = rollout_id * parts.settings.run.num_steps_per_rollout
    for number, metrics in enumerate(steps, first_step):
        parts.tracker.log("train", step=number, rollout_id=rollout_id, metrics=metrics)
    samples = batch.examples if shows_examples(parts, rollout_id) else []
    parts.tracker.log("rollout", step=rollout_id, rollout_id=rollout_id, metrics=row, samples=samples)
    record_spans(parts, rollout_id, [*batch.spans, *report.spans])
    parts.tracker.log_sums(batch, report)
    parts.console.step(
        step_line(
            batch,
            parts.settings.num_rollout,
            row,
            steps[-1] if steps else {},
            compares_samples=parts.settings.compares_samples,
        ),
        step_cells(rollout_id + 1, parts.settings.num_rollout, parts.tracker.rows),
    )
    for line in example_lines(samples, of_data=parts.settings.rows is not None):
        parts.console.line(line)
    watch_drift(parts, rollout_id, steps)


def watch_drift(parts: Parts, rollout_id: int, steps: Sequence[Mapping[str, float]]) -> None:
    """End the run, or say so, where trainer and engine disagree more than ``--max-logprob-drift``."""
    run = parts.settings.run
    if (problem := drift_problem(rollout_id, steps, run.max_logprob_drift)) is None:
        return
    if run.logprob_drift_action == "stop":
        raise RunError(problem)
    parts.console.line(problem)


def record_spans(parts: Parts, rollout_id: int, others: Sequence[Span] = ()) -> None:
    """Write down who did what when since the last time: the loop's own phases, and those of ``others``."""
    spans, parts.console.spans = [*parts.console.spans, *others], []
    if spans:
        parts.tracker.log("timeline", step=rollout_id, rollout_id=rollout_id, metrics={}, spans=spans)


def shows_examples(parts: Parts, rollout_id: int) -> bool:
    """Whether samples of a rollout are shown: of the first, and of the last where no held-out prompts are answered.

    Of a data set only the first rows are: training changes none of them.
    """
    settings = parts.settings
    answers = settings.generates and settings.rollout.evaluation.has_eval_sets
    at_end = settings.rows is None and not answers and rollout_id == settings.num_rollout - 1
    return rollout_id == 0 or at_end


def save_if_due(parts: Parts) -> None:
    """Write a checkpoint, unless --no-async-save while the loop goes on; it counts once the manifest names it."""
    if parts.state.save_due:
        take_checkpoint(parts)
        commit_save(parts, wait=not parts.settings.megatron.async_save)


def take_checkpoint(parts: Parts) -> None:
    """Have the trainers write a checkpoint, which does not count yet; an earlier one does, before."""
    commit_save(parts, wait=True)
    parts.memory.to_train()
    iteration = parts.state.iteration
    with parts.console.wait(f"save checkpoint {iteration}", phase="save") as wait:
        checkpoint = parts.trainers.save(iteration, on_poll=watch_trainers(parts, wait))
        parts.state.saving(checkpoint, parts.rollout.state_dict(), seconds=wait.seconds)


def commit_save(parts: Parts, *, wait: bool = False, shown: Wait | None = None) -> None:
    """Have the manifest name the checkpoint that was taken, if it is written by now; with ``wait``, once it is.

    Only then is it said to be saved, with the seconds that the loop has waited for it. ``shown`` is the wait that this
    is a part of, if any.
    """
    if not parts.state.is_saving:
        return
    with waiting(parts, "write the checkpoint", "save", shown) as own:
        start = time.monotonic()
        is_written = parts.trainers.saved(wait=wait, on_poll=watch_trainers(parts, own))
        parts.state.waited(time.monotonic() - start)
        if is_written:
            iteration, seconds = parts.state.commit()
    if is_written:
        parts.console.line(f"saved checkpoint {iteration} ({seconds:.1f} s)")
        export(parts, shown)


def export(parts: Parts, shown: Wait | None = None) -> None:
    """Write the checkpoint that the manifest names as a Hugging Face model, with --save-hf; then drop the oldest."""
    if parts.settings.run.save_hf is not None:
        with waiting(parts, "export the checkpoint", "export", shown, done="exported the checkpoint"):
            parts.state.export()
    parts.state.drop_oldest()


def waiting(
    parts: Parts, what: str, phase: str, shown: Wait | None, done: str | None = None
) -> contextlib.AbstractContextManager[Wait]:
    """A wait of its own, or the one that it is a part of."""
    return parts.console.wait(what, done=done, phase=phase) if shown is None else contextlib.nullcontext(shown)


def evaluate_if_due(parts: Parts) -> None:
    """Evaluate on the held-out sets, if that is due."""
    if not eval_due_at(parts, parts.state.iteration):
        return
    with parts.console.wait("evaluate", phase="evaluate") as wait:
        if parts.settings.generates:
            score_prompts(parts, wait)
        else:
            held_out_loss(parts, wait)


def score_prompts(parts: Parts, wait: Wait) -> None:
    """Generate for the held-out prompts, and score that."""
    step = parts.state.trained_steps
    parts.memory.to_generate()
    check_weights(parts)
    report = wait_for(parts, parts.rollout.evaluate(step), wait)
    samples = eval_examples(report)
    parts.tracker.log("eval", step=step, rollout_id=step, metrics=eval_row(report), samples=samples)
    parts.console.line(eval_line(report, alone=parts.settings.only_evaluates))


def held_out_loss(parts: Parts, wait: Wait) -> None:
    """Compute the loss of the held-out rows, which are not trained on."""
    step, seconds = parts.state.trained_steps, dict[str, float]()
    with timed(seconds, "eval"):
        sets = wait_for(parts, parts.rollout.held_out(step, recipe_of(parts)), wait)
        poll = watch_trainers(parts, wait)
        found = {name: parts.trainers.evaluate(shards, on_poll=poll) for name, shards in sets.items()}
    parts.tracker.log("eval", step=step, rollout_id=step, metrics=held_out_row(found, seconds))
    parts.console.line(held_out_line(step, found, alone=parts.settings.only_evaluates))


def eval_due_at(parts: Parts, iteration: int) -> bool:
    """Whether to evaluate after ``iteration`` rollouts: before the first, at every interval, at the end; once each."""
    run = parts.settings.run
    has_sets = parts.settings.rollout.evaluation.has_eval_sets and not parts.settings.is_recorded
    if parts.settings.only_evaluates:
        return has_sets  # whatever was evaluated before
    if not has_sets or parts.tracker.has_eval(iteration):
        return False
    at_interval = run.eval_interval is not None and iteration % run.eval_interval == 0
    at_end = iteration == parts.settings.num_rollout
    return at_end or (not run.skip_eval_before_train if iteration == 0 else at_interval)


def watch_trainers(parts: Parts, wait: Wait) -> Callable[[], None]:
    """Shows that the trainers are busy. An engine that dies meanwhile ends the wait."""

    def poll() -> None:
        parts.rollout.progress()
        wait.update()

    return poll


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record how long the block took."""
    start = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - start
