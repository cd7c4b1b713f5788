"""The sizes, memory and times of a command, each from those before it."""

from __future__ import annotations

import dataclasses

from slime_convert.mapping import weight_map
from slime_convert.shape import ModelShape
from slime_launch.devices import DeviceSpec
from slime_launch.errors import Problems
from slime_launch.placement import plan_layout
from slime_launch.plan.alternatives import Cost
from slime_launch.plan.cost import PhaseTime, Sizes, Work, run_seconds, uncounted_sets
from slime_launch.plan.engines import EngineEstimate, engine_groups, engine_memory, engine_weights, shape_of
from slime_launch.plan.fit import check_engine, check_phases, check_trainer, memory_in_step
from slime_launch.plan.layout import BatchSizes, batch_of, check_nodes, place, route_of, sizes_of
from slime_launch.plan.memory import Phase, TrainerMemory, gib, host_phase, phases
from slime_launch.preflight import Found
from slime_rollout.engine import MODES, Way, ways_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Premises:
    """The premises of a plan: devices, and the lengths of the command's data.

    Attributes:
        prompt_tokens: Of the longest prompt that is known.
        longest_row: Tokens of the longest row that is trained on as it is, if that is known.
        rows_known: Whether there are sizes: where a problem keeps rows from being known, rows as long as the context
            may not fit.
    """

    device: DeviceSpec
    gpus_per_node: int
    prompt_tokens: int
    longest_row: int | None
    rows_known: bool


class Estimate:
    """Where a command's ranks and engines are, their sizes, memory and times, as far as problems let them be known.

    Whether it fits is not asked where a flag could not be read, which may be the one that makes it fit.
    """

    def __init__(self, found: Found, premises: Premises, problems: Problems) -> None:
        settings = found.settings
        self._settings, self._device, self._problems = settings, premises.device, problems
        self._overrides, self._rows = found.overrides or {}, found.rows or {}
        self.sizes: Sizes | None = None
        self.batch: BatchSizes | None = None
        self.trainer: TrainerMemory | None = None
        self.engines: list[EngineEstimate] = []
        self.notices: list[str] = []
        self.phases: list[Phase] = []
        self.transports: list[Way] = []
        self.times: list[PhaseTime] = []
        self._groups = engine_groups(settings, found.engines)
        self.layout = plan_layout(settings.placed, cuda=not self._device.is_cpu, trains=settings.kind.trains)
        self.nodes = place(self.layout, premises.gpus_per_node, self._groups)
        given = (self.nodes, settings.engine, settings.cluster, self._device)
        problems.attempt(check_nodes, *given, trains=settings.kind.trains)
        if found.shape is not None:
            self._add_all(found.shape, premises)

    def cost(self) -> Cost | None:
        """GPUs, memory and seconds of the run; ``None`` where times are not known."""
        if not self.times:
            return None
        settings = self._settings
        seconds = run_seconds(self.times, overlaps=settings.rollout.selection.async_buffer_size is not None)
        return Cost(
            gpus=len(self.layout.bundles),
            memory=0 if self.trainer is None else self.trainer.total,
            seconds=seconds,
            rollout_seconds=seconds / max(1, settings.num_rollout),
        )

    def _add_all(self, shape: ModelShape, premises: Premises) -> None:
        """Add sizes, memory and times, which follow from the model's shape."""
        settings, device, problems = self._settings, self._device, self._problems
        length = settings.rollout.data.rollout_max_prompt_len or premises.prompt_tokens
        if premises.rows_known:
            limits = (length, shape.max_position_embeddings, premises.longest_row)
            self.sizes = problems.attempt(sizes_of, settings, *limits)
        self._add_engines(shape)
        if self.engines and settings.kind.trains:
            count = sum(group.count for group in self._groups if group.trained)
            tensors = weight_map(shape, one_expert=True).hf_count()
            size = engine_weights(settings, shape)
            route = route_of(settings.cluster, self.nodes, device, size, engines=count, tensors=tensors)
            self.transports = ways_of(settings.engine, route, modes=MODES)
        if self.sizes is None:
            return
        if settings.kind.trains:
            self.trainer = self._find_trainer(shape, self.sizes)
        if not settings.kind.trains or self.trainer is not None:
            self.phases = phases(settings, device, self.trainer, self.engines)
            self._add_host()
            if (self.trainer is None or self.trainer.total <= device.memory) and not settings.unread:
                problems.attempt(check_phases, device, self.phases)
        for engine in () if settings.unread else self.engines:
            problems.attempt(check_engine, device, engine, self.sizes)
        work = Work(
            settings=settings,
            shape=shape,
            device=device,
            engines=[engine for engine in self.engines if engine.group.generates],
            sizes=self.sizes,
            rows=self._rows,
        )
        chosen = next((way for way in self.transports if way.chosen), None)
        self.times = problems.attempt(work.phases, chosen, self.trainer) or []
        self._add_uncounted()

    def _add_uncounted(self) -> None:
        """The held-out sets whose rows were not counted, as they are in no time."""
        if self._settings.kind.is_recorded:
            return
        uncounted = self._problems.attempt(uncounted_sets, self._settings.rollout, self._rows)
        if uncounted and self.times:
            self.notices.append(
                f"the rows of the held-out set{'s' * (len(uncounted) > 1)} {', '.join(uncounted)} were not counted: "
                "the time of their evaluation is not in this plan"
            )

    def _add_engines(self, shape: ModelShape) -> None:
        """The memory of each group's engines, where the model's shape is known; an encoder holds a part of one."""
        for group in self._groups:
            own = shape_of(group, shape)
            if own is None or group.role == "encoder":
                self.notices.append(f"the memory of the {group.title} engines is not known, and not in this plan")
                continue
            memory = self._problems.attempt(engine_memory, self._settings, own, self._device, group)
            self.engines += [] if memory is None else [memory]

    def _add_host(self) -> None:
        """Add the host memory that a node's trainer ranks take, which is compared where it is known."""
        ranks = max((len(node.trainer_ranks) for node in self.nodes), default=0)
        sleeps = self._settings.kind.trainer_sleeps
        host = None if self.trainer is None else host_phase(self._device, self.trainer, ranks, sleeps=sleeps)
        if host is not None and self._device.host_memory is None:
            self.notices.append(
                f"{ranks} trainer ranks take {gib(host.needed)} of their node's host memory, for frozen models, "
                "an offloaded optimizer and what they give back while engines generate; how much a node has is not "
                "known here"
            )
        elif host is not None:
            self.phases.append(host)

    def _find_trainer(self, shape: ModelShape, sizes: Sizes) -> TrainerMemory | None:
        """The memory of a trainer rank, after the batch, if one is trained on: a run may be a single evaluation."""
        settings, given, problems = self._settings, (self._settings, shape, self._device), self._problems
        if not settings.kind.only_evaluates:
            self.batch = problems.attempt(batch_of, settings, sizes)
            if self.batch is None:
                return None
        trainer = problems.attempt(memory_in_step, *given, self.batch, sizes, self._overrides)
        if trainer is not None and not settings.unread:
            problems.attempt(check_trainer, *given, trainer, sizes, self._overrides)
        return trainer
