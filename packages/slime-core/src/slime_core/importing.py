"""Importing large packages quickly, and what to do where one is missing."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Import without collecting garbage: imports leave hardly any, and looking for it takes a fifth of their time.

    No later collection looks at what exists at the end of the block, so do not make anything large in it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Import as if these packages were not installed, for what is imported can do without them.

    One that was imported before stays. After the block they can be imported as ever.
    """
    absent: dict[str, None] = {name: None for name in names if name not in sys.modules}
    sys.modules.update(absent)  # type: ignore[arg-type]  # an import of what is `None` there is an ImportError
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


SAFE_PATH, BY_US = "PYTHONSAFEPATH", "set by slime"


@contextlib.contextmanager
def keep_to_installed() -> Iterator[None]:
    """Within the block, Python processes that are started import no module because it lies in the working folder.

    Python looks there first in what ``-c`` or ``-m`` starts, as its libraries do; any folder may hold a ``json.py``.
    """
    is_given = SAFE_PATH in os.environ
    os.environ.setdefault(SAFE_PATH, BY_US)
    try:
        yield
    finally:
        if not is_given:
            os.environ.pop(SAFE_PATH, None)


def leave_to_user() -> None:
    """Have processes that a user's functions start from here on find modules as ever, unless the user said otherwise.

    What Python's own libraries start is as this process, which may have been started in :func:`keep_to_installed`.
    """
    if os.environ.get(SAFE_PATH) == BY_US:
        del os.environ[SAFE_PATH]


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


def install_command(*requirements: str, python: str = sys.executable) -> str:
    """The command that installs packages in an interpreter, by default the running one, which need not have pip."""
    # Asking the import system for pip would switch setuptools' own distutils off in this process.
    has_pip = any(Path(python).with_name(name).exists() for name in ("pip", "pip3"))
    pip, uv = [python, "-m", "pip", "install"], ["uv", "pip", "install", "--python", python]
    return shlex.join([*(pip if has_pip else uv), *requirements])
