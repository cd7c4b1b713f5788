"""What another Python interpreter has installed, without importing it."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 60.0


def find_package(python: str, package: str) -> Path | None:
    """Where the package is that an interpreter would import.

    Args:
        python: An interpreter.
        package: Name of a package.

    Returns:
        Its directory; ``None`` if the interpreter has none, or is no interpreter that runs here. The log says which.
    """
    # -S would be faster still, but then virtual environments and editable installs are not found.
    code = f"import importlib.util as u; s = u.find_spec({package!r}); print(s and s.origin or '')"
    try:
        result = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s does not run as a Python interpreter: %s", python, error)
        return None
    if result.returncode != 0:
        logger.warning("%s ended with exit code %d: %s", python, result.returncode, result.stderr.strip()[-500:])
        return None
    origin = result.stdout.strip()
    return Path(origin).parent if origin else None
