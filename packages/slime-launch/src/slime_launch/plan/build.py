"""Everything that is known of a command before it starts, as one record."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.flags import flag_specs
from slime_launch.cluster import cluster_notices
from slime_launch.config import CONFIGS, Settings
from slime_launch.devices import Device
from slime_launch.errors import Problems
from slime_launch.names import absent_models, is_published, with_paths
from slime_launch.placement import layout_notes, plan_layout
from slime_launch.plain_text import plain_text_notes
from slime_launch.plan.alternatives import Alternative, Change, Cost, best, changed, changes
from slime_launch.plan.cost import PhaseTime, Sizes, assumed, run_seconds
from slime_launch.plan.engines import (
    EngineMemory,
    engine_groups,
    num_parameters,
)
from slime_launch.plan.estimate import Estimate
from slime_launch.plan.experts import Uneven, uneven_experts
from slime_launch.plan.layout import Batch, Node, check_nodes, place
from slime_launch.plan.memory import Phase, TrainerMemory
from slime_launch.plan.prompt import FirstPrompt, FirstSample, first_prompt, first_row
from slime_launch.plan.unchecked import unchecked
from slime_launch.preflight import Found, importing_hooks, look
from slime_launch.resume import beginning
from slime_launch.room import room_notes
from slime_launch.validate import check_settings, hand_over_notes, micro_batch_notes, notices, row_limit
from slime_megatron.checkpoint import teacher_source
from slime_megatron.config import flag_name
from slime_megatron.fits import check_fits
from slime_megatron.start import given_functions, load_given
from slime_rollout.data_service import DataSpec
from slime_rollout.engine.transports import Transport
from slime_rollout.hooks import GivenHook, given_hooks, hook_args_of

UNREAD = "what could not be read of the command, which the problems name, is left out of this plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command would do and need; ``None`` for what a problem keeps from being known.

    Attributes:
        model: Family, parameters and layers.
        run: Rollouts, optimizer steps, samples and tokens of the whole run, and what it takes, as estimated:
            ``seconds``, ``gpu_hours`` and ``tokens_per_second``. ``tokens_at_most`` is no less than what it has; where
            prompts were not counted, ``tokens`` has the prompts that are known. ``seconds_at_most`` is the old name of
            ``seconds``.
        derived: Settings that were not given and follow from others.
        assumed: What the times are computed with, a line each.
        experts: The trainer, where experts are not used evenly.
        alternatives: Other ways to run the command.
        hooks: Custom functions, each found and checked.
        rows: Usable rows of each prompt file.
        row_tokens: Tokens of the longest of them, where all were counted.
        checkpoints: What the run begins with, by role.
        notices: What the settings do that may not be expected.
        unchecked: Those of them that say what could not be checked; of all else a start refuses nothing.
        problems: Why it cannot start; nothing if it can.
    """

    device: Device
    gpus_per_node: int
    model: dict[str, Any] | None
    run: dict[str, Any]
    derived: dict[str, Any]
    batch: Batch | None
    nodes: list[Node]
    sizes: Sizes | None
    trainer: TrainerMemory | None
    engines: list[EngineMemory]
    phases: list[Phase]
    transports: list[Transport]
    times: list[PhaseTime]
    assumed: list[str]
    experts: list[Uneven]
    alternatives: list[Alternative]
    hooks: list[str]
    rows: dict[str, int]
    row_tokens: dict[str, int]
    prompt: FirstPrompt | None
    samples: list[FirstSample]
    checkpoints: dict[str, str]
    notices: list[str]
    unchecked: list[str]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """As plain values, with totals in bytes."""
        values = dataclasses.asdict(self)
        if self.trainer is not None:
            values["trainer"]["total"] = self.trainer.total
        for engine, memory in zip(values["engines"], self.engines, strict=True):
            engine["total"] = memory.total
        for alternative, found in zip(values["alternatives"], self.alternatives, strict=True):
            alternative["cost"]["gpu_hours"] = found.cost.gpu_hours
        return values


def make_plan(
    settings: Settings,
    problems: Problems,
    device: Device,
    *,
    gpus_per_node: int,
    elsewhere: bool = False,
    words: Sequence[str] | None = None,
) -> Plan:
    """Check a command as a run would, and work out what it needs. Starts nothing.

    Args:
        words: The command line; without it no alternatives are looked for.
        elsewhere: The plan is for another machine: directories are not written to.
    """
    given = settings
    settings = with_paths(settings, problems, weights=False)
    absent = absent_models(given, settings)
    on_gpu = not device.is_cpu
    found = look(settings, problems, elsewhere=elsewhere, planned=True, absent=absent, on_gpu=on_gpu)
    settings, prompt, row = found.settings, None, None
    model = Path(settings.rollout.data.hf_checkpoint)
    if settings.rollout.data.prompt_paths and found.rows and model.is_dir() and not is_published(model):
        if settings.generates:
            prompt = problems.attempt(first_prompt, settings.rollout)
        elif settings.rows is not None and found.shape is not None:
            limit = row_limit(settings, found.shape.max_position_embeddings)
            spec = DataSpec(rollout=settings.rollout, rows=settings.rows, max_length=limit)
            row = problems.attempt(first_row, spec, found.measured)
    rows_known = settings.rows is None or row is not None or not problems.lines or bool(found.not_here)
    layout = plan_layout(settings.placed, cuda=not device.is_cpu, trains=settings.trains)
    tokens = 0 if prompt is None else max(prompt.tokens, found.measured.longest)
    work = _Work(device, gpus_per_node, tokens, None if row is None else row.longest, rows_known)
    nodes, parts = work.estimate(settings, found, problems)
    known = _prompts_are_known(settings, found)
    cost = None if problems.lines or settings.unread else work.cost(settings, parts)
    left_out = [*_not_here(absent), *unchecked(settings, found, elsewhere=elsewhere)]
    return Plan(
        device=device,
        gpus_per_node=gpus_per_node,
        model=None if found.shape is None else _model(found.shape),
        run=_run(settings, found, parts, None if device.is_cpu else work.cost(settings, parts), known=known),
        derived=_derived(given, parts.batch),
        batch=parts.batch,
        nodes=nodes,
        sizes=parts.sizes,
        trainer=parts.trainer,
        engines=parts.engines,
        phases=parts.phases,
        transports=parts.transports,
        times=parts.times,
        assumed=assumed(settings, device, parts.times),
        experts=work.experts(settings, found),
        alternatives=[] if cost is None or words is None else work.alternatives(words, settings, found, parts, cost),
        hooks=_hooks(settings, problems),
        rows=found.rows or {},
        row_tokens={path: lengths.longest for path, lengths in found.measured.files.items()},
        prompt=prompt,
        samples=[] if row is None else row.samples,
        checkpoints={role: absent.get(path, path) for role, path in _checkpoints(settings, found).items()},
        notices=[
            *([UNREAD] if given.unread else []),
            *left_out,
            *(beginning(settings, *found.run) if found.run is not None else ()),
            *notices(settings),
            *(problems.attempt(plain_text_notes, settings, nodes=len(nodes)) or ()),
            *([] if elsewhere else cluster_notices(os.environ.get("RAY_ADDRESS"))),
            *(problems.attempt(micro_batch_notes, settings, on_cpu=device.is_cpu) or ()),
            *(problems.attempt(hand_over_notes, settings, on_cpu=device.is_cpu) or ()),
            *(line for line in found.said if line not in left_out),
            *parts.notices,
            *((() if elsewhere else problems.attempt(room_notes, settings)) or ()),
            *layout_notes(layout, hands_over=settings.trainer_sleeps or settings.engines_sleep),
        ],
        unchecked=left_out,
        problems=problems.lines,
    )


@dataclasses.dataclass(frozen=True)
class _Work:
    """Works out what a command needs, and others like it, with prompts of so many tokens, or rows, if known.

    Where a problem keeps rows from being known, there are no sizes: rows as long as the context may not fit.
    """

    device: Device
    gpus_per_node: int
    prompt_tokens: int
    longest_row: int | None
    rows_known: bool

    def estimate(self, settings: Settings, found: Found, problems: Problems) -> tuple[list[Node], Estimate]:
        """Where its ranks and engines are, and their memory and times."""
        groups = engine_groups(settings, found.engines)
        nodes = place(settings, self.device, self.gpus_per_node, groups)
        problems.attempt(check_nodes, settings, nodes, self.device)
        lengths = (self.prompt_tokens, self.longest_row, self.rows_known)
        return nodes, Estimate(settings, found, self.device, problems, *lengths, nodes, groups)

    def cost(self, settings: Settings, parts: Estimate) -> Cost | None:
        """``None`` where times are not known."""
        if not parts.times:
            return None
        seconds, layout = (
            run_seconds(settings, parts.times),
            plan_layout(settings.placed, cuda=True, trains=settings.trains),
        )
        return Cost(
            gpus=len(layout.bundles),
            memory=0 if parts.trainer is None else parts.trainer.total,
            seconds=seconds,
            rollout_seconds=seconds / max(1, settings.num_rollout),
        )

    def experts(self, settings: Settings, found: Found) -> list[Uneven]:
        """The trainer with experts that are not used evenly."""
        if found.shape is None or not settings.trains or settings.only_evaluates:
            return []

        def of_shape(shape: ModelShape) -> Estimate:
            return self.estimate(settings, dataclasses.replace(found, shape=shape), Problems())[1]

        return uneven_experts(found.shape, settings.megatron.expert_model_parallel_size, of_shape)

    def alternatives(
        self, words: Sequence[str], settings: Settings, found: Found, parts: Estimate, own: Cost
    ) -> list[Alternative]:
        """The best of other ways to run it on GPUs, whose engines are all alike: each is planned as it is given."""
        if self.device.is_cpu or found.engines is not None or parts.sizes is None or found.shape is None:
            return []
        engines = sum(engine.group.count for engine in parts.engines)
        room = sum(
            engine.kv_tokens // max(1, parts.sizes.sample_tokens) * engine.group.count for engine in parts.engines
        )
        costs: list[tuple[Change, Cost]] = []
        for change in changes(settings, crowded=engines > 0 and room < parts.sizes.samples):
            other = changed(words, change)
            cost = None if other is None else self._planned(other, settings, found, found.shape)
            costs += [] if cost is None else [(change, cost)]
        return best(own, costs, words)

    def _planned(self, other: Settings, settings: Settings, found: Found, shape: ModelShape) -> Cost | None:
        """What another command with the same model and data costs; ``None`` if it cannot start."""
        data = dataclasses.replace(other.rollout.data, hf_checkpoint=settings.rollout.data.hf_checkpoint)
        run = dataclasses.replace(other.run, num_rollout=settings.run.num_rollout)
        other = dataclasses.replace(other, rollout=dataclasses.replace(other.rollout, data=data), run=run)
        problems = Problems()
        problems.attempt(check_settings, other)
        if other.trains:
            problems.attempt(check_fits, other.megatron, shape)
        _, parts = self.estimate(other, found, problems)
        return None if problems.lines else self.cost(other, parts)


def _prompts_are_known(settings: Settings, found: Found) -> bool:
    """Whether no sample can be longer than planned: prompts were counted or are limited, and slime generates itself."""
    rollout = settings.rollout
    if settings.rows is not None:
        return True  # all rows were read
    own = rollout.sampling.custom_generate_function_path is None and rollout.rollout_function is None
    limited = rollout.data.rollout_max_prompt_len is not None
    return own and (limited or found.measured.files.keys() >= set(rollout.data.prompt_paths))


def _not_here(absent: Mapping[str, str]) -> Iterator[str]:
    """What was not looked at of the models that are not here."""
    for path, name in absent.items():
        if is_published(Path(path)):
            yield (
                f"{name} is not on this machine: the plan is made from its published config; tokenizer, prompts and "
                "weights are not checked"
            )
        else:
            yield f"the weights of {name} are not downloaded yet"


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "family": shape.family,
        "parameters": num_parameters(shape),
        "layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "experts": shape.num_experts,
        "context": shape.max_position_embeddings,
    }


def _run(settings: Settings, found: Found, parts: Estimate, cost: Cost | None, *, known: bool) -> dict[str, Any]:
    rollouts, sizes = settings.num_rollout, parts.sizes
    steps = rollouts * settings.run.num_steps_per_rollout if settings.trains else 0
    values: dict[str, Any] = {"rollouts": rollouts, "optimizer_steps": steps}
    if sizes is not None and found.shape is not None:
        limit = sizes.sample_tokens if known else row_limit(settings, found.shape.max_position_embeddings)
        samples = rollouts * sizes.samples
        values |= {"samples": samples, "tokens": samples * sizes.sample_tokens, "tokens_at_most": samples * limit}
    if parts.times:
        seconds = run_seconds(settings, parts.times)
        values |= {"seconds": round(seconds, 1), "seconds_at_most": round(seconds, 1)}
        if sizes is not None and seconds:
            values["tokens_per_second"] = round(values["tokens"] / seconds, 1)
    if cost is not None:
        values |= {"gpus": cost.gpus, "gpu_hours": round(cost.gpu_hours, 1)}
    return values


def _derived(settings: Settings, batch: Batch | None) -> dict[str, Any]:
    """What was not given and follows from other settings or from the device, under the flags' names."""
    defaults = {spec.dest: spec.default for config in CONFIGS.values() for spec in flag_specs(config)}
    values: dict[str, Any] = {
        name.replace("_", "-"): value
        for name, value in settings.flags().items()
        if name in defaults and name not in settings.origins and value != defaults[name] and value is not None
        if not isinstance(value, list)
    }
    if settings.megatron.global_batch_size is None and batch is not None:
        values["global-batch-size"] = batch.global_batch_size
    if settings.cluster.rollout_num_gpus is None and settings.cluster.rollout_gpus:
        values["rollout-num-gpus"] = settings.cluster.rollout_gpus
    if settings.megatron.save is not None and settings.megatron.save_interval is None:
        values["save-interval"] = settings.num_rollout
    return values


def _hooks(settings: Settings, problems: Problems) -> list[str]:
    """The names of custom functions, of generation and of the algorithm, that load; others are among the problems."""
    found = dict[str, Callable[[], Any]]()
    with importing_hooks():
        for hook in (problems.attempt(given_hooks, settings.rollout) or []) if settings.generates else ():
            found[hook.name] = functools.partial(_load_hook, hook, settings)
        for config in (settings.algorithm, settings.megatron) if settings.trains else ():
            for name in given_functions(config):
                found[f"{flag_name(name)} {getattr(config, name)}"] = functools.partial(load_given, config, name)
        return [name for name, load in found.items() if _loads(load)]


def _load_hook(hook: GivenHook, settings: Settings) -> Any:
    return hook.load(hook_args_of(settings.rollout, settings.flags()))


def _loads(load: Callable[[], Any]) -> bool:
    try:
        load()
    except Exception:  # is among the problems
        return False
    return True


def _checkpoints(settings: Settings, found: Found) -> dict[str, str]:
    values: dict[str, str] = {}
    if found.run is not None:
        manifest, weights = found.run
        if weights is not None:
            values["policy"] = weights.load
        if weights is not None and settings.algorithm.needs_reference:
            values["reference"] = weights.ref_load
        if manifest is not None:
            values["continues"] = f"{settings.megatron.save}, after step {manifest.iteration}"
    others = {"critic": settings.megatron.critic_load, "teacher": teacher_source(settings.megatron)}
    return values | {role: str(path) for role, path in others.items() if path is not None}
