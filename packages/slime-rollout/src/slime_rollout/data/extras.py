"""Libraries that only some prompt files need: imported when one is read, and asked for by the name of their extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from slime_core.errors import DataError


def needed(module: str, *, extra: str, file: Path) -> Any:
    """Import what reading a file needs.

    Args:
        module: The module's name.
        extra: The extra of slime-rollout that brings it.
        file: The file, for the message.

    Raises:
        DataError: It is not installed; names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{file} needs {module}, which is not installed; install 'slime-rollout[{extra}]'") from None
