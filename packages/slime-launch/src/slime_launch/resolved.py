"""``settings.json`` in ``--output-dir``: every setting of a run, where it came from, and what it ran in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.files import write_whole
from slime_core.flags import flag_specs
from slime_launch.config import CONFIGS
from slime_launch.derived import global_batch_size
from slime_launch.kind import RunKind
from slime_launch.own_runs import MARK, mark_of
from slime_launch.preflight import Checked
from slime_launch.redact import without_secrets
from slime_rollout.engine import EngineConfig, run_python

FILE_NAME = "settings.json"
ENVIRONMENT = ("SLIME_", "RAY_", "CUDA_", "NCCL_", "GLOO_", "SGLANG_", "HF_", "OMP_", "TORCH_", "PYTHONPATH", "WANDB_")
"""Beginnings of the variables that a run may depend on."""
VERSIONS = (
    "import json, platform; from importlib.metadata import distributions; "
    "found = {one.name: one.version for one in distributions()}; "
    "print(json.dumps({'python': platform.python_version(), **dict(sorted(found.items()))}))"
)
VERSIONS_SECONDS = 60.0


def write_resolved(checked: Checked, directory: Path) -> None:
    """Write the settings of a run and the versions of all packages; secrets are removed."""
    found = resolved(checked, os.environ)
    if (mark := mark_of(found["settings"])) is not None:
        found[MARK] = mark
    found |= checked.packages or packages(checked.settings.kind, checked.settings.engine)
    write_whole(directory / FILE_NAME, json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def packages(kind: RunKind, engine: EngineConfig) -> dict[str, dict[str, str] | None]:
    """The packages that are installed for a run, and for its engines where they have an interpreter of their own."""
    found = {"packages": installed(sys.executable)}
    if kind.generates and engine.python != sys.executable:
        found["engine_packages"] = installed(engine.python)
    return found


def installed(python: str) -> dict[str, str] | None:
    """The versions of an interpreter and of what is installed in it; ``None`` where it is not on this machine."""
    try:
        result = run_python(python, VERSIONS, None, VERSIONS_SECONDS)
        return dict(json.loads(result.stdout.splitlines()[-1]))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def resolved(checked: Checked, environment: Mapping[str, str]) -> dict[str, Any]:
    """Each setting's value and origin (``default``, ``config file``, ``command line`` or ``derived``)."""
    settings = checked.settings
    defaults = {spec.dest: spec.default for config in CONFIGS.values() for spec in flag_specs(config)}
    values = settings.flags()
    for name, value in _derived(checked).items():
        is_open = values.get(name) is None or values[name] is False
        values[name] = value if is_open else values[name]
    clean = without_secrets(values, environment)
    rows = {
        name: {"value": clean[name], "origin": _origin(name, values, defaults, settings.origins)} for name in values
    }
    seen = variables(environment) if checked.environment is None else dict(checked.environment)
    return {"settings": rows, "environment": seen}


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a run may depend on, without secrets."""
    seen = {name: value for name, value in sorted(environment.items()) if name.startswith(ENVIRONMENT)}
    return without_secrets(seen, environment)


def _origin(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    if name in origins:
        return origins[name]
    default = defaults.get(name)
    default = list(default) if isinstance(default, tuple) else default
    return "default" if values[name] == default else "derived"


def _derived(checked: Checked) -> dict[str, Any]:
    """Values of flags that were left open, as the run uses them; of switches that are on by default, too."""
    settings, weights = checked.settings, checked.weights
    given = settings.megatron.global_batch_size
    return {
        "global_batch_size": given if settings.kind.only_evaluates else global_batch_size(settings),
        "rollout_num_gpus": settings.cluster.rollout_gpus or None,
        "offload_train": settings.cluster.offloads_train,
        "offload_rollout": settings.cluster.offloads_rollout,
        "rollout_skip_special_tokens": settings.rollout.sampling.skips_special_tokens,
        "ref_load": str(weights.ref_load) if weights is not None and weights.ref_load is not None else None,
    }
