"""Flags that were given and have no effect in this run, by the rows beside their definitions (`slime_core.needs`).

They are refused, or named in a line where nothing is lost: the value asks for nothing, what it asks for is so anyway,
or one more flag has made another kind of run of the command, such as ``--debug-rollout-only``.
"""

from __future__ import annotations

from typing import NamedTuple

from slime_core import effects, needs
from slime_core.config import AlgorithmConfig
from slime_core.flags import flag_specs
from slime_core.needs import Need
from slime_launch.config import CONFIGS, Settings
from slime_launch.kind import RunKind
from slime_rollout.config import RolloutConfig


class IdleFlags(NamedTuple):
    """Lines about flags without effect, one for each reason: those that may stay, and those that are refused."""

    notes: list[str]
    problems: list[str]


def idle_flags(settings: Settings) -> IdleFlags:
    """The flags that were given and have no effect; first those of kinds that the run is not of."""
    values, lacks = settings.flags(), missing_kinds(settings.kind, settings.algorithm, settings.rollout)
    specs = {spec.dest: spec for config in CONFIGS.values() for spec in flag_specs(config)}
    found = effects.without_effect(specs, values, settings.origins, lacks)
    order = {name: place for place, name in enumerate(lacks)}
    lines = IdleFlags([], [])
    for need, idle in sorted(found.items(), key=lambda item: order.get(str(item[0].kind), len(order))):
        because = lacks.get(str(need.kind))
        asking = [spec for spec in idle if not spec.harmless and effects.asks(spec, values[spec.dest])]
        refused = [] if because == "" else asking
        if kept := [spec for spec in idle if spec not in refused]:
            lines.notes.append(effects.note(need, kept, values))
        if refused:
            lines.problems.append(effects.refusal(need, refused, values, because or ""))
    return lines


def missing_kinds(kind: RunKind, algorithm: AlgorithmConfig, rollout: RolloutConfig) -> dict[str, str]:
    """The kinds that the run is not of, by name, with the flag that says so.

    The flag is empty for a mode such as evaluation, where flags may stay.
    """
    function, rows = rollout.sampling.rollout_function_path, kind.rows is not None
    on_rows = f"--loss-type {algorithm.loss_type}" if algorithm.on_data else f"--rollout-function-path {function}"
    # Held-out rows are evaluated by the loss itself.
    untrained = not kind.trains or (kind.only_evaluates and not rows)
    lacks: dict[Need, str | None] = {
        needs.GENERATES: on_rows if rows else None if kind.generates else "",
        needs.SAMPLES: on_rows if rows else None,
        needs.SCORES: "" if kind.is_recorded else None,
        needs.TRAINS: "" if untrained else None,
        needs.LAGS: None if rollout.may_lag else "",
        needs.TRAINERS: None if kind.trains else "",
        needs.UPDATES: None if kind.updates else "",
        needs.ROLLOUTS: "" if kind.only_evaluates else None,
    }
    return {str(need.kind): lack for need, lack in lacks.items() if lack is not None}
