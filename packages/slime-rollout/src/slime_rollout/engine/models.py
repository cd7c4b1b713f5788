"""Several models at once: one fleet with a router for each. The trainer's weights go to one of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from slime_core.errors import ConfigError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineStartError
from slime_rollout.engine.fleet import EngineFleet, Progress
from slime_rollout.engine.server import EngineSpec, SGLangEngine
from slime_rollout.engine.topology_plan import EnginePlan, PlannedModel


class ModelFleets:
    """The engines of an :class:`EnginePlan`. Made by :meth:`start`; as a context manager it stops them on exit.

    Attributes:
        startup_seconds: How long it took until the first request could be sent.
    """

    def __init__(self, fleets: Mapping[str, EngineFleet], trained: str) -> None:
        self._fleets = dict(fleets)
        self._trained = self._fleets[trained]
        self._encoders: list[SGLangEngine] = []
        self.startup_seconds = 0.0

    @classmethod
    def start(cls, plan: EnginePlan, *, log_dir: Path, on_progress: Progress | None = None) -> ModelFleets:
        """Start everything; return when every router sends requests to its engines.

        Prefill, decode and encoder groups are written from SGLang's documentation; they were not run on CUDA.

        Args:
            plan: What to start. Where no model is trained, the first one counts as that.
            log_dir: Each model's logs go into the directory of its name there.
            on_progress: Told how far it is, over all models.

        Raises:
            ConfigError: A group needs GPUs, and there are none.
            PortInUseError: A port that was asked for is taken.
            EngineStartError: Something did not come up, with the last lines of its log. Everything was stopped again;
                what was still starting is not waited for.
        """
        check_runs_here(plan)
        started = time.monotonic()
        main = plan.trained or plan.models[0]
        progress = _Progress(plan, on_progress)
        with contextlib.ExitStack() as undo, ThreadPoolExecutor(len(plan.models)) as pool:
            encoders = {model.name: _start_encoders(model, plan.config, log_dir, undo) for model in plan.models}

            def launch(model: PlannedModel) -> EngineFleet:
                for engine in encoders[model.name]:
                    engine.wait_until_ready(plan.config.engine_startup_timeout)
                config = plan.config if model is main else with_own_router(plan.config)
                fleet = EngineFleet.launch(
                    config, model.generating, log_dir=log_dir / model.name, on_progress=progress.of(model.name)
                )
                undo.callback(fleet.stop)
                return fleet

            started_encoders = [engine for engines in encoders.values() for engine in engines]
            futures = {model.name: pool.submit(launch, model) for model in plan.models}
            try:
                for future in concurrent.futures.as_completed(futures.values()):
                    future.result()
            except BaseException:
                progress.end_starts = True
                for encoder in started_encoders:
                    encoder.request_stop()
                raise
            fleets = cls({name: future.result() for name, future in futures.items()}, main.name)
            fleets._encoders = started_encoders
            undo.pop_all()
        fleets.startup_seconds = time.monotonic() - started
        return fleets

    @property
    def router_url(self) -> str:
        """Where requests to the trained model go."""
        return self._trained.router_url

    @property
    def engine_urls(self) -> list[str]:
        """The engines of the trained model: where its weights go."""
        return list(self._trained.engine_urls)

    @property
    def tp_size(self) -> int:
        """Tensor parallel size of one of these."""
        return self._trained.tp_size

    @property
    def model_urls(self) -> dict[str, str]:
        """Name of every model → address of its router."""
        return {name: fleet.router_url for name, fleet in self._fleets.items()}

    def check(self) -> None:
        """Raise if any process is gone.

        Raises:
            EngineDiedError: Naming the first one, with the last lines of its log.
        """
        for fleet in self._fleets.values():
            fleet.check()
        for encoder in self._encoders:
            encoder.check()

    def not_serving(self) -> list[str]:
        """Names of what is being replaced, with their models."""
        return [f"{name} {lost}" for name, fleet in self._fleets.items() for lost in fleet.not_serving()]

    def engines_behind(self) -> list[str]:
        """Engines of the trained model that wait for the weights of the last confirmed update."""
        return self._trained.engines_behind()

    def begin_update(self, *, only_behind: bool = False) -> list[str]:
        """Where to send weights now: as :meth:`EngineFleet.begin_update` of the trained model."""
        self.check()
        return self._trained.begin_update(only_behind=only_behind)

    def confirm_update(self, version: int) -> None:
        """As :meth:`EngineFleet.confirm_update` of the trained model."""
        self._trained.confirm_update(version)

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """As :meth:`EngineFleet.fail_update` of the trained model."""
        return self._trained.fail_update(silent)

    def stop(self) -> None:
        """End all processes; returns when they are gone. Does nothing the second time."""
        for encoder in self._encoders:
            encoder.request_stop()
        with contextlib.ExitStack() as stack:  # one that cannot be stopped does not keep the others
            for encoder in self._encoders:
                stack.callback(encoder.stop)
            for fleet in self._fleets.values():
                stack.callback(fleet.stop)

    def __enter__(self) -> ModelFleets:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def check_runs_here(plan: EnginePlan) -> None:
    """Check that there are GPUs where a group needs them.

    Raises:
        ConfigError: It does, and there are none.
    """
    for model in plan.models:
        for spec in model.specs:
            if spec.worker_type != "regular" and spec.device == "cpu":
                raise ConfigError(
                    f"--sglang-config: the {spec.worker_type} group of model {model.name} needs GPUs, which hand data "
                    "to each other; without CUDA only regular groups run"
                )


def with_own_router(config: EngineConfig) -> EngineConfig:
    """The config of a model beside the trained one: its router is a new one, on a free port."""
    return dataclasses.replace(config, sglang_router_port=None, sglang_router_url=None)


def _start_encoders(
    model: PlannedModel, config: EngineConfig, log_dir: Path, undo: contextlib.ExitStack
) -> list[SGLangEngine]:
    def start(number: int, spec: EngineSpec) -> SGLangEngine:
        engine = SGLangEngine.start(config, spec, log_path=log_dir / model.name / f"encoder_{number}.log")
        undo.callback(engine.stop)
        return engine

    return [start(number, spec) for number, spec in enumerate(model.encoders)]


class _Progress:
    """Adds up the progress of several fleets.

    Attributes:
        end_starts: Ends the start of those that are not up yet.
    """

    def __init__(self, plan: EnginePlan, report: Progress | None) -> None:
        self.end_starts = False
        self._report = report
        self._ready = {model.name: 0 for model in plan.models}
        self._total = sum(len(model.generating) + 1 for model in plan.models)

    def of(self, name: str) -> Callable[[int, int, float], None]:
        def count(ready: int, total: int, seconds: float) -> None:
            if self.end_starts:
                raise EngineStartError(f"the start of model {name} was ended, for another one has failed")
            self._ready[name] = ready
            if self._report is not None:
                self._report(sum(self._ready.values()), self._total, seconds)

        return count
