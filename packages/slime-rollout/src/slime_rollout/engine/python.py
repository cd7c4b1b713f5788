"""Which Python SGLang runs in: the launcher's own, or another one that has it."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from slime_core.errors import ConfigError

logger = logging.getLogger(__name__)

ENGINE_ENVIRONMENT = ".venv-engine"
"""The virtual environment of the engines, next to the launcher's, as the quick start makes it."""
_LOOK_SECONDS = 60.0
_SHOWN_CHARACTERS = 500


def find_python(given: str | None) -> str:
    """The interpreter for SGLang: the given one (`ConfigError` if it is not there), the first that has it, or ours."""
    if given is None:
        return _first_with_sglang(sys.executable, os.environ.get("PYTHONPATH"), Path(sys.prefix))
    found = shutil.which(given)
    if found is None:
        problem = "is not an executable file" if os.sep in given else "is not a command in PATH"
        raise ConfigError(f"--sglang-python {given} {problem}; give the Python interpreter that SGLang is installed in")
    return found


@functools.cache  # so that what is not trusted is named once
def _first_with_sglang(running: str, _path: str | None, prefix: Path) -> str:
    candidates = [running, _beside(prefix), *map(shutil.which, ("python3", "python"))]
    different = dict.fromkeys(candidate for candidate in candidates if candidate is not None)
    return next((python for python in different if importable_in(python, "sglang")), running)


def _beside(prefix: Path) -> str | None:
    """The interpreter of the engines' environment next to the one in ``prefix``; ``None`` without one to be trusted."""
    environment = prefix.parent / ENGINE_ENVIRONMENT
    python = environment / "bin" / "python"
    if not python.is_file():
        return None
    if problem := _not_ours(environment, prefix):
        logger.warning("%s: it is not used; give --sglang-python %s if you trust it", problem, python)
        return None
    return str(python)


def _not_ours(environment: Path, prefix: Path) -> str | None:
    """Why another user decides what an environment runs; ``None`` if only those can who decide what runs already."""
    trusted = {0, os.geteuid(), prefix.stat().st_uid, Path(sys.base_prefix).stat().st_uid}
    parts = [environment, environment / "bin", environment / "bin" / "python"]
    for part in dict.fromkeys([*parts, *(part.resolve() for part in parts)]):
        found = part.lstat()
        if found.st_uid not in trusted:
            return f"{part} is owned by another user (uid {found.st_uid})"
        if found.st_mode & stat.S_IWOTH and not part.is_symlink():
            return f"{part} can be written by every user"
    return None


def has_sglang(given: str | None) -> bool:
    """Whether the interpreter of `find_python` is there and has SGLang."""
    try:
        return importable_in(find_python(given), "sglang")
    except ConfigError:
        return False


def importable_in(python: str, package: str) -> bool:
    """Whether an interpreter can find a package; it is not imported. The log says why if the interpreter fails.

    An interpreter that answers is asked once: a plan asks ten times, and each takes a process.
    """
    try:
        return _is_importable(python, package, os.environ.get("PYTHONPATH"))
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not run as a Python interpreter: %s", python, error)
        return False


@functools.cache  # nothing is kept of a call that raises: a machine may have been busy
def _is_importable(python: str, package: str, _path: str | None) -> bool:
    # -S would be faster still, but then virtual environments and editable installs are not found.
    code = f"import importlib.util, sys; sys.exit(0 if importlib.util.find_spec({package!r}) else 9)"
    result = run_python(python, code, None, _LOOK_SECONDS)
    if result.returncode not in (0, 9):
        logger.warning("%s ended with exit code %d: %s", python, result.returncode, end_of(result.stderr))
    return result.returncode == 0


def run_python(
    python: str, code: str, environment: Mapping[str, str] | None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """The output of some code in an interpreter, within a limit in seconds; no module of the working folder runs."""
    return subprocess.run(
        [python, "-c", code],
        env={**(os.environ if environment is None else environment), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )


def end_of(text: str) -> str:
    """The end of what a process has printed."""
    return text.strip()[-_SHOWN_CHARACTERS:]
