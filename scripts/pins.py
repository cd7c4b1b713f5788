"""Prints every package that uv.lock names, with its version and the hashes of its files: constraints for uv.

uv then installs no file whose hash is another one. torch comes in several builds of one version, and the locked ones
are those of the index: where `UV_FIND_LINKS` has another, this says so, and asks where somebody can answer. Such a
build is taken as it is, and so is that of each package named in `SLIME_OTHER_BUILDS` (`torch,nvidia-nccl-cu13`).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORT = "uv export --frozen --quiet --all-packages --all-extras --no-emit-workspace --no-annotate --no-header"
# The CPU build of torch for CPython 3.11 on Linux, x86_64.
KNOWN = {"torch": ("sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",)}
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)[^\\\n]*(?:\\\n    --hash=\S+ ?)*", re.MULTILINE)


def pins(export: str, free: frozenset[str]) -> str:
    """An export of uv's, without the hashes of some packages, and with those of other builds that are known.

    Raises:
        ValueError: A package has no hash.
    """

    def checked(pin: re.Match[str]) -> str:
        if "--hash=" not in pin[0]:
            raise ValueError(f"uv.lock has no hash of {pin[1]} {pin[2]}; run scripts/lock")
        if pin[1] in free:
            return pin[0].partition(" \\\n")[0]
        return pin[0].rstrip() + "".join(f" \\\n    --hash={digest}" for digest in KNOWN.get(pin[1], ()))

    return _PIN.sub(checked, export)


def other_builds(export: str, folders: str) -> Iterator[Path]:
    """Wheels of torch in local folders, of the locked version, that are none of the locked files."""
    version = next(match[2] for match in _PIN.finditer(export) if match[1] == "torch")
    known = {*re.findall(r"--hash=(\S+)", export), *KNOWN["torch"]}
    for folder in filter(os.path.isdir, folders.split(",")):
        for wheel in sorted(Path(folder).glob(f"torch-{version}*.whl")):
            with wheel.open("rb") as file:
                if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" not in known:
                    yield wheel


def main() -> int:
    """Print them; 1 if somebody says no to another build."""
    export = subprocess.run(EXPORT.split(), cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    free = set(filter(None, os.environ.get("SLIME_OTHER_BUILDS", "").split(",")))
    for wheel in other_builds(export, os.environ.get("UV_FIND_LINKS", "")) if "torch" not in free else ():
        print(f"{wheel} is another build of torch than those in uv.lock", file=sys.stderr)
        if sys.stdin.isatty() and sys.stderr.isatty():
            print("install it? [y/N] ", end="", file=sys.stderr, flush=True)
            if sys.stdin.readline().strip().lower() not in ("y", "yes"):
                return 1
        free.add("torch")
    try:
        print(pins(export, frozenset(free)), end="")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
