"""Make `uv.lock` without hosts. Started by `scripts/lock`, which brings uv.

uv writes into a lock file where each package was found. Here every package has the same placeholder for that and no
list of files, so the file says versions alone. uv reads such a file: `uv export --frozen` makes the constraints of it
that the environments are built with, and `uv lock` keeps its versions. What is found apart from the index
(`--find-links`, such as a CPU build of torch) takes no part: its versions are of one machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "https://index.invalid/simple"
_REGISTRY = re.compile(r'registry = "[^"]*"')
_SDIST = re.compile(r"^sdist = .*\n", re.MULTILINE)
_WHEELS = re.compile(r"^wheels = \[\n(?:    .*\n)*\]\n", re.MULTILINE)


def without_hosts(lock: str) -> str:
    """The text of a lock file with the placeholder as every package's registry, and no files."""
    return _REGISTRY.sub(f'registry = "{PLACEHOLDER}"', _WHEELS.sub("", _SDIST.sub("", lock)))


def main(argv: Sequence[str]) -> int:
    """Resolve in a copy of the workspace's settings, and write the result next to them; returns uv's exit code.

    Args:
        argv: Options for `uv lock`, such as `--upgrade`.
    """
    settings = [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    with tempfile.TemporaryDirectory() as copy:
        for path in [*settings, *ROOT.glob("uv.lock")]:
            target = Path(copy, path.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        code = subprocess.run(["uv", "lock", *argv], cwd=copy, env=environment, check=False).returncode
        if code == 0:
            lock = Path(copy, "uv.lock").read_text(encoding="utf-8")
            (ROOT / "uv.lock").write_text(without_hosts(lock), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
