"""Everything that is known of a command before it starts, as one record."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_convert.shape import ModelShape
from slime_core.flags import flag_specs
from slime_launch.config import CONFIGS, Settings
from slime_launch.devices import Device
from slime_launch.errors import Problems
from slime_launch.names import absent_models, is_published, with_paths
from slime_launch.placement import layout_notes, plan_layout
from slime_launch.plan.cost import PhaseTime, Sizes, run_seconds
from slime_launch.plan.engines import (
    EngineMemory,
    engine_groups,
    num_parameters,
)
from slime_launch.plan.estimate import Estimate
from slime_launch.plan.layout import Batch, Node, check_nodes, place
from slime_launch.plan.memory import Phase, TrainerMemory
from slime_launch.plan.prompt import FirstPrompt, FirstSample, first_prompt, first_row
from slime_launch.preflight import Found, importing_hooks, look, unchecked_engines
from slime_launch.resume import beginning
from slime_launch.room import room_notes
from slime_launch.validate import notices, row_limit
from slime_megatron.checkpoint import teacher_source
from slime_megatron.config import flag_name
from slime_megatron.start import given_functions, load_given
from slime_rollout.data_service import DataSpec
from slime_rollout.engine.transports import Transport
from slime_rollout.hooks import GivenHook, given_hooks, hook_args_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a command would do and need; ``None`` for what a problem keeps from being known.

    Attributes:
        model: Family, parameters and layers.
        run: Rollouts, optimizer steps, samples, tokens and seconds of the whole run, at most.
        derived: Settings that were not given and follow from others.
        hooks: Custom functions, each found and checked.
        rows: Usable rows of each prompt file.
        row_tokens: Tokens of the longest of them, where all were counted.
        checkpoints: What the run begins with, by role.
        notices: What the settings do that may not be expected.
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
    hooks: list[str]
    rows: dict[str, int]
    row_tokens: dict[str, int]
    prompt: FirstPrompt | None
    samples: list[FirstSample]
    checkpoints: dict[str, str]
    notices: list[str]
    problems: list[str]

    def as_json(self) -> dict[str, Any]:
        """As plain values, with totals in bytes."""
        values = dataclasses.asdict(self)
        if self.trainer is not None:
            values["trainer"]["total"] = self.trainer.total
        for engine, memory in zip(values["engines"], self.engines, strict=True):
            engine["total"] = memory.total
        return values


def make_plan(
    settings: Settings, problems: Problems, device: Device, *, gpus_per_node: int, elsewhere: bool = False
) -> Plan:
    """Check a command as a run would, and work out what it needs. Starts nothing.

    Args:
        elsewhere: The plan is for another machine: directories are not written to.
    """
    given = settings
    settings = with_paths(settings, problems, weights=False)
    absent = absent_models(given, settings)
    found = look(settings, problems, elsewhere=elsewhere, planned=True, absent=absent)
    settings, prompt, row = found.settings, None, None
    model = Path(settings.rollout.data.hf_checkpoint)
    if settings.rollout.data.prompt_paths and found.rows and model.is_dir() and not is_published(model):
        if settings.generates:
            prompt = problems.attempt(first_prompt, settings.rollout)
        elif settings.rows is not None and found.shape is not None:
            limit = row_limit(settings, found.shape.max_position_embeddings)
            spec = DataSpec(rollout=settings.rollout, rows=settings.rows, max_length=limit)
            row = problems.attempt(first_row, spec)
    layout = plan_layout(settings.placed, cuda=not device.is_cpu, trains=settings.trains)
    groups = engine_groups(settings, found.engines)
    nodes = place(settings, device, gpus_per_node, groups)
    problems.attempt(check_nodes, settings, nodes, device)
    tokens = 0 if prompt is None else max(prompt.tokens, found.measured.longest)
    parts = Estimate(settings, found, device, problems, tokens, None if row is None else row.longest, nodes, groups)
    return Plan(
        device=device,
        gpus_per_node=gpus_per_node,
        model=None if found.shape is None else _model(found.shape),
        run=_run(settings, parts.sizes, parts.times),
        derived=_derived(given, parts.batch),
        batch=parts.batch,
        nodes=nodes,
        sizes=parts.sizes,
        trainer=parts.trainer,
        engines=parts.engines,
        phases=parts.phases,
        transports=parts.transports,
        times=parts.times,
        hooks=_hooks(settings, problems),
        rows=found.rows or {},
        row_tokens={path: lengths.longest for path, lengths in found.measured.files.items()},
        prompt=prompt,
        samples=[] if row is None else row.samples,
        checkpoints=_checkpoints(settings, found),
        notices=[
            *(f"--{name.replace('_', '-')} is not known, and left out of this plan" for name in sorted(given.unread)),
            *_not_here(absent),
            *(beginning(settings, *found.run) if found.run is not None else ()),
            *unchecked_engines(settings, elsewhere=elsewhere),
            *notices(settings),
            *found.said,
            *parts.notices,
            *((() if elsewhere else problems.attempt(room_notes, settings)) or ()),
            *layout_notes(layout, hands_over=settings.trainer_sleeps or settings.engines_sleep),
        ],
        problems=problems.lines,
    )


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


def _run(settings: Settings, sizes: Sizes | None, times: list[PhaseTime]) -> dict[str, Any]:
    rollouts = settings.num_rollout
    steps = rollouts * settings.run.num_steps_per_rollout if settings.trains else 0
    values: dict[str, Any] = {"rollouts": rollouts, "optimizer_steps": steps}
    if sizes is not None:
        values |= {"samples": rollouts * sizes.samples, "tokens_at_most": rollouts * sizes.tokens}
    if times:
        values["seconds_at_most"] = round(run_seconds(settings, times), 1)
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
