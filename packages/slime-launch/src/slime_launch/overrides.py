"""The YAML file of ``--megatron-config-path``: settings of the actor or the critic that differ from the flags."""

from __future__ import annotations

from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import FlagSpec, flag_specs
from slime_launch.parser import TYPE_NAMES, nearest
from slime_megatron.service import TRAINED, MegatronConfig, role_config
from slime_rollout.checks import load_yaml

FLAG = "--megatron-config-path"
FORM = "write `megatron: [{role: critic, overrides: {lr: 1e-5}}]`"
KEYS = {"name", "role", "overrides"}

Overrides = dict[str, dict[str, Any]]
"""Settings by role and name in Python, of their flags' types."""


def read_overrides(path: str | None, megatron: MegatronConfig, *, has_critic: bool) -> Overrides:
    """The settings in the file at ``path``, checked together with the flags; none without a file.

    Raises:
        ConfigError: The file cannot be used, or a role's settings cannot work.
    """
    if path is None:
        return {}
    content = load_yaml(FLAG, path, written=True)
    rows = content.get("megatron") if isinstance(content, dict) else None
    if not isinstance(rows, list) or content.keys() != {"megatron"}:
        raise ConfigError(f"{FLAG} {path} must hold a list under `megatron`, and nothing else; {FORM}")
    found: Overrides = {}
    for row in rows:
        role, values = _read_row(path, row)
        if role in found:
            raise ConfigError(f"{FLAG} {path}: the role {role} is there twice; give it once")
        found[role] = values
    for role in found:
        try:
            role_config(megatron, role, found)
        except ConfigError as error:
            raise ConfigError(f"{FLAG} {path}: {error}") from None
    if "critic" in found and not has_critic:
        raise ConfigError(f"{FLAG} {path}: this run has no critic; add --advantage-estimator ppo, or leave it out")
    return found


def _read_row(path: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict) or "role" not in row or not row.keys() <= KEYS:
        raise ConfigError(f"{FLAG} {path}: {row} must have a role and may have a name and overrides; {FORM}")
    given = row.get("overrides") or {}
    if row["role"] not in TRAINED or not isinstance(given, dict):
        raise ConfigError(f"{FLAG} {path}: the role {row['role']} is unknown; allowed: {', '.join(TRAINED)}")
    specs = {spec.dest: spec for spec in flag_specs(MegatronConfig)}
    values = {}
    for name, value in given.items():
        if name not in specs:
            guess = nearest(str(name), specs)
            hint = f"; did you mean {guess}?" if guess else "; give a flag of the trainer, with underscores"
            raise ConfigError(f"{FLAG} {path}: unknown setting {name} of the {row['role']}{hint}")
        values[name] = _typed(path, specs[name], value)
    return str(row["role"]), values


def _typed(path: str, spec: FlagSpec, value: Any) -> Any:
    """A value as the flag's type; YAML takes ``1e-5`` for a text."""
    if value is None and spec.default is None:
        return None
    try:
        if spec.nargs:
            return tuple(spec.type(item) for item in value)
        if (spec.type is bool) != isinstance(value, bool) or isinstance(value, list | dict):
            raise ValueError
        return spec.type(str(value)) if spec.type is not bool else value
    except (TypeError, ValueError):
        kind = "a list" if spec.nargs else (TYPE_NAMES | {bool: "true or false"})[spec.type]
        raise ConfigError(f"{FLAG} {path}: {spec.dest} {value!r} must be {kind}") from None
