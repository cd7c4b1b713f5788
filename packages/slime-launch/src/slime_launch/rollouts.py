"""The source of batches as the loop sees it: one Ray actor that holds it, with the engines where it has some."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_core.errors import SlimeError
from slime_core.importing import without_collections
from slime_core.types import EvalReport, Span
from slime_launch.calls import Call, Question, Watch, Worker, prepare
from slime_launch.engine_nodes import EngineRoom, NodeLauncher
from slime_launch.placement import Placement, runtime_env
from slime_launch.processes import Place, own_place
from slime_launch.shards import ReadyRollout, Recipe, prepare_rollout, read_rollout, split_held_out
from slime_launch.sources import SourceSpec, make_source
from slime_rollout.data_service import DataService
from slime_rollout.generation_service import ChannelSpec, Progress

if TYPE_CHECKING:
    from slime_rollout.canary import CanaryTokens
    from slime_rollout.data import Account

CLOSE_SECONDS = 10.0


class RolloutHost:
    """A source of batches inside a Ray actor with three threads: one works, one waits for engines that are asked for
    log-probs meanwhile, and one answers :meth:`progress`.
    """

    def __init__(
        self, directory: str, log_path: str, gpus: Sequence[int], spec: SourceSpec, room: EngineRoom | None
    ) -> None:
        prepare(directory, log_path, threads=1)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        with without_collections():
            self._source = make_source(spec, None if room is None else functools.partial(NodeLauncher, room))

    def introduce(self) -> Place:
        """Where this process is."""
        return own_place()

    def prepare(self, rollout_id: int, recipe: Recipe) -> ReadyRollout:
        """Get one batch (generate and score it), write it down, and split it."""
        import ray

        began = time.time()
        batch = self._source.generate(rollout_id)
        ready = prepare_rollout(batch, recipe, state_dict=self._source.state_dict, put=ray.put)
        ready.spans.extend(spans_of(batch.seconds, began, time.time()))
        return ready

    def read(self, rollout_id: int, recipe: Recipe) -> ReadyRollout:
        """Split a rollout that was written down before a restart, and continue the source after it."""
        import ray

        return read_rollout(rollout_id, recipe, load_state_dict=self._source.load_state_dict, put=ray.put)

    def held_out(self, iteration: int, recipe: Recipe) -> dict[str, list[Any]]:
        """References to the shards of each held-out set of a source of rows."""
        import ray

        assert isinstance(self._source, DataService)
        sets = self._source.held_out(iteration)
        return {name: [ray.put(shard) for shard in split_held_out(batch, recipe)] for name, batch in sets.items()}

    def progress(self) -> Progress:
        """How far the source is."""
        return self._source.progress()

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the source."""
        return getattr(self._source, method)(*args, **kwargs)


def spans_of(seconds: Mapping[str, float], began: float, ended: float) -> Iterator[Span]:
    """A batch's phases, one after the other since ``began``, and what was left until ``ended``: it was split."""
    for what, elapsed in {**seconds, "split": ended - began - sum(seconds.values())}.items():
        yield Span("rollout", "score" if what == "reward" else what, began, max(elapsed, 0.0))
        began += elapsed


class RolloutWorker:
    """The actor, from outside: methods of :class:`RolloutHost`, and of the `GenerationService` where it is one."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._progress = Question([worker], "progress")
        self._begun: Call[Any] | None = None

    @classmethod
    def start(
        cls, place: Placement, spec: SourceSpec, *, room: EngineRoom | None, log_dir: Path, watch: Watch
    ) -> RolloutWorker:
        """Start the actor, not the engines yet: those will be in ``room``, or next to the actor."""
        import ray

        log_path = log_dir / "rollout.log"
        actor = ray.remote(RolloutHost).options(
            scheduling_strategy=place.strategy(place.rollout_worker),
            num_cpus=0.5,
            max_concurrency=3,
            runtime_env=runtime_env(),
        )
        gpus = [place.gpus[bundle] for bundle in place.rollout] if place.gpus and room is None else []
        handle = actor.remote(str(Path.cwd()), str(log_path), gpus, spec, room)
        worker = Worker("the rollout worker", handle, log_path, watch)
        worker.introduce()
        return cls(worker)

    def open(self) -> dict[Any, Worker]:
        """Begin to start the engines or to read the data; give the result to :func:`~slime_launch.calls.gather`."""
        return {self._worker.start_call("call", "start"): self._worker}

    def prepare(self, rollout_id: int, recipe: Recipe) -> Call[ReadyRollout]:
        """Begin to get one batch, to write it down and to split it."""
        return self._begin("prepare", rollout_id, recipe)

    def read(self, rollout_id: int, recipe: Recipe) -> Call[ReadyRollout]:
        """Begin to read one rollout that was written down."""
        return self._begin("read", rollout_id, recipe)

    def evaluate(self, iteration: int) -> Call[EvalReport]:
        """Begin to score the held-out prompts after ``iteration`` rollouts."""
        return self._begin("call", "evaluate", iteration)

    def held_out(self, iteration: int, recipe: Recipe) -> Call[dict[str, list[Any]]]:
        """Begin to split the held-out rows; gives references to the shards of each set."""
        return self._begin("held_out", iteration, recipe)

    def cancel(self) -> None:
        """End what was begun and that nobody waits for any more. A rollout that was complete stays written down."""
        call, self._begun = self._begun, None
        if call is None or call.done(0):
            return
        self._worker.call("call", "cancel")
        with contextlib.suppress(SlimeError):  # that it was cancelled
            while not call.done():
                pass

    def begin_update(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where to send weights; an engine that is gone, and that nobody replaces, is an error here."""
        channel: ChannelSpec = self._worker.call("call", "begin_update", only_behind=only_behind)
        return channel

    def confirm_update(self, version: int) -> None:
        """Record that every engine of the last update has confirmed the weights."""
        self._worker.call("call", "confirm_update", version)

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Record that sending failed; returns whether the cause is an engine that is being replaced."""
        by_an_engine: bool = self._worker.call("call", "fail_update", silent)
        return by_an_engine

    def score(self, urls: Sequence[str], tokens: CanaryTokens) -> Call[dict[str, list[float]]]:
        """Begin to ask for log-probs (nats) of fixed tokens, by engine."""
        return Call({self._worker.start_call("call", "score", urls, tokens): self._worker})

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Have the engines give memory back, with ``keep_weights`` all but weights."""
        self._worker.call("call", "sleep", keep_weights)

    def wake(self, *, weights_only: bool = False) -> None:
        """Have them take it again, with ``weights_only`` the weights' alone."""
        self._worker.call("call", "wake", weights_only)

    def account(self) -> Account | None:
        """What became of all samples so far, where they are counted."""
        account: Account | None = self._worker.call("call", "account")
        return account

    def state_dict(self) -> dict[str, Any]:
        """State of the source."""
        state: dict[str, Any] = self._worker.call("call", "state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the source where ``state`` was saved."""
        self._worker.call("call", "load_state_dict", state)

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

        ray.wait([self._worker.start_call("call", "close")], timeout=CLOSE_SECONDS)
        self._worker.kill()

    def _begin(self, method: str, *args: Any) -> Call[Any]:
        self._begun = Call({self._worker.start_call(method, *args): self._worker})
        return self._begun
