"""Make `uv.lock` without hosts, and the requirements of tools. Started by `scripts/lock`, which brings uv.

uv writes into a lock file where each package was found. Here every package has the same placeholder for that, and its
files are their names and hashes, of wheels for Linux on x86_64 and aarch64. uv reads such a file: `uv export --frozen`
makes the constraints of it that the environments are built with, and `uv lock` keeps its versions. What is found apart
from the index (`--find-links`, such as a CPU build of torch) takes no part: its versions are of one machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "https://index.invalid/simple"
# CPython 3.11's, those of any version among them.
_TAGS = re.compile(
    r"-(cp311-cp311|cp3([2-9]|10|11)-abi3|cp311-none|py3\d*-none|py2\.py3-none)"
    r"-(any|(many)?linux[\w.]*_(x86_64|aarch64))\.whl"
)
_REGISTRY = re.compile(r'registry = "[^"]*"')
_SDIST = re.compile(r"^sdist = .*\n", re.MULTILINE)
_WHEELS = re.compile(r"^wheels = \[\n(?:    .*\n)*\]\n", re.MULTILINE)
_FILE = re.compile(r'"(?:[^"]*/)?([^"/]+\.whl)", hash = "([^"]+)"')
_PACKAGE = re.compile(r'\[\[package\]\]\nname = "(.*)"\nversion = "(.*)"\nsource = \{ registry(?:.+\n)+')


def without_hosts(lock: str) -> str:
    """The text of a lock file with the placeholder as every package's registry, and wheels by their names."""

    def named(wheels: re.Match[str]) -> str:
        files = [(name, digest) for name, digest in _FILE.findall(wheels[0]) if _TAGS.search(name)]
        rows = "".join(f'    {{ filename = "{name}", hash = "{digest}" }},\n' for name, digest in files)
        return f"wheels = [\n{rows}]\n" if rows else ""

    return _REGISTRY.sub(f'registry = "{PLACEHOLDER}"', _WHEELS.sub(named, _SDIST.sub("", lock)))


def with_wheels(lock: str, full: str) -> str:
    """A lock file with the wheels that another one names for the same versions.

    Raises:
        ValueError: It names none for some.
    """
    found = {match.group(1, 2): wheels[0] for match in _PACKAGE.finditer(full) if (wheels := _WHEELS.search(match[0]))}

    def filled(match: re.Match[str]) -> str:
        if match.group(1, 2) not in found:
            raise ValueError(f"{match[1]} {match[2]} has no wheel for Python 3.11 on Linux")
        return _WHEELS.sub("", match[0]) + found[match.group(1, 2)]

    return _PACKAGE.sub(filled, lock)


def main(argv: Sequence[str]) -> int:
    """Resolve in a copy of the workspace's settings, and write the result next to them; returns uv's exit code.

    Args:
        argv: Options for `uv lock`, such as `--upgrade`.
    """
    settings = [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml")]
    environment = {name: value for name, value in os.environ.items() if name not in ("UV_FIND_LINKS", "UV_CONSTRAINT")}
    with tempfile.TemporaryDirectory() as copy:
        for path in [*settings, *ROOT.glob("uv.lock")]:
            target = Path(copy, path.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        code = subprocess.run(["uv", "lock", *argv], cwd=copy, env=environment, check=False).returncode
        if code != 0:
            return code
        lock = without_hosts(Path(copy, "uv.lock").read_text(encoding="utf-8"))
        (ROOT / "uv.lock").write_text(with_wheels(lock, _resolved_again(Path(copy), lock, environment)), "utf-8")
        pins = Path(copy, "pins.txt")
        pins.write_text("".join(f"{match[1]}=={match[2]}\n" for match in _PACKAGE.finditer(lock)), "utf-8")
        for wanted in sorted(ROOT.glob("scripts/requirements-*.in")):
            words = "uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header"
            files = ["--constraint", str(pins), "--output-file", str(wanted.with_suffix(".txt")), str(wanted)]
            subprocess.run([*words.split(), *argv, *files], cwd=ROOT, env=environment, check=True)
    return 0


def _resolved_again(copy: Path, lock: str, environment: Mapping[str, str]) -> str:
    """The same versions with all their files: uv adds none to a lock file that has the versions already."""
    project, begin = copy / "pyproject.toml", "constraint-dependencies = [\n"
    pins = "".join(f'    "{match[1]}=={match[2]}",\n' for match in _PACKAGE.finditer(lock))
    project.write_text(project.read_text(encoding="utf-8").replace(begin, begin + pins), "utf-8")
    (copy / "uv.lock").unlink()
    subprocess.run(["uv", "lock", "--quiet"], cwd=copy, env=environment, check=True)
    return without_hosts((copy / "uv.lock").read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
