"""SGLang, its router and Megatron-core are as their wheels are: no file is changed, missing or added.

Three things are compared: each file with its line in the installed RECORD, the directory's files with those lines, and
all lines with a digest on `docs/explanation/no-patches.md`, which was taken from the wheels themselves. So a file that
was edited, one that was added, and a wheel or RECORD that is not the published one are all found.

Not counted: bytecode (`__pycache__`), and what an installer writes outside the package's own directory (the scripts in
`bin`, `dist-info`). Megatron-core's helper in C++ is in its wheel, compiled, and is compared like the rest.
"""

from __future__ import annotations

import ast
import base64
import csv
import functools
import hashlib
import re
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import engine_python

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/explanation/no-patches.md").read_text(encoding="utf-8")
PLATFORM = "cp311, x86-64"
"""Whose wheels the page's digests are of: those of another have other compiled files."""


@dataclass(frozen=True)
class Package:
    """A distribution, the directory that is its own, and whether the engine's interpreter has it or the trainer's."""

    name: str
    directory: str
    engine: bool


PACKAGES = (
    Package("megatron-core", "megatron", engine=False),
    Package("sglang", "sglang", engine=True),
    Package("sglang-router", "sglang_router", engine=True),
    Package("sglang-router", "sglang_router", engine=False),
)


@functools.cache
def _site_packages(engine: bool) -> Path:
    if not engine:
        return Path(sysconfig.get_path("purelib"))
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([engine_python(), "-c", code], capture_output=True, text=True, check=True, timeout=240)
    return Path(found.stdout.strip())


def _dist_info(package: Package) -> Path:
    pattern = f"{package.name.replace('-', '_')}-[0-9]*.dist-info"
    (found,) = _site_packages(package.engine).glob(pattern)
    return found


def own_lines(record: str, directory: str) -> dict[str, str]:
    """The paths and hashes of a RECORD that are in the package's directory, bytecode left out."""
    rows = (row[:2] for row in csv.reader(record.splitlines()))
    return {path: digest for path, digest in rows if path.startswith(f"{directory}/") and "__pycache__" not in path}


def digest_of(lines: dict[str, str]) -> str:
    """One SHA-256 of all lines, in the order of their paths."""
    text = "".join(f"{path} {digest}\n" for path, digest in sorted(lines.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _files(root: Path, directory: str) -> set[str]:
    found = (path for path in (root / directory).rglob("*") if not path.is_dir())
    return {path.relative_to(root).as_posix() for path in found if "__pycache__" not in path.parts}


def page_rows() -> dict[str, tuple[str, int, int, str]]:
    """The page's table: version, files compared, files changed and digest of each package."""
    row = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \| ([\d,]+) \| (\d+) \| `([0-9a-f]{64})` \|$", re.MULTILINE)
    return {
        name: (version, int(count.replace(",", "")), int(changed), digest)
        for name, version, count, changed, digest in row.findall(PAGE)
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: f"{one.name}-{'engine' if one.engine else 'trainer'}")
def test_no_file_is_changed_missing_or_added(package: Package) -> None:
    info = _dist_info(package)
    lines = own_lines((info / "RECORD").read_text(encoding="utf-8"), package.directory)
    there = _files(info.parent, package.directory)
    assert sorted(lines.keys() - there) == [], "missing"
    assert sorted(there - lines.keys()) == [], "added"
    assert [path for path, digest in lines.items() if _hash(info.parent / path) != digest] == [], "changed"


@pytest.mark.skipif(sys.platform != "linux" or sys.version_info[:2] != (3, 11), reason=f"wheels of {PLATFORM}")
@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: f"{one.name}-{'engine' if one.engine else 'trainer'}")
def test_what_is_installed_is_the_published_wheel(package: Package) -> None:
    info = _dist_info(package)
    if "x86_64" not in (info / "WHEEL").read_text(encoding="utf-8"):
        pytest.skip(f"the digests are of wheels of {PLATFORM}")
    lines = own_lines((info / "RECORD").read_text(encoding="utf-8"), package.directory)
    version = info.name.removesuffix(".dist-info").rpartition("-")[2]
    assert page_rows()[package.name] == (version, len(lines), 0, digest_of(lines))


def _named_in_memory(tree: ast.Module) -> set[str]:
    """Names of Megatron-core's modules that a file gives another value, as ``module.name``."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {
        alias.asname or alias.name: alias.name
        for node in imports
        if (node.module or "").startswith("megatron")
        for alias in node.names
    }
    targets = [
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for part in ast.walk(target)
    ]
    given = [
        (part.value.id, part.attr)
        for part in targets
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)
    ]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    given += [
        (call.args[0].id, ast.unparse(call.args[1]))
        for call in calls
        if call.func.id in ("setattr", "delattr") and isinstance(call.args[0], ast.Name)
    ]
    return {f"{names[owner]}.{name}" for owner, name in given if owner in names}


def test_what_is_replaced_in_memory_is_on_the_page() -> None:
    sources = sorted((ROOT / "packages/slime-megatron/src").rglob("*.py"))
    found = set().union(*(_named_in_memory(ast.parse(path.read_text(encoding="utf-8"))) for path in sources))
    # A loop over two names, which the page gives in words.
    assert "multi_latent_attention._name" in found
    assert {name for name in found - {"multi_latent_attention._name"} if f"`{name}`" not in PAGE} == set()


def test_an_edited_an_added_and_a_missing_file_are_found(tmp_path: Path) -> None:
    for name in ("kept", "edited", "added"):
        path = tmp_path / "package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("before\n")
    (tmp_path / "package" / "__pycache__").mkdir()
    (tmp_path / "package" / "__pycache__" / "kept.cpython-311.pyc").write_text("bytecode")
    before = _hash(tmp_path / "package" / "kept.py")
    record = "".join(f"package/{name}.py,{before},7\n" for name in ("kept", "edited", "missing"))
    record += "../../../bin/package,sha256=0,1\npackage-1.dist-info/RECORD,,\n"
    (tmp_path / "package" / "edited.py").write_text("after\n")
    lines, there = own_lines(record, "package"), _files(tmp_path, "package")
    assert lines.keys() - there == {"package/missing.py"}
    assert there - lines.keys() == {"package/added.py"}
    assert [path for path in sorted(lines.keys() & there) if _hash(tmp_path / path) != lines[path]] == [
        "package/edited.py"
    ]
    assert digest_of(lines) != digest_of({**lines, "package/edited.py": _hash(tmp_path / "package" / "edited.py")})
