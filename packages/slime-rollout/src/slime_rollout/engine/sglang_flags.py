"""The SGLang that is installed in some interpreter: what importing it needs, and the flags of its own argument parser.

The parser is built in that interpreter, which imports SGLang and takes seconds. The result is cached on disk, until
SGLang's files change or another package is installed.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec

from slime_core.errors import ConfigError
from slime_core.files import write_whole
from slime_rollout.engine.config import SglangValue
from slime_rollout.engine.python import end_of, importable_in, run_python

logger = logging.getLogger(__name__)

# Only engine processes on a CPU import what is there.
CPU_SHIMS = Path(__file__).parent / "cpu_shims"
_IMPORT_SECONDS = 300.0
# Run in the interpreter of the engines, as `sglang.launch_server` builds its parser; plugins may add choices.
_REPORT = """
import argparse, json
from pathlib import Path
import sglang
from sglang.srt.server_args import ServerArgs
try:
    from sglang.srt.plugins import load_plugins
except ImportError:
    pass
else:
    load_plugins()
parser = argparse.ArgumentParser(add_help=False)
ServerArgs.add_cli_args(parser)
flags = [
    {
        "name": name[2:],
        "takes_value": action.nargs != 0,
        "several": action.nargs in ("+", "*"),
        "type": {int: "int", float: "float"}.get(action.type, "str"),
        "choices": [str(choice) for choice in action.choices or () if choice is not None],
        "help": " ".join((action.help or "").split()),
        "default": None if action.default in (None, argparse.SUPPRESS) else str(action.default),
    }
    for action in parser._actions
    for name in action.option_strings
    if name.startswith("--")
]
package, version = str(Path(sglang.__file__).parent), getattr(sglang, "__version__", "unknown")
print("\\n" + json.dumps({"package": package, "version": version, "flags": flags}))
"""

# Flags that follow from a group's worker_type.
ROLE_FLAGS = ("disaggregation-mode", "disaggregation-bootstrap-port", "encoder-only", "language-only", "encoder-urls")
# What to use instead of flags that slime sets itself.
_INSTEAD = {
    "use --hf-checkpoint": ("model-path", "model"),
    "give the flags themselves": ("config",),
    "slime's engines listen on the loopback address, or on their node's in a run on several": ("host",),
    "slime chooses free ports for engines; --sglang-router-port sets the router's": ("port",),
    "use --rollout-num-gpus-per-engine": ("tp-size", "tensor-parallel-size"),
    "slime places engines on nodes; see --rollout-num-gpus-per-engine": ("nnodes", "node-rank", "dist-init-addr"),
    "slime chooses free ports for engines": ("nccl-port",),
    "slime places engines on GPUs": ("base-gpu-id", "gpu-id-step"),
    "use --seed": ("random-seed",),
    "slime numbers the weights": ("weight-version",),
    "slime always sets it": ("skip-server-warmup",),
    "slime talks plain HTTP to engines, which listen on this machine's loopback address": (
        "ssl-keyfile",
        "ssl-certfile",
    ),
    "slime talks HTTP to engines": ("grpc-mode", "smg-grpc-mode"),
    "slime sends engines one key; use --sglang-api-key": ("admin-api-key",),
    "use worker_type in --sglang-config": ROLE_FLAGS,
}
CONTROLLED: Mapping[str, str] = {name: advice for advice, names in _INSTEAD.items() for name in names}
"""Flags that slime sets itself → what to use instead."""


class SglangFlag(msgspec.Struct, frozen=True, kw_only=True):
    """One flag of SGLang."""

    name: str  # without the leading dashes, such as `mem-fraction-static`
    takes_value: bool  # whether a value follows it
    several: bool = False  # whether several values may follow it
    type: str = "str"  # `int` or `float` where each value must be one
    choices: tuple[str, ...] = ()  # all allowed values; any if there are none
    help: str = ""  # SGLang's own description
    default: str | None = None  # SGLang's default as text


class _Report(msgspec.Struct, kw_only=True):
    """The content of the cache. The stamp is the times of change of the files that the flags depend on."""

    package: str
    version: str
    flags: list[SglangFlag]
    stamp: list[int] = []

    def current_stamp(self) -> list[int]:
        package = Path(self.package)
        sources = sorted((package / "srt" / "arg_groups").rglob("*.py"))
        # Installing any package, which may bring a plugin of SGLang's, changes the directory above.
        files = [package.parent, package / "__init__.py", package / "srt" / "server_args.py", *sources]
        return [file.stat().st_mtime_ns for file in files]

    def is_current(self) -> bool:
        with contextlib.suppress(OSError):
            return self.stamp == self.current_stamp()
        return False


_REPORTS: dict[Path, _Report] = {}
"""Reports that this process has read, for where the cache's file cannot be written. By that file."""


def engine_device(devices: Path = Path("/dev")) -> str:
    """``"cuda"`` if a driver shows a GPU to this machine that the installed torch is for, else ``"cpu"``.

    AMD's driver also shows graphics that are part of a CPU, so there only a torch for ROCm says that GPUs are meant.
    (Not run on ROCm, where torch calls them ``cuda``, too.) Torch is not imported.
    """
    if any(devices.glob("nvidia[0-9]*")):
        return "cuda"
    return "cuda" if (devices / "kfd").exists() and "rocm" in version("torch") else "cpu"


def import_environment(device: str | None = None) -> dict[str, str]:
    """This process's environment, and what importing SGLang needs on ``device``; what this machine has if ``None``."""
    environment = dict(os.environ)
    # Compiled modules are half of the start-up; without them on disk every process compiles all of SGLang.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if (device or engine_device()) == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "slime_cpu_shims",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_SHIMS), environment.get("PYTHONPATH")))),
            # Threads that wait by spinning make a step twenty times slower as soon as anything else needs their core.
            "OMP_WAIT_POLICY": "PASSIVE",
            # Inductor would need a C++ compiler, and minutes.
            "TORCHDYNAMO_DISABLE": "1",
        }
    return environment


def installed_flags(python: str) -> dict[str, SglangFlag]:
    """All flags of the SGLang that ``python`` imports, by name; raises `ConfigError` if it cannot import SGLang."""
    environment = import_environment()
    cache, stored = _cache_file(python, environment), None
    with contextlib.suppress(OSError, msgspec.DecodeError):
        stored = msgspec.json.decode(cache.read_bytes(), type=_Report)
    report = next((known for known in (stored, _REPORTS.get(cache)) if known is not None and known.is_current()), None)
    if report is None:
        logger.warning("reading the flags of the SGLang in %s; it is done once and takes some seconds", python)
        report = _REPORTS[cache] = _read_flags(python, environment)
    if report is not stored:
        with contextlib.suppress(OSError, RuntimeError):  # then the next process reads them again
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cache, msgspec.json.encode(report).decode())
    return {flag.name: flag for flag in report.flags}


def check_sglang_args(args: Mapping[str, SglangValue], flags: Mapping[str, SglangFlag]) -> None:
    """Check ``--sglang-*`` flags, without that prefix; a `ConfigError` if one is unknown, invalid or set by slime."""
    for name, value in args.items():
        if name in CONTROLLED:
            raise ConfigError(f"--sglang-{name} cannot be given: {CONTROLLED[name]}")
        if name not in flags:
            near = difflib.get_close_matches(name, sorted(set(flags) - set(CONTROLLED)), n=1)
            hint = f"did you mean --sglang-{near[0]}?" if near else "see the flags of sglang.launch_server"
            raise ConfigError(f"--sglang-{name} is not a flag of the installed SGLang; {hint}")
        flag = flags[name]
        if flag.takes_value and value is True:
            raise ConfigError(f"--sglang-{name} needs a value")
        if not flag.takes_value and value is not True:
            raise ConfigError(f"--sglang-{name} takes no value, got {value!r}")
        if isinstance(value, tuple) and not flag.several:
            raise ConfigError(f"--sglang-{name} takes one value, got {' '.join(value)!r}")
        if flag.takes_value:
            _check_values(flag, value if isinstance(value, tuple) else (str(value),))


def _check_values(flag: SglangFlag, values: tuple[str, ...]) -> None:
    convert, kind = {"int": (int, "a whole number"), "float": (float, "a number")}.get(flag.type, (str, ""))
    for value in values:
        try:
            convert(value)
        except ValueError:
            raise ConfigError(f"--sglang-{flag.name} {value} is not {kind}") from None
        if flag.choices and value not in flag.choices:
            raise ConfigError(f"--sglang-{flag.name} {value} is unknown; allowed: {', '.join(flag.choices)}")


def missing_sglang(python: str) -> str:
    """The message where an interpreter has no SGLang."""
    return f"SGLang is not installed in {python}; install it there, or name the Python that has it with --sglang-python"


def _read_flags(python: str, environment: Mapping[str, str]) -> _Report:
    try:
        result = run_python(python, _REPORT, environment, _IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"the flags of the SGLang in {python} cannot be read: {error}") from error
    if result.returncode == 0:
        with contextlib.suppress(IndexError, msgspec.DecodeError):
            report = msgspec.json.decode(result.stdout.splitlines()[-1], type=_Report)
            with contextlib.suppress(OSError):  # then the report counts as outdated the next time
                report.stamp = report.current_stamp()
            return report
    if not importable_in(python, "sglang"):
        raise ConfigError(missing_sglang(python))
    problem = end_of(result.stderr).splitlines()[-1:] or ["no output"]
    raise ConfigError(
        f"the SGLang in {python} does not report its flags (slime was tested with SGLang 0.5.23): {problem[0]}"
    )


def _cache_file(python: str, environment: Mapping[str, str]) -> Path:
    """One file for each interpreter and search path, in the user's cache directory."""
    key = json.dumps([str(Path(python).absolute()), environment.get("PYTHONPATH", ""), _REPORT])
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # no home directory
        directory = directory.expanduser()
    return directory / "slime" / f"sglang-flags-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
