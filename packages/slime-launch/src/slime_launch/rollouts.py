"""The source of batches as the loop sees it: one Ray actor that holds it, with the engines where it has some."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from slime_core.errors import SlimeError
from slime_core.importing import without_collections
from slime_core.interfaces import Batches, Engines
from slime_core.types import Account, EvalReport, Progress, Span
from slime_launch.calls import Call, Host, Watch, Worker
from slime_launch.engine_nodes import EngineSeats, NodeLauncher
from slime_launch.placement import Placement, runtime_env
from slime_launch.remote import Question, Remote
from slime_launch.sources import SourceSpec, make_source
from slime_rollout.service import (
    BatchSpec,
    ChannelSpec,
    DataService,
    GenerationService,
    ReadyRollout,
    prepare_rollout,
    read_rollout,
    split_held_out,
)

if TYPE_CHECKING:
    from slime_rollout.service import CanaryTokens

CLOSE_SECONDS = 10.0
Result = TypeVar("Result")


class RunEngines(Engines[ChannelSpec, "CanaryTokens"], Protocol):
    """The engines of a run."""


class RolloutHost(Host):
    """Holds a source of batches, and its engines where it has some.

    It has three threads. One prepares batches, one waits for the engines' log-probs of fixed tokens meanwhile, and one
    answers :meth:`~slime_core.interfaces.Batches.progress`.
    """

    held: Batches

    def __init__(
        self,
        directory: str,
        log_path: str,
        gpus: Sequence[int],
        spec: SourceSpec,
        batches: BatchSpec,
        seats: EngineSeats | None,
    ) -> None:
        super().__init__(directory, log_path, threads=1)
        self._spec = batches
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        with without_collections():
            self.held = make_source(spec, None if seats is None else functools.partial(NodeLauncher, seats))

    def call_engines(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engines of a source that has some."""
        assert isinstance(self.held, GenerationService)
        engines: RunEngines = self.held.engines
        return getattr(engines, method)(*args, **kwargs)

    def prepare(self, rollout_id: int) -> ReadyRollout:
        """Get one batch (generate and score it), write it down, and split it."""
        import ray

        began = time.time()
        batch = self.held.generate(rollout_id)
        ready = prepare_rollout(batch, self._spec, state_dict=self.held.state_dict, put=ray.put)
        ready.spans.extend(spans_of(batch.seconds, began, time.time()))
        return ready

    def read(self, rollout_id: int) -> ReadyRollout:
        """Split a rollout that was written down before a restart, and continue the source after it."""
        import ray

        return read_rollout(rollout_id, self._spec, load_state_dict=self.held.load_state_dict, put=ray.put)

    def held_out(self, iteration: int) -> dict[str, list[Any]]:
        """References to the shards of each held-out set of a source of rows."""
        import ray

        assert isinstance(self.held, DataService)
        sets = self.held.held_out(iteration)
        return {name: [ray.put(shard) for shard in split_held_out(batch, self._spec)] for name, batch in sets.items()}


def spans_of(seconds: Mapping[str, float], began: float, ended: float) -> Iterator[Span]:
    """A batch's phases, one after the other since ``began``, and what was left until ``ended``: it was split."""
    for what, elapsed in {**seconds, "split": ended - began - sum(seconds.values())}.items():
        yield Span("rollout", "score" if what == "reward" else what, began, max(elapsed, 0.0))
        began += elapsed


class RolloutWorker:
    """The actor, from outside: the run's batches, and its engines where it has some."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._host = Remote[RolloutHost](worker)
        self._batches = Remote[Batches](worker, Host.call_held)
        self._engines = Remote[RunEngines](worker, RolloutHost.call_engines)
        self._progress = Question([self._batches], Batches.progress)
        self._begun: Call[Any] | None = None

    @classmethod
    def start(
        cls,
        place: Placement,
        spec: SourceSpec,
        batches: BatchSpec,
        *,
        seats: EngineSeats | None,
        log_dir: Path,
        watch: Watch,
    ) -> RolloutWorker:
        """Start the actor, not the engines yet: those will have ``seats``, or be next to the actor."""
        import ray

        log_path = log_dir / "rollout.log"
        actor = ray.remote(RolloutHost).options(
            scheduling_strategy=place.strategy(place.rollout_worker),
            num_cpus=0.5,
            max_concurrency=3,
            runtime_env=runtime_env(),
        )
        gpus = [place.gpus[bundle] for bundle in place.rollout] if place.gpus and seats is None else []
        handle = actor.remote(str(Path.cwd()), str(log_path), gpus, spec, batches, seats)
        worker = Worker("the rollout worker", handle, log_path, watch)
        worker.introduce()
        return cls(worker)

    def open(self) -> dict[Any, Worker]:
        """Begin to start the engines or to read the data; give the result to :func:`~slime_launch.calls.gather`."""
        return {self._batches.begin(Batches.start): self._worker}

    def prepare(self, rollout_id: int) -> Call[ReadyRollout]:
        """Begin to get one batch, to write it down and to split it."""
        return self._begin(self._host.start(RolloutHost.prepare, rollout_id))

    def read(self, rollout_id: int) -> Call[ReadyRollout]:
        """Begin to read one rollout that was written down."""
        return self._begin(self._host.start(RolloutHost.read, rollout_id))

    def evaluate(self, iteration: int) -> Call[EvalReport]:
        """Begin to score the held-out prompts after ``iteration`` rollouts."""
        return self._begin(self._engines.start(RunEngines.evaluate, iteration))

    def held_out(self, iteration: int) -> Call[dict[str, list[Any]]]:
        """Begin to split the held-out rows; gives references to the shards of each set."""
        return self._begin(self._host.start(RolloutHost.held_out, iteration))

    def cancel(self) -> None:
        """End what was begun and that nobody waits for any more. A rollout that was complete stays written down."""
        call, self._begun = self._begun, None
        if call is None or call.done(0):
            return
        self._batches.call(Batches.cancel)
        with contextlib.suppress(SlimeError):  # that it was cancelled
            call.wait()

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where to send weights; an engine that is gone, and that nobody replaces, is an error here."""
        return self._engines.call(RunEngines.begin_update, only_behind=only_behind)

    def confirm_update(self, version: int) -> None:
        """Record that every engine of the last update has confirmed the weights."""
        self._engines.call(RunEngines.confirm_update, version)

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced."""
        return self._engines.call(RunEngines.fail_update, silent)

    def canary_log_probs(self, urls: Sequence[str], tokens: CanaryTokens) -> Call[dict[str, list[float]]]:
        """Begin to ask for log-probs (nats) of fixed tokens, by engine."""
        return self._engines.start(RunEngines.canary_log_probs, urls, tokens)

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Have the engines give memory back, with ``keep_weights`` all but weights."""
        self._engines.call(RunEngines.sleep, keep_weights)

    def wake(self, *, weights_only: bool = False) -> None:
        """Have them take it again, with ``weights_only`` the weights' alone."""
        self._engines.call(RunEngines.wake, weights_only)

    def account(self) -> Account | None:
        """The account of all samples so far, where they are counted."""
        return self._batches.call(Batches.account)

    def state_dict(self) -> dict[str, Any]:
        """State of the source."""
        return self._batches.call(Batches.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the source where ``state`` was saved."""
        self._batches.call(Batches.load_state_dict, state)

    def progress(self) -> Progress:
        """The last answer to how far it is; asks again, and does not wait for the answer.

        Raises:
            SlimeError: An engine, the router or the worker itself is gone.
        """
        return next(iter(self._progress.answers()), Progress())

    def close(self) -> None:
        """Stop the engines in order, then end the actor."""
        import ray

        ray.wait([self._batches.begin(Batches.close)], timeout=CLOSE_SECONDS)
        self._worker.kill()

    def _begin(self, call: Call[Result]) -> Call[Result]:
        self._begun = call
        return call
