"""What to do where a package of an extra is missing. slime-core has the same, which this package does without."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib import metadata


def install_hint(distribution: str, extra: str) -> str:
    """The command that installs what an extra of one of our packages adds, whose own name is on no index.

    Args:
        distribution: Our package, as it is installed.
        extra: The extra, such as ``gguf``.
    """
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # its files are there, as in a checkout on PYTHONPATH
        return f"install the packages of the extra {extra} in {distribution}'s pyproject.toml"
    parted = [text.partition(";") for text in texts]
    of_extra = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return install_command(*(name.strip() for name, _, marker in parted if of_extra.search(marker)))


def install_command(*requirements: str) -> str:
    """The command that installs packages in the running interpreter, which need not have pip."""
    pip = [sys.executable, "-m", "pip", "install"]
    uv = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*(pip if importlib.util.find_spec("pip") else uv), *requirements])
