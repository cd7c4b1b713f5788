"""The loop: get a batch, train, send the weights, again. It reads from :func:`run_loop` down.

It is the same for every kind of run. One without trainers, or without engines that take weights, has empty parts in
their places, which do nothing (`slime_launch.weights`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from slime_core.former_names import renamed
from slime_core.types import Span, SyncReport, TrainReport
from slime_launch.calls import Call
from slime_launch.config import Settings
from slime_launch.console import RunConsole, Wait
from slime_launch.errors import RunError
from slime_launch.handover import Handover, watching
from slime_launch.resume import RunState
from slime_launch.rollouts import RolloutWorker
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
from slime_launch.weights import NothingToSend, NoTraining, Sending, Training, nothing_sent
from slime_rollout.service import ReadyRollout

Result = TypeVar("Result")

__getattr__ = renamed(
    __name__,
    {},
    {
        "check_weights": "parts.sending.check()",
        "eval_due_at": "parts.state.due.evaluate",
        "push_due_at": "parts.state.due.push",
        "push_weights": "parts.sending.push(version)",
        "recipe_of": "slime_launch.batch_spec.batch_spec(settings, shape, ranks)",
        "train": "parts.training.train(batch)",
        "try_to_push": "parts.sending.push(version)",
        "waiting": "parts.console.wait(what, within=shown)",
        "watch_trainers": "slime_launch.handover.watching(rollout, wait)",
    },
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Both halves of a run, started and with their weights, its state, and where the loop reports."""

    settings: Settings
    trainers: TrainerGroup
    rollout: RolloutWorker
    memory: Handover
    training: Training | NoTraining
    sending: Sending | NothingToSend
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
    parts.sending.push(parts.state.weight_version)
    evaluate_if_due(parts)
    for rollout_id in range(parts.state.iteration, parts.settings.num_rollout):
        seconds: dict[str, float] = {}
        with timed(seconds, "rollout"):
            batch = next_batch(parts, rollout_id)
        commit_save(parts)
        parts.sending.check(before_training=True)
        catch_up(parts)
        with timed(seconds, "train"):
            report = parts.training.train(batch)
        commit_save(parts)
        parts.state.trained(rollout_id)
        if parts.memory.trainer_sleeps and parts.state.due.save:
            take_checkpoint(parts)  # while all that it holds is there; it counts when this rollout is recorded
        with timed(seconds, "update_weights"):
            version = parts.state.weight_version
            sync = parts.sending.push(version) if parts.state.due.push else nothing_sent(version)
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
    if not parts.state.is_written_down(rollout_id):
        parts.memory.to_generate()
        parts.sending.check()
    parts.trainers.finish_loading()
    with parts.console.wait(what := "generate" if parts.settings.kind.generates else "read", phase=what) as wait:
        if not parts.state.is_written_down(rollout_id):
            return wait_for(parts, parts.rollout.prepare(rollout_id), wait)
        parts.console.line(f"step {rollout_id + 1} was generated before the restart; training on it as written down")
        return wait_for(parts, parts.rollout.read(rollout_id), wait)


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


def catch_up(parts: Parts, wait: Wait | None = None) -> None:
    """Send weights to engines that were replaced; ``wait`` is that for a rollout, which needs them."""
    state = parts.state
    state.weight_version = parts.sending.catch_up(state.iteration, state.weight_version, wait)


def record(parts: Parts, batch: ReadyRollout, report: TrainReport, sync: SyncReport, seconds: dict[str, float]) -> None:
    """Write the metrics of one rollout, and its line."""
    rollout_id, steps = batch.rollout_id, train_rows(report)
    row = rollout_row(batch, report, sync, seconds) | parts.memory.row() | parts.sending.row()
    first_step = rollout_id * parts.settings.run.num_steps_per_rollout
    for number, metrics in enumerate(steps, first_step):
        parts.tracker.log("train", step=number, rollout_id=rollout_id, metrics=metrics)
    samples = batch.examples if shows_examples(parts, rollout_id) else []
    parts.tracker.log("rollout", step=rollout_id, rollout_id=rollout_id, metrics=row, samples=samples)
    record_spans(parts, rollout_id, [*batch.spans, *report.spans])
    parts.tracker.log_sums(batch, report)
    total, last_step = parts.settings.num_rollout, steps[-1] if steps else {}
    line = step_line(batch, total, row, last_step, compares_samples=parts.settings.compares_samples)
    parts.console.step(line, step_cells(rollout_id + 1, total, parts.tracker.rows))
    for line in example_lines(samples, of_data=parts.settings.kind.rows is not None):
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
    answers = settings.kind.generates and settings.kind.has_held_out
    at_end = settings.kind.rows is None and not answers and rollout_id == settings.num_rollout - 1
    return rollout_id == 0 or at_end


def save_if_due(parts: Parts) -> None:
    """Write a checkpoint, unless --no-async-save while the loop goes on; it counts once the manifest names it."""
    if parts.state.due.save:
        take_checkpoint(parts)
        commit_save(parts, wait=not parts.settings.megatron.async_save)


def take_checkpoint(parts: Parts) -> None:
    """Have the trainers write a checkpoint, which does not count yet; an earlier one does, before."""
    commit_save(parts, wait=True)
    parts.memory.to_train()
    iteration = parts.state.iteration
    with parts.console.wait(f"save checkpoint {iteration}", phase="save") as wait:
        checkpoint = parts.trainers.save(iteration, on_poll=watching(parts.rollout, wait))
        parts.state.saving(checkpoint, parts.rollout.state_dict(), seconds=wait.seconds)


def commit_save(parts: Parts, *, wait: bool = False, shown: Wait | None = None) -> None:
    """Have the manifest name the checkpoint that was taken, if it is written by now; with ``wait``, once it is.

    The console says then that it is saved, and how many seconds the loop has waited for it. ``shown`` is the wait that
    this is a part of, if any.
    """
    if not parts.state.is_saving:
        return
    with parts.console.wait("write the checkpoint", phase="save", within=shown) as own:
        start = time.monotonic()
        is_written = parts.trainers.saved(wait=wait, on_poll=watching(parts.rollout, own))
        parts.state.waited(time.monotonic() - start)
        if is_written:
            iteration, seconds = parts.state.commit()
    if is_written:
        parts.console.line(f"saved checkpoint {iteration} ({seconds:.1f} s)")
        export(parts, shown)


def export(parts: Parts, shown: Wait | None = None) -> None:
    """Write the checkpoint in the manifest as a Hugging Face model, with --save-hf; then drop the oldest one."""
    if parts.settings.run.save_hf is not None:
        done = "exported the checkpoint"
        with parts.console.wait("export the checkpoint", done=done, phase="export", within=shown):
            parts.state.export()
    parts.state.drop_oldest()


def evaluate_if_due(parts: Parts) -> None:
    """Evaluate on the held-out sets if that is due, and not logged already in a run that trains."""
    is_logged = parts.tracker.has_eval(parts.state.iteration) and not parts.settings.kind.only_evaluates
    if is_logged or not parts.state.due.evaluate:
        return
    with parts.console.wait("evaluate", phase="evaluate") as wait:
        if parts.settings.kind.generates:
            score_prompts(parts, wait)
        else:
            held_out_loss(parts, wait)


def score_prompts(parts: Parts, wait: Wait) -> None:
    """Generate responses to the held-out prompts, and score them."""
    step = parts.state.trained_steps
    parts.memory.to_generate()
    parts.sending.check()
    report = wait_for(parts, parts.rollout.evaluate(step), wait)
    samples = eval_examples(report)
    parts.tracker.log("eval", step=step, rollout_id=step, metrics=eval_row(report), samples=samples)
    parts.console.line(eval_line(report, alone=parts.settings.kind.only_evaluates))


def held_out_loss(parts: Parts, wait: Wait) -> None:
    """Compute the loss of the held-out rows, which are not trained on."""
    step, seconds = parts.state.trained_steps, dict[str, float]()
    with timed(seconds, "eval"):
        sets = wait_for(parts, parts.rollout.held_out(step), wait)
        poll = watching(parts.rollout, wait)
        found = {name: parts.trainers.evaluate(shards, on_poll=poll) for name, shards in sets.items()}
    parts.tracker.log("eval", step=step, rollout_id=step, metrics=held_out_row(found, seconds))
    parts.console.line(held_out_line(step, found, alone=parts.settings.kind.only_evaluates))


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record how long the block took."""
    start = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - start
