"""Files that a rank writes for people: its profiler's traces, its train data, and parts of that for a report."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity

from slime_core.files import whole_file
from slime_core.types import TrainShard
from slime_core.types.arrays import Columns, Ragged
from slime_core.types.train import SHOWN
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.plan import PlannedBatch, StepPlan

logger = logging.getLogger(__name__)
COMPUTED = {
    "advantages": "advantages_N",
    "returns": "returns_N",
    "values": "old_values_N",
    "log_probs": "old_log_probs_N",
    "ref_log_probs": "ref_log_probs_N",
    "teacher_log_probs": "teacher_log_probs_N",
}
"""Columns of train data that the trainer computes, and where a planned micro-batch has them."""


@contextlib.contextmanager
def profiled(config: MegatronConfig, rollout_id: int, directory: Path) -> Iterator[None]:
    """Write a Chrome trace of the block, if this rank and rollout are among those that ``--profile`` names.

    The file is ``rollout_0000010-rank_0.json.gz``; the phases of reports are ranges in it.
    """
    rank = dist.get_rank()
    chosen = config.profile and config.profile_step_start <= rollout_id < config.profile_step_end
    if not chosen or rank not in config.profile_ranks:
        yield
        return
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, *cuda]) as found:
        yield
    directory.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(directory / f"rollout_{rollout_id:07d}-rank_{rank}.json.gz"))


def write_train_data(template: str, shard: TrainShard, plans: Sequence[StepPlan]) -> Path:
    """Write what this rank trains on, before it does: the shard, and what was computed for it, by response token.

    Samples that are left out of the steps, because they add nothing, have no row of what was computed. Returns the
    file, which :meth:`slime_core.types.TrainShard.read` reads; what was computed is in the samples' ``extras``.
    """
    path = Path(template.format(rollout_id=shard.rollout_id, rank=dist.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(shard, columns=shard.columns | _computed(shard, plans)).write(path)
    return path


class ShownSamples:
    """Log-probs and advantages of the samples of a rollout that its report shows, per response token, on one rank."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, list[float]]] = {}

    def see(self, planned: PlannedBatch, log_probs_N: torch.Tensor) -> None:
        """A micro-batch is trained on, and has these log-probs (nats) before its step."""
        if not any(sample.extras.get(SHOWN) for sample in planned.batch.samples):
            return
        columns = {"train_log_probs": log_probs_N.detach(), "advantages": planned.advantages_N}
        for name, values_N in columns.items():
            rows = [] if values_N is None else planned.batch.per_sample(values_N)
            for sample, row in zip(planned.batch.samples, rows, strict=False):
                if sample.extras.get(SHOWN):
                    self._rows.setdefault(sample.index, {})[name] = [round(value, 4) for value in row.tolist()]

    def write(self, directory: Path, rollout_id: int) -> None:
        """Write ``rollout_0000012-rank_0.json.gz``, if this rank has some and no other has the same.

        Where it cannot, it says so in the log: what is only shown does not end a run.
        """
        if not self._rows:
            return
        if not (parallel_state.get_tensor_model_parallel_rank() or parallel_state.get_context_parallel_rank()):
            try:
                directory.mkdir(parents=True, exist_ok=True)
                with whole_file(directory / f"rollout_{rollout_id:07d}-rank_{dist.get_rank()}.json.gz") as partial:
                    partial.write_bytes(gzip.compress(json.dumps(self._rows).encode(), compresslevel=3))
            except OSError as error:
                logger.warning("the report will lack what was computed for rollout %d: %s", rollout_id, error)


def _computed(shard: TrainShard, plans: Sequence[StepPlan]) -> Columns:
    columns: Columns = {}
    for name, attribute in COMPUTED.items():
        rows: dict[int, NDArray[np.float32]] = {}
        for planned in (planned for plan in plans for planned in plan.batches):
            values_N = getattr(planned, attribute)
            if values_N is not None:
                rows |= dict(zip(planned.batch.positions, planned.batch.per_sample(values_N), strict=True))
        if rows:
            columns[name] = Ragged.of([rows.get(position) for position in range(len(shard.samples))], np.float32)
    return columns
