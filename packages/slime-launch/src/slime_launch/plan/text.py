"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_convert.progress import aligned
from slime_core.words import duration
from slime_launch.plan.build import Plan
from slime_launch.plan.engines import EngineEstimate
from slime_launch.plan.memory import PARTS, gib

_PROMPT_CHARACTERS = 400


def plan_text(plan: Plan) -> str:
    """All sections that are known, one below the other, without the problems."""
    sections = (
        ("device", _device(plan)),
        ("model", _model(plan)),
        ("run", _run(plan)),
        ("placement", _placement(plan)),
        ("memory of the trainer rank that needs most", _trainer(plan)),
        *(_engine(plan, memory) for memory in plan.engines),
        ("memory by phase", _phases(plan)),
        ("one update of the engines' weights", _transports(plan)),
        ("time as estimated, no bound (responses as long as they may be)", _times(plan)),
        ("experts that are not used evenly, on the rank that has most to do", _experts(plan)),
        ("alternatives, each planned with one change", _alternatives(plan)),
        ("data", _data(plan)),
        ("notes", [f"  {line}" for line in plan.notices if line not in plan.unchecked]),
        ("not checked, so that a start may refuse it", [f"  {line}" for line in plan.unchecked]),
    )
    return "\n\n".join("\n".join([title, *lines]) for title, found in sections if (lines := list(found)))


def _table(rows: Sequence[Sequence[str]], numbers: range = range(0)) -> list[str]:
    return [f"  {line}" for line in aligned(rows, numbers).splitlines()] if rows else []


def _device(plan: Plan) -> list[str]:
    what = "memory of the machine" if plan.device.is_cpu else f"each, {plan.gpus_per_node} on a node"
    return [f"  {plan.device.name}: {gib(plan.device.memory)} {what}"]


def _model(plan: Plan) -> list[str]:
    model = plan.model
    if model is None:
        return []
    experts = f", {model['experts']} experts" if model["experts"] else ""
    size = f"{model['parameters']:,} parameters, {model['layers']} layers of {model['hidden_size']}{experts}"
    return [f"  {model['family']}: {size}", *(f"  {role}: {path}" for role, path in plan.checkpoints.items())]


def _run(plan: Plan) -> Iterator[str]:
    batch, run = plan.batch, plan.run
    known = run.get("tokens") == run.get("tokens_at_most")  # the longest sample that there can be
    if batch is not None:
        yield f"  {batch.identity}"
        yield (
            f"  {batch.data_parallel_size} data-parallel ranks × {batch.samples_per_rank} samples a step, in "
            f"{batch.micro_batches_per_step} micro-batches of {'at most' if known else 'about'} "
            f"{batch.tokens_per_micro_batch:,} tokens"
        )
    if "tokens_at_most" in run:
        yield (
            f"  {run['rollouts']:,} rollouts = {run['optimizer_steps']:,} steps, {run['samples']:,} samples, at most "
            f"{run['tokens_at_most']:,} tokens"
            + ("" if known else f" (about {run['tokens']:,} with prompts and responses as planned here)")
        )
    for name, value in plan.derived.items():
        yield f"  --{name}{'' if value is True else f' {value}'} (follows from the others)"


def _placement(plan: Plan) -> Iterator[str]:
    for node in plan.nodes:
        parts = [f"trainer ranks {_ranges(node.trainer_ranks)}"] if node.trainer_ranks else []
        unit = "slot" if plan.device.is_cpu else "GPU"
        parts += [
            f"{one.title} engine {one.number} on {unit}{'s' * (len(one.gpus) > 1)} {_ranges(one.gpus)}".lstrip()
            for one in node.engines
        ]
        yield f"  node {node.node}: {'; '.join(parts)}"


def _ranges(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first} to {last}"


def _trainer(plan: Plan) -> list[str]:
    memory = plan.trainer
    if memory is None:
        return []
    rows = [(name, gib(getattr(memory, name))) for name in PARTS if getattr(memory, name)]
    rows += [("in a step", gib(memory.total)), ("between steps", gib(memory.resident))]
    rows += [("in host memory", gib(memory.host))] if memory.host else []
    return _table(rows, range(1, 2))


def _engine(plan: Plan, memory: EngineEstimate) -> tuple[str, list[str]]:
    """Title and lines; where there are several kinds of engines, the title says which."""
    name = f"{memory.group.title} engine" if len(plan.engines) > 1 else "engine"
    title = f"memory of {'an' if name[0] in 'aeiou' else 'a'} {name}" + ("" if plan.device.is_cpu else "'s GPU")
    rows = [("weights", gib(memory.weights)), ("KV cache", gib(memory.kv_cache)), ("rest", gib(memory.rest))]
    return title, [*_table(rows, range(1, 2)), f"  the cache holds {memory.kv_tokens:,} tokens"]


def _phases(plan: Plan) -> list[str]:
    rows = [
        (phase.phase, phase.where, gib(phase.needed), f"of {gib(phase.available)}", "" if fits else "too much")
        for phase in plan.phases
        for fits in [phase.needed <= phase.available]
    ]
    return _table(rows, range(2, 4))


def _transports(plan: Plan) -> list[str]:
    return _table(
        [
            (
                one.name,
                f"{one.sent:,} bytes sent",
                f"{one.received:,} received",
                f"{one.seconds:.1f} s",
                one.problem or ("chosen" if one.chosen else ""),
            )
            for one in plan.transports
        ],
        range(1, 4),
    )


def _times(plan: Plan) -> list[str]:
    run = plan.run
    rows = [(one.phase, f"{one.seconds:,.1f} s", f"{one.times:,} times", one.of) for one in plan.times]
    if "seconds" in run:
        facts = [f"{run['gpus']} GPUs: {run['gpu_hours']:,.0f} GPU-hours"] if "gpu_hours" in run else []
        if "tokens_per_second" in run:
            each = f", {run['tokens_per_second'] / run['gpus']:,.0f} a GPU" if "gpus" in run else ""
            facts.append(f"{run['tokens_per_second']:,.0f} tokens/s{each}")
        rows.append(("the run", duration(run["seconds"]), "", "; ".join([*facts, "without scoring"])))
    return [*_table(rows, range(1, 3)), *(f"  assumed: {line}" for line in plan.assumed)]


def _experts(plan: Plan) -> list[str]:
    words = {0: "evenly", len(plan.experts) - 1: "all that it can have"}
    rows = [
        (
            words.get(number, "") or f"{one.times:g} times its share",
            f"{one.times:g} ×",
            f"{one.seconds:,.1f} s of a rollout",
            f"{gib(one.memory)} in a step",
            "" if plan.device.is_cpu or one.memory <= plan.device.memory else "too much",
        )
        for number, one in enumerate(plan.experts)
    ]
    return _table(rows, range(1, 4))


def _alternatives(plan: Plan) -> list[str]:
    run, rows = plan.run, []
    for one in plan.alternatives:
        cost, now = one.cost, run["seconds"] / max(1, run["rollouts"])
        saved = now - cost.rollout_seconds
        change = f"a rollout {abs(saved):,.1f} s {'shorter' if saved >= 0 else 'longer'}"
        memory = f"{gib(cost.memory)} of {gib(plan.device.memory)} in a step" if cost.memory else ""
        whole = f"the run {duration(cost.seconds)} on {cost.gpus} GPUs: {cost.gpu_hours:,.0f} GPU-hours"
        rows.append((one.change, memory, change, whole))
    return _table(rows)


def _data(plan: Plan) -> Iterator[str]:
    for path, rows in plan.rows.items():
        longest = f", of {plan.row_tokens[path]:,} tokens at most" if path in plan.row_tokens else ""
        yield f"  {path}: {rows:,} usable rows{longest}"
    yield from (f"  {hook}: found" for hook in plan.hooks)
    if plan.prompt is not None:
        label = "" if plan.prompt.label is None else f", label {plan.prompt.label!r}"
        yield f"  first prompt, {plan.prompt.tokens} tokens{label}:"
        yield from _shown(plan.prompt.text)
    for sample in plan.samples:
        yield f"  first {sample.title}, {sample.tokens} tokens, {sample.trained} of them trained on:"
        yield from _shown(sample.text)


def _shown(text: str) -> Iterator[str]:
    short = text if len(text) <= _PROMPT_CHARACTERS else f"{text[:_PROMPT_CHARACTERS]}…"
    yield from (f"    {line}" for line in short.splitlines())
