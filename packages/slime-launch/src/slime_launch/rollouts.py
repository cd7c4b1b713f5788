"""The generation half as the loop sees it: one Ray actor that holds the engines, the router and the rollout manager."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime_core.errors import SlimeError
from slime_core.hooks import HookArgs
from slime_core.interfaces import WeightChannel
from slime_core.types import EvalReport, RolloutBatch
from slime_launch.calls import Question, Worker
from slime_launch.errors import RunError
from slime_launch.placement import Placement
from slime_launch.watch import Watch
from slime_launch.worker_process import prepare

if TYPE_CHECKING:
    from slime_rollout.config import RolloutConfig
    from slime_rollout.engine.config import EngineConfig, WeightSyncConfig
    from slime_rollout.engine.topology import Topology

CLOSE_SECONDS = 10.0


class Progress(NamedTuple):
    """How far the rollout worker is with what it does: samples scored, of how many, or a few words.

    `behind` says whether engines wait to be sent the current weights.
    """

    done: int | None = None
    total: int | None = None
    note: str = ""
    behind: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """What the generation half needs.

    Attributes:
        engine: Settings of the engines and the router.
        rollout: Settings of prompts, sampling and rewards.
        num_engines: Number of SGLang servers.
        num_gpus: GPUs for generation.
        topology: What ``--sglang-config`` holds.
        dtype: ``float32`` or ``bfloat16``.
        context_length: Longest prompt plus response in tokens; ``None`` leaves it to the model's config.
        seed: The run's seed.
        log_dir: Where engines and router write their logs.
        flags: Every flag of the run, for user hooks.
        colocate: Trainer and engines share their GPUs.
    """

    engine: EngineConfig
    rollout: RolloutConfig
    num_engines: int
    num_gpus: int
    topology: Topology | None
    dtype: str
    context_length: int | None
    seed: int
    log_dir: str
    flags: dict[str, Any]
    colocate: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """What a weight channel is made of. Unlike the channel itself, it needs no torch.

    Attributes:
        sync: By which way they travel.
        engine_urls: The engines.
        tp_size: Tensor-parallel size of one engine.
        hf_checkpoint: What the engines were started with.
        receivers: What applies deltas beside the engines.
        colocate: Trainer and engines share their GPUs.
    """

    sync: WeightSyncConfig
    engine_urls: tuple[str, ...]
    tp_size: int
    hf_checkpoint: str
    receivers: tuple[str, ...]
    colocate: bool

    def open(self) -> WeightChannel:
        """The sending end."""
        from slime_rollout.weights import open_channel

        return open_channel(
            self.sync,
            engine_urls=self.engine_urls,
            tp_size=self.tp_size,
            hf_checkpoint=self.hf_checkpoint,
            receivers=self.receivers,
            colocate=self.colocate,
        )


class RolloutHost:
    """Runs inside a Ray actor with two threads: one works, the other answers :meth:`progress`."""

    def __init__(self, directory: str, log_path: str, gpus: Sequence[int]) -> None:
        prepare(directory, log_path, threads=1)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
        self._fleet: Any = None
        self._manager: Any = None
        self._receiver: Any = None
        self._spec: RolloutSpec | None = None
        self._namespace: Any = None
        self._version = 0
        self._is_up = False
        self._progress = Progress()

    def start(self, spec: RolloutSpec) -> None:
        """Start router and engines, wait until they serve, and read the prompts meanwhile."""
        from slime_rollout.engine.addresses import require_this_machine, router_args
        from slime_rollout.engine.start import start_engines
        from slime_rollout.hooks import check_hooks
        from slime_rollout.rollout import RolloutData, RolloutManager
        from slime_rollout.teacher import make_teacher
        from slime_rollout.weight_version import CacheNamespace

        self._spec, self._namespace = spec, CacheNamespace(spec.engine.update_weight_pause_mode)
        hook_args = HookArgs(spec.flags)
        check_hooks(spec.rollout, hook_args)  # a function that cannot be used is told before engines start
        teacher = make_teacher(spec.rollout)  # so is one that does not answer, or cannot teach this student
        reader = ThreadPoolExecutor(max_workers=1)
        data = reader.submit(RolloutData.load, spec.rollout, hook_args)
        reader.shutdown(wait=False)  # an engine that does not come up is told at once
        self._fleet = start_engines(
            spec.engine,
            model_path=spec.rollout.hf_checkpoint,
            num_engines=spec.num_engines,
            dtype=spec.dtype,
            context_length=spec.context_length,
            seed=spec.seed,
            log_dir=Path(spec.log_dir),
            num_gpus=spec.num_gpus,
            topology=spec.topology,
            longest_sample=longest_sample(spec.rollout),
            weights_follow=True,
            on_progress=self._count_processes,
        )
        local = spec.engine.update_weight_mode == "delta" and not spec.engine.update_weight_receivers
        if spec.engine.update_weight_transport == "tensor" or local:
            require_this_machine(self._fleet.engine_urls)
        self._receivers(self._fleet.engine_urls, spec.engine.update_weight_receivers)  # is there one for each?
        self._is_up = True
        self._receiver = start_receiver(spec)
        self._progress = Progress(note="reading prompts")
        self._manager = RolloutManager(
            spec.rollout,
            router_url=self._fleet.router_url,
            run_seed=spec.seed,
            data=data.result(),
            hook_args=HookArgs(spec.flags | router_args(self._fleet.router_url, self._fleet.model_urls)),
            on_progress=self._count_samples,
            teacher=teacher,
            retry_delays=retry_delays(spec.engine),
            cache_namespace=self._namespace,
        )
        self._progress = Progress(note="engines and router are up; the trainers are loading")

    def channel(self, only_behind: bool) -> ChannelSpec:
        """Where weights go: to these engines, which are all alive, or to those of them that are behind."""
        if self._spec is None:
            raise RunError("the engines are not started")
        engine_urls = tuple(self._fleet.begin_update(only_behind=only_behind))
        if engine_urls:
            self._namespace.change()
        return ChannelSpec(
            sync=self._spec.engine,
            engine_urls=engine_urls,
            tp_size=self._fleet.tp_size,
            hf_checkpoint=self._spec.rollout.hf_checkpoint,
            receivers=self._receivers(engine_urls, self._spec.engine.update_weight_receivers),
            colocate=self._spec.colocate,
        )

    def _receivers(self, engine_urls: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
        """What applies deltas beside each engine."""
        if self._receiver is not None:
            return (str(self._receiver.url),)
        if not given:
            return ()
        from slime_rollout.weights import receivers_beside

        return receivers_beside(engine_urls, given)

    def confirm_update(self, version: int) -> None:
        """All engines of the last channel have this version."""
        self._fleet.confirm_update(version)
        self._namespace.change()
        self._version = version

    def fail_update(self, silent: Sequence[str]) -> bool:
        """Not all have it; returns whether an engine is to blame that is being replaced, as silent ones are."""
        failed_by_an_engine: bool = self._fleet.fail_update(silent)
        return failed_by_an_engine

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score one rollout."""
        with self._blame_engines():
            batch: RolloutBatch = self._manager.generate(rollout_id, weight_version=self._version)
        return batch

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score the held-out prompts."""
        with self._blame_engines():
            report: EvalReport = self._manager.evaluate(rollout_id)
        return report

    def state_dict(self) -> dict[str, Any]:
        """State of the data source."""
        state: dict[str, Any] = self._manager.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data source where ``state`` was taken."""
        self._manager.load_state_dict(state)

    def progress(self) -> Progress:
        """The last thing that happened; raises if an engine or the router is gone that nobody replaces."""
        if not self._is_up:
            return self._progress
        self._fleet.check()
        lost = self._fleet.not_serving()
        note = f"replacing {', '.join(lost)}" if lost else self._progress.note
        return self._progress._replace(note=note, behind=bool(self._fleet.engines_behind()))

    def close(self) -> None:
        """Stop what generates beside the trainer, then engines and router."""
        self._is_up = False
        if self._manager is not None:
            self._manager.close()
        if self._receiver is not None:
            self._receiver.stop()
        if self._fleet is not None:
            self._fleet.stop()

    @contextlib.contextmanager
    def _blame_engines(self) -> Iterator[None]:
        """Where a request fails because an engine or the router is gone, say that, with the end of its log."""
        self._progress = Progress()
        try:
            yield
        except SlimeError:
            self._fleet.check()
            raise

    def _count_processes(self, ready: int, total: int, seconds: float) -> None:
        self._progress = Progress(note=f"engines and router ready: {ready} of {total}")

    def _count_samples(self, done: int, total: int) -> None:
        self._progress = Progress(done, total)


def retry_delays(engine: EngineConfig) -> tuple[float, ...]:
    """Seconds before each retry of a request: with fault tolerance, until an engine has failed for good."""
    from slime_rollout.http import RETRY_DELAYS, patient_delays

    if not engine.use_fault_tolerance:
        return RETRY_DELAYS
    noticed = engine.rollout_health_check_interval + engine.rollout_health_check_timeout
    return patient_delays((noticed + engine.engine_startup_timeout) * (engine.rollout_max_restarts + 1))


def longest_sample(config: RolloutConfig) -> int:
    """Tokens of the longest prompt and response that the run may ask for, as far as flags say."""
    response = max(config.rollout_max_response_len, config.eval_max_response_len or 0)
    return (config.rollout_max_prompt_len or 1) + response


def start_receiver(spec: RolloutSpec) -> Any:
    """What applies deltas beside the engines; ``None`` in a run that sends none, or whose receivers are elsewhere."""
    if spec.engine.update_weight_mode != "delta" or spec.engine.update_weight_receivers:
        return None
    from slime_rollout.weights import DeltaReceiver

    return DeltaReceiver(
        directory=str(spec.engine.update_weight_local_checkpoint_dir),
        hf_checkpoint=spec.rollout.hf_checkpoint,
        source=str(spec.engine.update_weight_disk_dir),
    )


class RolloutWorker:
    """The rollout actor, from outside."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._progress = Question([worker], "progress")

    @classmethod
    def start(cls, place: Placement, *, log_dir: Path, watch: Watch) -> RolloutWorker:
        """Start the actor.

        Args:
            place: Where it goes.
            log_dir: Where its output goes.
            watch: Ends waits for the worker.
        """
        import ray

        log_path = log_dir / "rollout.log"
        actor = ray.remote(RolloutHost).options(
            scheduling_strategy=place.strategy(place.rollout_worker), num_cpus=0.5, max_concurrency=2
        )
        handle = actor.remote(str(Path.cwd()), str(log_path), list(place.gpus))
        return cls(Worker("the rollout worker", handle, log_path, watch))

    def open(self, spec: RolloutSpec) -> tuple[Any, Worker]:
        """Begin to start the engines; give the result to `calls.gather`."""
        return self._worker.start_call("start", spec), self._worker

    def channel(self, *, only_behind: bool = False) -> ChannelSpec:
        """Where weights go; an engine that is gone, and that nobody replaces, is an error here.

        Args:
            only_behind: Leave out the engines that have the current weights.
        """
        channel: ChannelSpec = self._worker.call("channel", only_behind)
        return channel

    def confirm_update(self, version: int) -> None:
        """Say that every engine of the last channel has confirmed the weights."""
        self._worker.call("confirm_update", version)

    def fail_update(self, silent: Sequence[str] = ()) -> bool:
        """Say that sending failed; returns whether that is an engine's fault that is being replaced.

        Args:
            silent: Addresses of the engines that gave no answer.
        """
        by_an_engine: bool = self._worker.call("fail_update", silent)
        return by_an_engine

    def generate(self, rollout_id: int, *, on_poll: Callable[[], None] = lambda: None) -> RolloutBatch:
        """Generate and score one rollout."""
        batch: RolloutBatch = self._worker.call("generate", rollout_id, on_poll=on_poll)
        return batch

    def evaluate(self, iteration: int, *, on_poll: Callable[[], None] = lambda: None) -> EvalReport:
        """Score the held-out prompts after ``iteration`` rollouts."""
        report: EvalReport = self._worker.call("evaluate", iteration, on_poll=on_poll)
        return report

    def state_dict(self) -> dict[str, Any]:
        """State of the data source."""
        state: dict[str, Any] = self._worker.call("state_dict")
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the data source where ``state`` was taken."""
        self._worker.call("load_state_dict", state)

    def progress(self) -> Progress:
        """How far it was when it was last asked; asks again, and does not wait for the answer.

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
