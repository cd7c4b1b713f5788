"""The sizes, memory and times of a command, each from those before it."""

from __future__ import annotations

from collections.abc import Mapping

from slime_convert.shape import ModelShape
from slime_launch.config import Settings
from slime_launch.devices import Device
from slime_launch.errors import Problems
from slime_launch.overrides import Overrides
from slime_launch.plan.cost import PhaseTime, Sizes, phase_times, uncounted_sets, with_delta
from slime_launch.plan.engines import EngineGroup, EngineMemory, engine_memory, engine_weights, shape_of
from slime_launch.plan.fit import check_engine, check_phases, check_trainer
from slime_launch.plan.layout import Batch, Node, batch_of, route_of, sizes_of
from slime_launch.plan.memory import Phase, TrainerMemory, gib, host_phase, phases, trainer_memory
from slime_launch.preflight import Found
from slime_rollout.engine.transports import Transport, transports


class Estimate:
    """The sizes, memory and times of a command, as far as its problems let them be known.

    Whether it fits is not asked where a flag could not be read, which may be the one that makes it fit.
    """

    def __init__(
        self,
        settings: Settings,
        found: Found,
        device: Device,
        problems: Problems,
        prompt_tokens: int,
        longest_row: int | None,
        rows_known: bool,
        nodes: list[Node],
        groups: list[EngineGroup],
    ) -> None:
        self.sizes: Sizes | None = None
        self.batch: Batch | None = None
        self.trainer: TrainerMemory | None = None
        self.engines: list[EngineMemory] = []
        self.notices: list[str] = []
        self.phases: list[Phase] = []
        self.transports: list[Transport] = []
        self.times: list[PhaseTime] = []
        shape = found.shape
        if shape is None:
            return
        length = settings.rollout.data.rollout_max_prompt_len or prompt_tokens
        if rows_known:
            self.sizes = problems.attempt(sizes_of, settings, length, shape.max_position_embeddings, longest_row)
        self._add_engines(settings, shape, groups, device, problems)
        if self.engines and settings.trains:
            count = sum(group.count for group in groups if group.trained)
            route = route_of(settings, nodes, device, engine_weights(settings, shape), engines=count)
            self.transports = with_delta(transports(settings.engine, route), settings, shape)
        if self.sizes is None:
            return
        if settings.trains:
            self.trainer = self._find_trainer(settings, shape, found.overrides or {}, device, problems)
        if not settings.trains or self.trainer is not None:
            self.phases = phases(settings, device, self.trainer, self.engines)
            self._add_host(settings, device, max((len(node.trainer_ranks) for node in nodes), default=0))
            if (self.trainer is None or self.trainer.total <= device.memory) and not settings.unread:
                problems.attempt(check_phases, device, self.phases)
        for engine in () if settings.unread else self.engines:
            problems.attempt(check_engine, device, engine, self.sizes)
        given = (settings, shape, device, self.engines, self.sizes, self.transports)
        self.times = problems.attempt(phase_times, *given, trainer=self.trainer, rows=found.rows or {}) or []
        self._add_uncounted(settings, found.rows or {}, problems)

    def _add_uncounted(self, settings: Settings, rows: Mapping[str, int], problems: Problems) -> None:
        """The held-out sets whose rows were not counted, as they are in no time."""
        uncounted = [] if settings.is_recorded else problems.attempt(uncounted_sets, settings, rows) or []
        if uncounted and self.times:
            self.notices.append(
                f"the rows of the held-out set{'s' * (len(uncounted) > 1)} {', '.join(uncounted)} were not counted: "
                "the time of their evaluation is not in this plan"
            )

    def _add_engines(
        self, settings: Settings, shape: ModelShape, groups: list[EngineGroup], device: Device, problems: Problems
    ) -> None:
        """The memory of each group's engines, where the model's shape is known; an encoder holds a part of one."""
        for group in groups:
            own = shape_of(group, shape)
            if own is None or group.role == "encoder":
                self.notices.append(f"the memory of the {group.title} engines is not known, and not in this plan")
                continue
            memory = problems.attempt(engine_memory, settings, own, device, group)
            self.engines += [] if memory is None else [memory]

    def _add_host(self, settings: Settings, device: Device, ranks: int) -> None:
        """What a node's trainer ranks take of its host memory, which is compared where it is known."""
        host = None if self.trainer is None else host_phase(settings, device, self.trainer, ranks)
        if host is not None and device.host_memory is None:
            self.notices.append(
                f"{ranks} trainer ranks take {gib(host.needed)} of their node's host memory, for frozen models, "
                "an offloaded optimizer and what they give back while engines generate; how much a node has is not "
                "known here"
            )
        elif host is not None:
            self.phases.append(host)

    def _find_trainer(
        self, settings: Settings, shape: ModelShape, overrides: Overrides, device: Device, problems: Problems
    ) -> TrainerMemory | None:
        """The memory of a trainer rank, after the batch, if one is trained on: a run may be a single evaluation."""
        assert self.sizes is not None
        if not settings.only_evaluates:
            self.batch = problems.attempt(batch_of, settings, self.sizes)
            if self.batch is None:
                return None
        batch = self.batch
        tokens = self.sizes.sample_tokens if batch is None else batch.tokens_per_micro_batch
        count = 1 if batch is None else batch.micro_batches_per_step
        trainer = problems.attempt(
            trainer_memory, settings, shape, device, tokens=tokens, micro_batches=count, overrides=overrides
        )
        if trainer is not None and not settings.unread:
            problems.attempt(check_trainer, settings, shape, device, trainer, self.sizes, overrides)
        return trainer
