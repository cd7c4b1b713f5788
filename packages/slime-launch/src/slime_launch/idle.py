"""Flags that were given and have no effect in this run, by the rows beside their definitions (`slime_core.needs`).

They are refused, or named in a line where nothing is lost: the value asks for nothing, what it asks for is so anyway,
or one more flag has made another kind of run of the command, such as ``--debug-rollout-only``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slime_core import effects, needs
from slime_core.flags import FlagSpec, flag_specs
from slime_core.needs import Need
from slime_launch.config import CONFIGS, Settings


class Lack(NamedTuple):
    """Why the run is not of a kind: ``because`` is the flag; in a ``mode`` such as evaluation flags may stay."""

    because: str = ""
    mode: bool = True


def idle_notes(settings: Settings) -> list[str]:
    """The flags without effect that may stay, a line for each reason."""
    values = settings.flags()
    return [
        effects.note(need, idle, values)
        for need, specs in _idle(settings).items()
        if (idle := [spec for spec in specs if not _is_refused(spec, need, settings)])
    ]


def idle_problems(settings: Settings) -> Iterator[str]:
    """The other flags without effect, a line for each reason."""
    values, lacks = settings.flags(), missing_kinds(settings)
    for need, specs in _idle(settings).items():
        if idle := [spec for spec in specs if _is_refused(spec, need, settings)]:
            because = lacks[need.kind.name].because if need.kind is not None else ""
            yield effects.refusal(need, idle, values, because)


def missing_kinds(settings: Settings) -> dict[str, Lack]:
    """The kinds that the run is not of, by name, and why."""
    loss, function = settings.algorithm.loss_type, settings.rollout.sampling.rollout_function_path
    on_rows = Lack(
        f"--loss-type {loss}" if settings.algorithm.on_data else f"--rollout-function-path {function}",
        mode=False,
    )
    by_mode, rows = Lack(), settings.rows is not None
    evaluates = settings.only_evaluates or settings.run.debug_rollout_only
    # Held-out rows are scored by the loss itself.
    untrained = not settings.trains or (settings.only_evaluates and not rows)
    lacks: dict[Need, Lack | None] = {
        needs.GENERATES: on_rows if rows else None if settings.generates else by_mode,
        needs.SAMPLES: on_rows if rows else None,
        needs.SCORES: by_mode if settings.is_recorded else None,
        needs.TRAINS: by_mode if untrained else None,
        needs.LAGS: None if settings.rollout.may_lag else by_mode,
        needs.TRAINERS: None if settings.trains else by_mode,
        needs.UPDATES: by_mode if evaluates else None,
        needs.ROLLOUTS: by_mode if settings.only_evaluates else None,
    }
    return {str(need.kind): lack for need, lack in lacks.items() if lack is not None}


def _specs() -> dict[str, FlagSpec]:
    return {spec.dest: spec for config in CONFIGS.values() for spec in flag_specs(config)}


def _idle(settings: Settings) -> dict[Need, list[FlagSpec]]:
    """The flags that were given and have no effect, by what is missing; kinds of runs first, in their order."""
    kinds = list(missing_kinds(settings))
    found = effects.without_effect(_specs(), settings.flags(), settings.origins, kinds)
    order = {name: place for place, name in enumerate(kinds)}
    return dict(sorted(found.items(), key=lambda item: order.get(str(item[0].kind), len(order))))


def _is_refused(spec: FlagSpec, need: Need, settings: Settings) -> bool:
    by_mode = need.kind is not None and missing_kinds(settings)[need.kind.name].mode
    return not by_mode and not spec.harmless and effects.asks(spec, settings.flags()[spec.dest])
