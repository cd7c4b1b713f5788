"""Advice where a package of an extra is missing. slime-core has the same, which this package does without."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path


def install_hint(distribution: str, extra: str) -> str:
    """The command that installs what an extra, such as ``gguf``, adds to a package of ours, which is on no index."""
    try:
        texts = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:  # its files are there, as in a checkout on PYTHONPATH
        return f"install the packages of the extra {extra} in {distribution}'s pyproject.toml"
    parted = [text.partition(";") for text in texts]
    of_extra = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return install_command(*(name.strip() for name, _, marker in parted if of_extra.search(marker)))


def install_command(*requirements: str) -> str:
    """The command that installs packages in the running interpreter, which need not have pip."""
    # Asking the import system for pip would switch setuptools' own distutils off in this process.
    has_pip = any(Path(sys.executable).with_name(name).exists() for name in ("pip", "pip3"))
    pip, uv = [sys.executable, "-m", "pip", "install"], ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*(pip if has_pip else uv), *requirements])
