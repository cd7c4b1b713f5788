"""Checks that a plan could not make: what a start may still refuse."""

from __future__ import annotations

from slime_launch.kind import RunKind
from slime_launch.preflight import Found
from slime_rollout.engine import EngineConfig, has_sglang


def unchecked(kind: RunKind, engine: EngineConfig, found: Found, *, elsewhere: bool) -> list[str]:
    """Checks that a plan could not make, but for those of models, a line each."""
    lines = []
    if kind.generates and not engine.rollout_external_engine_addrs and not has_sglang(engine.sglang_python):
        flags = ", ".join(f"--sglang-{name}" for name in engine.sglang_args)
        left = f", so these flags are not checked: {flags}" if flags else ""
        start = "" if elsewhere else "; to start here, name the Python that has it with --sglang-python"
        lines.append(f"SGLang is not installed on this machine{left}{start}")
    lines += [line for line in found.measured.notices if "when its turn comes" in line]
    if found.not_here:
        verb = "are" if len(found.not_here) > 1 else "is"
        lines.append(f"the data is not checked: {', '.join(found.not_here)} {verb} not on this machine")
    if elsewhere:
        lines.append("directories that can be written, room on disks, free ports and logins are the other machine's")
    if kind.generates and engine.rollout_external_engine_addrs:
        lines.append(f"whether {', '.join(engine.rollout_external_engine_addrs)} answer, and with which model")
    if kind.generates and engine.sglang_router_url is not None:
        lines.append(f"whether {engine.sglang_router_url} answers as a router")
    return lines
