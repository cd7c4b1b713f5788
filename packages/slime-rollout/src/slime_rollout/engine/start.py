"""The engines of a run: of one model or several, started here or external."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slime_rollout.engine import EngineStartError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.external import ExternalFleet
from slime_rollout.engine.fleet import EngineFleet, Fleet, Progress
from slime_rollout.engine.server import EngineLauncher, EngineSpec, SGLangEngine, equal_specs
from slime_rollout.engine.topology_plan import (
    EnginePlan,
    PlannedModel,
    Topology,
    check_runs_here,
    plan_engines,
    topology_of,
)


def start_engines(
    config: EngineConfig,
    model: EngineSpec,
    *,
    num_engines: int,
    log_dir: Path,
    num_gpus: int | None = None,
    num_spare: int = 0,
    topology: Topology | None = None,
    longest_sample: int | None = None,
    weights_follow: bool = False,
    on_progress: Progress | None = None,
    launcher: EngineLauncher | None = None,
) -> Fleet:
    """Start the engines that ``config`` asks for, or attach to external ones; return when requests can be sent.

    Args:
        model: Served by all of them. Its seed is the first engine's.
        num_engines: Number of engines to start, where all are alike.
        log_dir: As of `EngineFleet.start`, like ``launcher``.
        num_gpus: GPUs for generation, which the topology must use up; those of ``num_engines`` if ``None``.
        num_spare: Further engines, each to be started once the launcher has room for it.
        topology: That of :func:`topology_of`, if it was read already.
        longest_sample: Prompt plus response that external engines must take; not checked if ``None``.
        weights_follow: Whether new weights are sent before the first request.

    Raises:
        ConfigError: The installed SGLang does not know a flag or a value.
        EngineError: Something did not come up, or does not fit the run. Everything was stopped again.
    """
    gpus = num_engines * config.rollout_num_gpus_per_engine if num_gpus is None else num_gpus
    if (topology := topology or topology_of(config, gpus)) is not None:
        plan = plan_engines(topology, config, model, num_gpus=gpus)
        return start_models(plan, log_dir=log_dir, on_progress=on_progress, launcher=launcher)
    if config.rollout_external_engine_addrs:
        wanted = dataclasses.replace(model, context_length=longest_sample)
        return ExternalFleet.attach(
            config, wanted, log_dir=log_dir, weights_follow=weights_follow, on_progress=on_progress
        )
    specs = equal_specs(model, num_engines + num_spare, config)
    now, later = specs[:num_engines], specs[num_engines:]
    return EngineFleet.launch(config, now, spare=later, log_dir=log_dir, on_progress=on_progress, launcher=launcher)


class ModelFleets(EngineFleet):
    """The trained model's fleet, together with those of the other models. Made by :func:`start_models`."""

    def __init__(
        self, fleets: Mapping[str, EngineFleet], trained: str, encoders: Collection[SGLangEngine] = ()
    ) -> None:
        main = fleets[trained]
        super().__init__(main._engines, main._router, main._monitor, main.tp_size)
        self._fleets = dict(fleets)
        self._encoders = list(encoders)

    @property
    def model_urls(self) -> dict[str, str]:
        """As of `Fleet`."""
        return {name: fleet.router_url for name, fleet in self._fleets.items()}

    def check(self) -> None:
        """As of `Fleet`, for all models."""
        for fleet in self._fleets.values():
            fleet.check()
        for encoder in self._encoders:
            encoder.check()

    def not_serving(self) -> list[str]:
        """Names of what is being replaced, with their models."""
        return [f"{name} {lost}" for name, fleet in self._fleets.items() for lost in fleet.not_serving()]

    def stop(self) -> None:
        """End all processes; returns when they are gone."""
        for encoder in self._encoders:
            encoder.request_stop()
        parts: list[SGLangEngine | EngineFleet] = [*self._encoders, *self._fleets.values()]
        with contextlib.ExitStack() as stack:  # an error with one of them must not keep the others
            for part in parts:
                stack.callback(part.stop)


def start_models(
    plan: EnginePlan, *, log_dir: Path, on_progress: Progress | None = None, launcher: EngineLauncher | None = None
) -> ModelFleets:
    """Start everything; return when every router sends requests to its engines.

    If no model is trained, the first one counts as that. Each model's logs go into a directory of its name.
    Prefill, decode and encoder groups are written from SGLang's documentation; they were not run on CUDA.

    Raises:
        ConfigError: A group needs GPUs, and there are none.
        EngineError: As of `EngineFleet.start`. What is still starting is not waited for.
    """
    check_runs_here(plan)
    failed = False
    main = plan.trained or plan.models[0]
    other_config = dataclasses.replace(plan.config, sglang_router_port=None, sglang_router_url=None)
    ready = {model.name: 0 for model in plan.models}
    total = sum(len(model.generating) + 1 for model in plan.models)

    def launch(model: PlannedModel) -> EngineFleet:
        def count(done: int, _total: int, seconds: float) -> None:
            if failed:
                raise EngineStartError(f"the start of model {model.name} was ended, as another one has failed")
            ready[model.name] = done
            if on_progress is not None:
                on_progress(sum(ready.values()), total, seconds)

        for encoder in encoders[model.name]:
            encoder.wait_until_ready(plan.config.engine_startup_timeout)
        config, logs = plan.config if model is main else other_config, log_dir / model.name
        fleet = EngineFleet.launch(config, model.generating, log_dir=logs, on_progress=count, launcher=launcher)
        undo.callback(fleet.stop)
        return fleet

    with contextlib.ExitStack() as undo, ThreadPoolExecutor(len(plan.models)) as pool:
        host = launcher or EngineLauncher(plan.config, Ports())
        encoders: dict[str, list[SGLangEngine]] = {model.name: [] for model in plan.models}
        for model in plan.models:
            for number, spec in enumerate(model.encoders):
                encoder = host.start(spec, log_path=log_dir / model.name / f"encoder_{number}.log")
                undo.callback(encoder.stop)
                encoders[model.name].append(encoder)
        all_encoders = list(itertools.chain.from_iterable(encoders.values()))
        futures = {model.name: pool.submit(launch, model) for model in plan.models}
        try:
            for future in concurrent.futures.as_completed(futures.values()):
                future.result()
        except BaseException:
            failed = True
            for encoder in all_encoders:
                encoder.request_stop()
            raise
        fleets = ModelFleets({name: future.result() for name, future in futures.items()}, main.name, all_encoders)
        undo.pop_all()
    return fleets
