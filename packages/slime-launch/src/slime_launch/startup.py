"""Ray, then both halves of the run at the same time."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

from slime_launch.calls import Watch, gather
from slime_launch.config import Settings
from slime_launch.console import RunConsole
from slime_launch.placement import Layout, Placement, check_layout, place_run, plan_layout, threads_per_worker
from slime_launch.preflight import Checked
from slime_launch.ray_runtime import ray_runtime
from slime_launch.rollouts import RolloutWorker
from slime_launch.trainers import TrainerGroup, TrainerSpec
from slime_launch.validate import engine_dtype, num_engines
from slime_rollout.generation_service import GenerationSpec


class Startup:
    """Starts the parts of a run, one method after the other.

    Args:
        checked: The command.
        log_dir: Where every part writes its log.
        console: Told what is waited for.
        watch: Ends every wait.
        stack: Gets the way to stop each part that was started.
    """

    def __init__(
        self, checked: Checked, log_dir: Path, console: RunConsole, watch: Watch, stack: contextlib.ExitStack
    ) -> None:
        self._checked = checked
        self._settings = checked.settings
        self._log_dir = log_dir
        self._console = console
        self._watch = watch
        self._stack = stack

    def ray(self) -> Placement:
        """Start or join Ray and get room on it.

        Raises:
            PlacementError: No cluster, no room, or GPUs would be shared.
        """
        cluster = self._settings.cluster
        with self._console.wait("start Ray", done="started Ray"):
            runtime = self._stack.enter_context(ray_runtime(cluster, address=os.environ.get("RAY_ADDRESS")))
            self._watch.add(runtime.check)
            self._watch.listen(at_once=False)
        layout = plan_layout(cluster, cuda=runtime.cuda)
        check_layout(layout)
        self._console.line(describe(layout))
        with self._console.wait("wait for room on the Ray cluster") as wait:
            return place_run(layout, timeout=cluster.ray_placement_timeout, watch=self._watch, on_wait=wait.update)

    def halves(self, place: Placement, *, resume_from: Path | None) -> tuple[TrainerGroup, RolloutWorker]:
        """Start engines and trainer ranks side by side; return when all are ready.

        Args:
            place: Where they go.
            resume_from: Checkpoint of this run to continue from.

        Raises:
            SlimeError: One of them does not come up, with the end of its log.
        """
        settings = self._settings
        if not place.layout.cuda:
            settings = limit_threads(settings, engines=self._checked.num_engines)
        trainers = TrainerGroup.start(place, settings.megatron, log_dir=self._log_dir, watch=self._watch)
        self._stack.callback(trainers.kill)
        service = self._generation_spec(settings)
        rollout = RolloutWorker.start(place, service, log_dir=self._log_dir, watch=self._watch)
        self._stack.callback(rollout.close)
        spec = TrainerSpec(
            config=self._checked.weights.into(settings.megatron),
            algorithm=settings.algorithm,
            shape=self._checked.shape,
            resume_from=str(resume_from) if resume_from is not None else None,
        )
        title = "start engines, router and trainers"
        with self._console.wait(title, done="engines, router and trainers are up") as wait:
            engines = rollout.open()
            models = trainers.build(spec)
            gather(dict([engines, *models]), on_poll=lambda: wait.update(rollout.progress().note))
        return trainers, rollout

    def _generation_spec(self, settings: Settings) -> GenerationSpec:
        return GenerationSpec(
            engine=settings.engine,
            rollout=settings.rollout,
            num_engines=num_engines(settings),
            num_gpus=settings.cluster.rollout_gpus,
            topology=self._checked.topology,
            dtype=engine_dtype(settings),
            context_length=self._checked.shape.max_position_embeddings,
            seed=settings.megatron.seed,
            log_dir=str(self._log_dir.resolve()),
            flags=settings.flags(),
            colocate=settings.cluster.colocate,
        )


def limit_threads(settings: Settings, *, engines: int) -> Settings:
    """Share the machine's cores: all trainer ranks compute at the same time, and so do all ``engines``."""
    cores = len(os.sched_getaffinity(0))
    megatron, engine = settings.megatron, settings.engine
    if megatron.trainer_threads is None:
        threads = threads_per_worker(settings.cluster.actor_num_gpus_per_node, cores)
        megatron = dataclasses.replace(megatron, trainer_threads=threads)
    if engine.engine_threads is None and not engine.rollout_external_engine_addrs:
        engine = dataclasses.replace(engine, engine_threads=threads_per_worker(engines, cores))
    return dataclasses.replace(settings, megatron=megatron, engine=engine)


def describe(layout: Layout) -> str:
    """Where the run lives, in one line."""
    kind = "GPUs" if layout.cuda else "CPU worker processes, because there is no CUDA"
    if not layout.rollout:
        return f"placement: {len(layout.trainer)} for training ({kind}); others run the engines"
    shared = " taking turns" if layout.shared else ""
    return f"placement: {len(layout.trainer)} for training, {len(layout.rollout)} for generation{shared} ({kind})"
