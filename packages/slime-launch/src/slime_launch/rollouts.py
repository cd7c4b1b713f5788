"""The generation half as the loop sees it: one Ray actor that holds the generation service."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import DataError, SlimeError
from slime_core.types import EvalReport, RolloutBatch, RolloutColumns
from slime_launch.calls import Call, Question, Watch, Worker, prepare
from slime_launch.placement import KEEP_CHILDREN, Placement
from slime_launch.processes import Place, own_place
from slime_launch.shards import ReadyRollout, Recipe, prepare_rollout, read_rollout
from slime_rollout.generation_service import ChannelSpec, GenerationService, GenerationSpec, Progress

CLOSE_SECONDS = 10.0


class RolloutHost(GenerationService):
    """The service inside a Ray actor with two threads: one works, the other answers :meth:`progress`."""

    def __init__(self, directory: str, log_path: str, gpus: Sequence[int], spec: GenerationSpec) -> None:
        prepare(directory, log_path, threads=1)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        super().__init__(spec)

    def introduce(self) -> Place:
        """Where this process is."""
        return own_place()

    def prepare(self, rollout_id: int, recipe: Recipe) -> ReadyRollout:
        """Generate and score one rollout, write it down, and split it."""
        import ray

        batch = self.generate(rollout_id)
        return prepare_rollout(batch, recipe, state_dict=self.state_dict, put=ray.put)

    def read(self, rollout_id: int, recipe: Recipe) -> ReadyRollout:
        """Split a rollout that was written down before a restart, and continue the data source after it."""
        import ray

        return read_rollout(rollout_id, recipe, load_state_dict=self.load_state_dict, put=ray.put)


class RecordedHost(RolloutHost):
    """The same with rollouts from the files of ``--load-debug-rollout-data``: no engines, router or data source."""

    def start(self) -> None:
        """Nothing has to be started."""

    def generate(self, rollout_id: int) -> RolloutBatch:
        """The rollout in the file of this number, as if it had just been generated.

        Raises:
            DataError: The file is missing, torn, or not a rollout.
        """
        path = Path(str(self._spec.flags["load_debug_rollout_data"]).format(rollout_id=rollout_id))
        if not path.is_file():
            raise DataError(f"--load-debug-rollout-data: {path}, rollout {rollout_id}, does not exist")
        return dataclasses.replace(RolloutColumns.read(path), rollout_id=rollout_id).batch()

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """No engine needs weights."""
        checkpoint = self._spec.rollout.data.hf_checkpoint
        return ChannelSpec(
            sync=self._spec.engine, engine_urls=(), tp_size=1, hf_checkpoint=checkpoint, receivers=(), colocate=False
        )

    def state_dict(self) -> dict[str, Any]:
        """The number of the rollout says all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""


class RolloutWorker:
    """The rollout actor, from outside. Its methods are those of :class:`RolloutHost`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._progress = Question([worker], "progress")
        self._begun: Call[Any] | None = None

    @classmethod
    def start(cls, place: Placement, spec: GenerationSpec, *, log_dir: Path, watch: Watch) -> RolloutWorker:
        """Start the actor, not the engines yet."""
        import ray

        log_path = log_dir / "rollout.log"
        recorded = spec.flags.get("load_debug_rollout_data") is not None
        actor = ray.remote(RecordedHost if recorded else RolloutHost).options(
            scheduling_strategy=place.strategy(place.rollout_worker),
            num_cpus=0.5,
            max_concurrency=2,
            runtime_env=KEEP_CHILDREN,
        )
        handle = actor.remote(str(Path.cwd()), str(log_path), list(place.gpus), spec)
        worker = Worker("the rollout worker", handle, log_path, watch)
        worker.introduce()
        return cls(worker)

    def open(self) -> dict[Any, Worker]:
        """Begin to start the engines; give the result to :func:`~slime_launch.calls.gather`."""
        return {self._worker.start_call("start"): self._worker}

    def prepare(self, rollout_id: int, recipe: Recipe) -> Call[ReadyRollout]:
        """Begin to generate and score one rollout, to write it down and to split it."""
        return self._begin("prepare", rollout_id, recipe)

    def read(self, rollout_id: int, recipe: Recipe) -> Call[ReadyRollout]:
        """Begin to read one rollout that was written down."""
        return self._begin("read", rollout_id, recipe)

    def evaluate(self, iteration: int) -> Call[EvalReport]:
        """Begin to score the held-out prompts after ``iteration`` rollouts."""
        return self._begin("evaluate", iteration)

    def cancel(self) -> None:
        """End what was begun and that nobody waits for any more. A rollout that was complete stays written down."""
        call, self._begun = self._begun, None
        if call is None or call.done(0):
            return
        self._worker.call("cancel")
        with contextlib.suppress(SlimeError):  # that it was cancelled
            while not call.done():
                pass

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where to send weights; an engine that is gone, and that nobody replaces, is an error here."""
        channel: ChannelSpec = self._worker.call("begin_update", only_behind=only_behind)
        return channel

    def confirm_update(self, version: int) -> None:
        """Record that every engine of the last update has confirmed the weights."""
        self._worker.call("confirm_update", version)

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced."""
        by_an_engine: bool = self._worker.call("fail_update", silent)
        return by_an_engine

    def state_dict(self) -> dict[str, Any]:
        """State of the data source."""
        state: dict[str, Any] = self._worker.call("state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data source where ``state`` was saved."""
        self._worker.call("load_state_dict", state)

    def progress(self) -> Progress:
        """The last answer to how far it is; asks again, and does not wait for the answer.

        Raises:
            SlimeError: An engine, the router or the worker itself is gone.
        """
        progress: Progress = next(iter(self._progress.answers()), Progress())
        return progress

    def close(self) -> None:
        """Stop the engines in order, then end the actor."""
        import ray

        ray.wait([self._worker.start_call("close")], timeout=CLOSE_SECONDS)
        self._worker.kill()

    def _begin(self, method: str, *args: Any) -> Call[Any]:
        self._begun = Call({self._worker.start_call(method, *args): self._worker})
        return self._begun
