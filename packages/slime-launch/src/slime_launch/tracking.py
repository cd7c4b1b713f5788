"""Metrics on disk: ``metrics.jsonl``, which is the truth, and TensorBoard's event files, which are made from it.

Every row has ``kind`` (``train``: one optimizer step; ``rollout``; ``eval``; ``timeline``: who did what when),
``step`` (optimizer steps for ``train``, else rollouts), ``rollout_id``, ``time`` (seconds since 1970), and the metrics
by name, such as ``train/loss``.
A run that is continued drops the rows after its checkpoint and writes new event files, so no curve folds back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.files import open_to_append, write_whole
from slime_core.types import Span, TrainReport
from slime_launch.step_sums import SumLog, json_lines

if TYPE_CHECKING:
    from slime_launch.wandb_run import WandbRun
    from slime_rollout.service import ReadyRollout

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"
Row = dict[str, Any]


def read_rows(output_dir: Path) -> list[Row]:
    """All complete rows; a last line that a crash cut off is left out."""
    return list(json_lines(output_dir / METRICS_FILE))


class Tracker:
    """Writes metrics as they come, after those of the first ``iteration`` rollouts; a new run drops all old ones."""

    def __init__(
        self,
        output_dir: Path,
        *,
        iteration: int | None = None,
        tensorboard: bool = True,
        wandb_run: WandbRun | None = None,
    ) -> None:
        self._output_dir, self._tensorboard, self._wandb_run = output_dir, tensorboard, wandb_run
        self._open(iteration)

    def _open(self, iteration: int | None) -> None:
        old = read_rows(self._output_dir) if iteration is not None else []
        self.rows = [row for row in old if _is_before(row, iteration or 0)]
        self._sums = SumLog(self._output_dir, iteration)
        path = self._output_dir / METRICS_FILE
        write_whole(path, "".join(_line(row) for row in self.rows))
        self._file = open_to_append(path)
        self._events = None
        if self._tensorboard:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._output_dir / TENSORBOARD_DIR)
            from tensorboard.summary.writer.event_file_writer import EventFileWriter  # a fifth of a second

            self._events = EventFileWriter(str(self._output_dir / TENSORBOARD_DIR))
        for row in self.rows:
            self._add_event(row)

    def rewind(self, iteration: int) -> None:
        """Drop what came after the first ``iteration`` rollouts, as a run that is continued there does."""
        self._close_files()
        self._open(iteration)

    def log(
        self,
        kind: str,
        *,
        step: int,
        rollout_id: int,
        metrics: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]] = (),
        spans: Sequence[Span] = (),
    ) -> None:
        """Write one row; it is on disk when this returns. What is not finite becomes ``null`` in the file.

        The ``rollout_id`` of kind ``eval`` is the number of rollouts trained on before it; ``samples`` are some answers
        for people to read, whole. The row has ``spans`` by who: what, when (seconds since 1970), for how many seconds.
        """
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        row: Row = {"kind": kind, "step": step, "rollout_id": rollout_id, "time": time.time(), **values}
        if samples:
            row["samples"] = list(samples)
        if spans:
            row["spans"] = by_who = dict[str, list[Any]]()
            for span in spans:
                by_who.setdefault(span.who, []).append([span.what, round(span.start, 3), round(span.seconds, 3)])
        self.rows.append(row)
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())  # the manifest, which is written later, must not be ahead of it
        self._add_event(row)
        if self._events is not None:
            self._events.flush()
        if self._wandb_run is not None and values:
            self._wandb_run.log(row)

    def log_sums(self, batch: ReadyRollout, report: TrainReport) -> None:
        """Write the checksums of one rollout, for `slime-launch diff`; they are on disk when this returns."""
        self._sums.log(batch, report)

    def has_eval(self, iteration: int) -> bool:
        """Whether the evaluation after ``iteration`` rollouts was done, in this process or before a restart."""
        return any(row["kind"] == "eval" and row["rollout_id"] == iteration for row in self.rows)

    def close(self) -> None:
        """Close the files, and finish the run in W&B."""
        self._close_files()
        if self._wandb_run is not None:
            self._wandb_run.close()

    def _close_files(self) -> None:
        self._file.close()
        self._sums.close()
        if self._events is not None:
            self._events.close()

    def _add_event(self, row: Row) -> None:
        if self._events is None or "spans" in row:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if "/" in name and value is not None
        ]
        self._events.add_event(Event(step=row["step"], wall_time=row["time"], summary=Summary(value=values)))


def _is_before(row: Row, iteration: int) -> bool:
    """The evaluation after rollout k belongs to what a checkpoint of k rollouts has seen; rollout k itself does not."""
    last = iteration if row["kind"] == "eval" else iteration - 1
    return bool(row["rollout_id"] <= last)


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
