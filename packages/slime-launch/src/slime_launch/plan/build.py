"""Everything that is known of a command before it starts, as one record."""

from __future__ import annotations

import contextlib
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
from slime_launch.derived import row_limit
from slime_launch.devices import DeviceSpec
from slime_launch.disk_space import disk_space_notes, written_files
from slime_launch.errors import Problems
from slime_launch.names import absent_models, is_published, models, with_paths
from slime_launch.placement import layout_notes
from slime_launch.plain_text import plain_text_notes
from slime_launch.plan.alternatives import Alternative, Change, Cost, best, changed, changes
from slime_launch.plan.cost import PhaseTime, Sizes, assumed
from slime_launch.plan.engines import EngineEstimate, num_parameters
from slime_launch.plan.estimate import Estimate, Premises
from slime_launch.plan.experts import Uneven, uneven_experts
from slime_launch.plan.layout import BatchSizes, Node
from slime_launch.plan.memory import Phase, TrainerMemory
from slime_launch.plan.prompt import FirstPrompt, FirstSample, first_prompt, first_row
from slime_launch.plan.unchecked import unchecked
from slime_launch.preflight import Found, importing_hooks, look
from slime_launch.resume import beginning
from slime_launch.validate import check_settings, hand_over_notes, micro_batch_notes, notices
from slime_megatron.service import check_fits, flag_name, given_functions, teacher_source
from slime_rollout.checks import GivenHook, given_hooks
from slime_rollout.engine import Way
from slime_rollout.service import DataSpec, hook_args_of

UNREAD = "what could not be read of the command, which the problems name, is left out of this plan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a command: what it would do and need; ``None`` for what a problem keeps from being known.

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

    device: DeviceSpec
    gpus_per_node: int
    model: dict[str, Any] | None
    run: dict[str, Any]
    derived: dict[str, Any]
    batch: BatchSizes | None
    nodes: list[Node]
    sizes: Sizes | None
    trainer: TrainerMemory | None
    engines: list[EngineEstimate]
    phases: list[Phase]
    transports: list[Way]
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
    device: DeviceSpec,
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
    absent = absent_models(models(given), models(settings))
    on_gpu = not device.is_cpu
    found = look(settings, problems, elsewhere=elsewhere, planned=True, absent=absent, on_gpu=on_gpu)
    settings, prompt, row = found.settings, None, None
    model, kind = Path(settings.rollout.data.hf_checkpoint), settings.kind
    if settings.rollout.data.prompt_paths and found.rows and model.is_dir() and not is_published(model):
        if kind.generates:
            prompt = problems.attempt(first_prompt, settings.rollout)
        elif kind.rows is not None and found.shape is not None:
            limit = row_limit(settings.rollout, found.shape.max_position_embeddings)
            spec = DataSpec(rollout=settings.rollout, rows=kind.rows, max_length=limit)
            row = problems.attempt(first_row, spec, found.measured)
    premises = Premises(
        device=device,
        gpus_per_node=gpus_per_node,
        prompt_tokens=0 if prompt is None else max(prompt.tokens, found.measured.longest),
        longest_row=None if row is None else row.longest,
        rows_known=kind.rows is None or row is not None or not problems.lines or bool(found.not_here),
    )
    parts = Estimate(found, premises, problems)
    cost = None if problems.lines or settings.unread or words is None else parts.cost()
    left_out = [*_not_here(absent), *unchecked(kind, settings.engine, found, elsewhere=elsewhere)]
    return Plan(
        device=device,
        gpus_per_node=gpus_per_node,
        model=None if found.shape is None else _model(found.shape),
        run=_run(found, parts, on_gpu=on_gpu),
        derived=_derived(given, parts.batch),
        batch=parts.batch,
        nodes=parts.nodes,
        sizes=parts.sizes,
        trainer=parts.trainer,
        engines=parts.engines,
        phases=parts.phases,
        transports=parts.transports,
        times=parts.times,
        assumed=assumed(settings.megatron, device, parts.times, exports=settings.run.save_hf is not None),
        experts=uneven_experts(found, premises),
        alternatives=[] if cost is None else _alternatives(words or (), found, premises, parts, cost),
        hooks=_hooks(settings, problems),
        rows=found.rows or {},
        row_tokens={path: lengths.longest for path, lengths in found.measured.files.items()},
        prompt=prompt,
        samples=[] if row is None else row.samples,
        checkpoints={role: absent.get(path, path) for role, path in _checkpoints(found).items()},
        notices=[
            *([UNREAD] if given.unread else []),
            *left_out,
            *(beginning(settings.megatron, *found.run) if found.run is not None else ()),
            *notices(settings),
            *(problems.attempt(plain_text_notes, settings, nodes=len(parts.nodes)) or ()),
            *([] if elsewhere else cluster_notices(os.environ.get("RAY_ADDRESS"))),
            *(problems.attempt(micro_batch_notes, settings, on_cpu=device.is_cpu) or ()),
            *(problems.attempt(hand_over_notes, kind, settings.cluster, on_cpu=device.is_cpu) or ()),
            *(line for line in found.said if line not in left_out),
            *parts.notices,
            *((() if elsewhere else problems.attempt(disk_space_notes, written_files(settings))) or ()),
            *layout_notes(parts.layout, hands_over=kind.hands_over),
        ],
        unchecked=left_out,
        problems=problems.lines,
    )


def _alternatives(
    words: Sequence[str], found: Found, premises: Premises, parts: Estimate, own: Cost
) -> list[Alternative]:
    """The best of other ways to run it on GPUs, whose engines are all alike: each is planned as it is given."""
    if premises.device.is_cpu or found.engines is not None or parts.sizes is None or found.shape is None:
        return []
    engines = sum(engine.group.count for engine in parts.engines)
    fitting = sum(
        engine.kv_tokens // max(1, parts.sizes.sample_tokens) * engine.group.count for engine in parts.engines
    )
    costs: list[tuple[Change, Cost]] = []
    for change in changes(found.settings, crowded=engines > 0 and fitting < parts.sizes.samples):
        other = changed(words, change)
        if other is not None and (cost := _planned(other, found, found.shape, premises)) is not None:
            costs.append((change, cost))
    return best(own, costs, words)


def _planned(other: Settings, found: Found, shape: ModelShape, premises: Premises) -> Cost | None:
    """The cost of another command with the model and data that were found; ``None`` if it cannot start."""
    own = found.settings
    data = dataclasses.replace(other.rollout.data, hf_checkpoint=own.rollout.data.hf_checkpoint)
    run = dataclasses.replace(other.run, num_rollout=own.run.num_rollout)
    other = dataclasses.replace(other, rollout=dataclasses.replace(other.rollout, data=data), run=run)
    problems = Problems()
    problems.attempt(check_settings, other)
    if other.kind.trains:
        problems.attempt(check_fits, other.megatron, shape)
    parts = Estimate(dataclasses.replace(found, settings=other), premises, problems)
    return None if problems.lines else parts.cost()


def _prompts_are_known(found: Found) -> bool:
    """Whether no sample can be longer than planned: prompts were counted or are limited, and slime generates itself."""
    rollout = found.settings.rollout
    if found.settings.kind.rows is not None:
        return True  # all rows were read
    own = rollout.sampling.custom_generate_function_path is None and rollout.rollout_function is None
    limited = rollout.data.rollout_max_prompt_len is not None
    return own and (limited or found.measured.files.keys() >= set(rollout.data.prompt_paths))


def _not_here(absent: Mapping[str, str]) -> Iterator[str]:
    """A line for each model that is not here, and so was not looked at as a whole."""
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


def _run(found: Found, parts: Estimate, *, on_gpu: bool) -> dict[str, Any]:
    settings, sizes = found.settings, parts.sizes
    rollouts = settings.num_rollout
    steps = rollouts * settings.run.num_steps_per_rollout if settings.kind.trains else 0
    values: dict[str, Any] = {"rollouts": rollouts, "optimizer_steps": steps}
    if sizes is not None and found.shape is not None:
        known = _prompts_are_known(found)
        limit = sizes.sample_tokens if known else row_limit(settings.rollout, found.shape.max_position_embeddings)
        samples = rollouts * sizes.samples
        values |= {"samples": samples, "tokens": samples * sizes.sample_tokens, "tokens_at_most": samples * limit}
    if (cost := parts.cost()) is not None:
        values |= {"seconds": round(cost.seconds, 1), "seconds_at_most": round(cost.seconds, 1)}
        if sizes is not None and cost.seconds:
            values["tokens_per_second"] = round(values["tokens"] / cost.seconds, 1)
        if on_gpu:
            values |= {"gpus": cost.gpus, "gpu_hours": round(cost.gpu_hours, 1)}
    return values


def _derived(settings: Settings, batch: BatchSizes | None) -> dict[str, Any]:
    """Values that were not given and follow from other settings or from the device, under the flags' names."""
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

    def load_hook(hook: GivenHook) -> Any:
        return hook.load(hook_args_of(settings.rollout, settings.flags()))

    found = dict[str, Callable[[], Any]]()
    with importing_hooks():
        for hook in (problems.attempt(given_hooks, settings.rollout) or []) if settings.kind.generates else ():
            found[hook.name] = functools.partial(load_hook, hook)
        for config in (settings.algorithm, settings.megatron) if settings.kind.trains else ():
            for name, load in given_functions(config).items():
                found[f"{flag_name(name)} {getattr(config, name)}"] = load
        loaded = []
        for name, load in found.items():
            with contextlib.suppress(Exception):  # is among the problems
                load()
                loaded.append(name)
    return loaded


def _checkpoints(found: Found) -> dict[str, str]:
    megatron, values = found.settings.megatron, dict[str, str]()
    if found.run is not None:
        manifest, weights = found.run
        if weights is not None:
            values["policy"] = weights.load
        if weights is not None and found.settings.kind.has_reference:
            values["reference"] = weights.ref_load
        if manifest is not None:
            values["continues"] = f"{megatron.save}, after step {manifest.iteration}"
    others = {"critic": megatron.critic_load, "teacher": teacher_source(megatron)}
    return values | {role: str(path) for role, path in others.items() if path is not None}
