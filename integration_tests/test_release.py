"""`scripts/release`: on a workspace of two toy packages in every detail, and a dry run on the real ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

PROJECT = """\
[build-system]
requires = ["hatchling>=1.26,<2"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.2.1"
license = "MIT"
requires-python = ">=3.11"
dependencies = [{dependencies}]

[project.optional-dependencies]
more = ["pluggy>=1"]
test = ["pytest>=8"]

[tool.hatch.build.targets.wheel]
packages = ["src/{module}"]

[tool.hatch.build.targets.sdist]
include = ["src", "tests", "CHANGELOG.md"]
"""
WORKSPACE = """\
[tool.uv.workspace]
members = ["packages/*"]

[tool.uv]
constraint-dependencies = []

[tool.pytest.ini_options]
addopts = "-q --import-mode=importlib -p no:cacheprovider"
"""
# toy-base is locked as it was a version ago, when it needed nothing of the workspace.
LOCK = """\
[[package]]
name = "toy-base"
version = "0.2.0"
source = { editable = "packages/toy-base" }
dependencies = [
    { name = "packaging" },
    { name = "colorama", marker = "sys_platform == 'win32'" },
]

[[package]]
name = "packaging"
version = "VERSION"
source = { registry = "https://index.invalid/simple" }
wheels = [
    { filename = "packaging-VERSION-py3-none-any.whl", hash = "sha256:HASH" },
]

[[package]]
name = "pluggy"
version = "1.6.0"
source = { registry = "https://index.invalid/simple" }

[[package]]
name = "pytest"
version = "9.2.0"
source = { registry = "https://index.invalid/simple" }
"""
HASH = "12" * 32
# The version of packaging where bills are made.
PACKAGING = re.search(r"^packaging==(\S+)", (ROOT / "scripts/requirements-release.txt").read_text(), re.MULTILINE)[1]


def _git(root: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com", *words]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=240).stdout


def _package(root: Path, name: str, *, dependencies: str = "", test: str = "") -> None:
    module = name.replace("-", "_")
    directory = root / "packages" / name
    for path, text in {
        "pyproject.toml": PROJECT.format(name=name, module=module, dependencies=dependencies),
        "CHANGELOG.md": f"# Changelog of {name}\n\n## 0.2.1\n\n- Fixes.\n\n## 0.2.0\n\n- First.\n",
        f"src/{module}/__init__.py": "ANSWER = 42\n",
        f"src/{module}/py.typed": "",
        # As slime-rollout carries one: only the wheel's own metadata counts.
        f"src/{module}/inner/other.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 9\n",
        "tests/test_it.py": test or f"import {module}\n\ndef test_it():\n    assert {module}.ANSWER == 42\n",
    }.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Two packages, `toy-top` needs `toy-base`; all committed."""
    root = tmp_path / "workspace"
    root.mkdir()
    (root / "pyproject.toml").write_text(WORKSPACE)
    (root / "uv.lock").write_text(LOCK.replace("VERSION", PACKAGING).replace("HASH", HASH))
    (root / ".gitignore").write_text("dist/\n")
    _package(root, "toy-base", dependencies='"packaging>=24"')
    _package(root, "toy-top", dependencies='"toy-base>=0.2,<0.3"')
    _git(root, "init", "--quiet", "--initial-branch=main")
    _commit(root)
    return root


def _commit(root: Path) -> None:
    _git(root, "add", "--all")
    _git(root, "commit", "--quiet", "--message", "toys")


def _release(*words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / "release"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def _before_building(*words: str) -> subprocess.CompletedProcess[str]:
    """A release that ends before it needs uv, without the time in which the script finds that."""
    command = [sys.executable, str(ROOT / "scripts" / "release.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def _tags(root: Path) -> list[str]:
    return _git(root, "tag").split()


def test_a_release_tests_what_it_built_and_tags_it(workspace: Path) -> None:
    done = _release("toy-top", "--root", str(workspace))
    assert done.returncode == 0, done.stderr
    assert "1 passed" in done.stdout
    assert _tags(workspace) == ["toy-top-v0.2.1"]
    assert sorted(path.name for path in (workspace / "dist").iterdir()) == [
        "toy_top-0.2.1-py3-none-any.whl",
        "toy_top-0.2.1.cdx.json",
        "toy_top-0.2.1.tar.gz",
    ]
    bill = json.loads((workspace / "dist" / "toy_top-0.2.1.cdx.json").read_text())
    for file in bill["metadata"]["component"]["externalReferences"]:
        digest = hashlib.sha256((workspace / "dist" / file["url"]).read_bytes()).hexdigest()
        assert file["hashes"] == [{"alg": "SHA-256", "content": digest}]
    assert {one["name"]: one["version"] for one in bill["components"]} == {
        "toy-base": "0.2.1", "packaging": PACKAGING, "pluggy": "1.6.0",
    }  # fmt: skip
    assert bill["metadata"]["timestamp"].startswith(_git(workspace, "log", "-1", "--format=%cs").strip())
    record = "packages/toy-top/tests/data/public_names.txt"
    assert "tagged toy-top-v0.2.1\n" in done.stdout and not _git(workspace, "status", "--porcelain")
    tagged = _git(workspace, "show", f"toy-top-v0.2.1:{record}")
    assert tagged.startswith("# Public names of toy-top 0.2.1,")
    with tarfile.open(workspace / "dist" / "toy_top-0.2.1.tar.gz") as archive:
        assert archive.extractfile("toy_top-0.2.1/tests/data/public_names.txt").read().decode() == tagged
    again = _before_building("toy-top", "--root", str(workspace))
    assert again.returncode == 2
    assert "the tag toy-top-v0.2.1 is there already; raise the version" in again.stderr


def test_a_tag_gets_its_files(workspace: Path) -> None:
    untagged = _before_building("toy-base", "--tagged", "--root", str(workspace))
    assert untagged.returncode == 2
    assert "this commit does not have the tag toy-base-v0.2.1, of the version in pyproject.toml" in untagged.stderr
    _git(workspace, "tag", "toy-base-v0.2.1")
    done = _release("toy-base", "--tagged", "--root", str(workspace))
    assert done.returncode == 0, done.stderr
    assert "toy_base-0.2.1.cdx.json in dist are ready to upload" in done.stdout
    assert _tags(workspace) == ["toy-base-v0.2.1"] and not _git(workspace, "status", "--porcelain")


BILL = """\
import pathlib, sys, sysconfig
sys.path.insert(0, "scripts")
import release, sbom
root, built = map(pathlib.Path, sys.argv[1:])
versions = {path.name: release.Package.read(path).version for path in root.glob("packages/*")}
(wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
site = pathlib.Path(sysconfig.get_path("purelib"))
_, metadata = release.read_wheel(wheel)
text = sbom.bill(metadata, (wheel, sdist), root / "uv.lock", versions, site, 1_700_000_000)
print(text)
try:
    sbom.check(text.replace('"library"', '"lib"'))
except ValueError as error:
    print(error, file=sys.stderr)
"""
MAKE = """\
source scripts/environments.sh && use_tools && (sync_requirements release CycloneDX) &&
    uv build --no-sources --quiet --out-dir "$1" "$0/packages/toy-top"
"""


def test_a_bill_of_materials_says_what_is_needed_and_is_the_same_each_time(workspace: Path, tmp_path: Path) -> None:
    """By CycloneDX's own schema, which refuses it with one word changed."""
    built = tmp_path / "built"
    subprocess.run(["bash", "-c", MAKE, str(workspace), str(built)], cwd=ROOT, check=True, timeout=200)
    python = ROOT / ".venv-release" / "bin" / "python"
    texts = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [python, "-c", BILL, str(workspace), str(built)],
            cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert "CycloneDX's schema does not allow the bill of materials" in done.stderr, done.stderr
        texts.add(done.stdout)
    (text,) = texts
    bill = json.loads(text)
    assert (bill["specVersion"], bill["metadata"]["timestamp"]) == ("1.6", "2023-11-14T22:13:20+00:00")
    base, top = "pkg:pypi/toy-base@0.2.1", "pkg:pypi/toy-top@0.2.1"
    packaging, pluggy = f"pkg:pypi/packaging@{PACKAGING}", "pkg:pypi/pluggy@1.6.0"
    assert {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]} == {
        top: [pluggy, base], base: [packaging], packaging: [], pluggy: [],
    }  # fmt: skip
    found = {one["purl"]: one for one in bill["components"]}
    assert {purl: one["scope"] for purl, one in found.items()} == {
        base: "required", packaging: "required", pluggy: "optional",
    }  # fmt: skip
    (file,) = found[packaging]["externalReferences"]
    assert file["hashes"] == [{"alg": "SHA-256", "content": HASH}] and "licenses" not in found[base]
    (license,) = found[packaging]["licenses"]
    assert license["acknowledgement"] == "declared" and license["expression"] == "Apache-2.0 OR BSD-2-Clause"
    assert bill["metadata"]["component"]["licenses"][0]["license"]["id"] == "MIT"


def test_a_dry_run_leaves_nothing_and_only_notes_changes(workspace: Path) -> None:
    (workspace / "packages" / "toy-base" / "notes.txt").write_text("not committed")
    done = _release("toy-base", "--dry-run", "--root", str(workspace))
    assert done.returncode == 0, done.stderr
    assert "note: 1 uncommitted changes (packages/toy-base/notes.txt" in done.stdout
    assert _tags(workspace) == []
    assert not (workspace / "dist").exists()


def test_a_dirty_tree_is_refused(workspace: Path) -> None:
    (workspace / "packages" / "toy-base" / "notes.txt").write_text("not committed")
    done = _before_building("toy-base", "--root", str(workspace))
    assert done.returncode == 2
    assert "uncommitted changes (packages/toy-base/notes.txt …); commit them" in done.stderr
    assert _tags(workspace) == []


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("CHANGELOG.md", "## 0.2.1\n\n- Fixes.\n\n", "", "has no entry `## 0.2.1` (it has 0.2.0); write one"),
        ("CHANGELOG.md", "## 0.2.1", "## 0.3.0\n\n- More.\n\n## 0.2.1", "the newest entry of"),
        ("CHANGELOG.md", "- Fixes.", "", "the entry 0.2.1 of"),
        ("pyproject.toml", "0.2.1", "two", "give one such as 0.1.1"),
        ("pyproject.toml", "pluggy>=1", "pluggy>=2", "`pluggy>=2` but uv.lock has 1.6.0; run scripts/lock"),
        (
            "pyproject.toml",
            "pluggy>=1",
            "tomli-w>=1",
            "`tomli-w>=1` but uv.lock has no version of it; run scripts/lock",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_built(
    workspace: Path, path: str, old: str, new: str, message: str
) -> None:
    _change(workspace, path, old, new)
    _is_refused(_before_building("toy-top", "--root", str(workspace)), workspace, message)


@pytest.mark.parametrize(
    ("path", "old", "new", "message"),
    [
        ("pyproject.toml", "toy-base>=0.2,<0.3", "toy-base>=0.2", "give both bounds, such as toy-base>=0.2,<0.3"),
        ("pyproject.toml", "toy-base>=0.2,<0.3", "toy-base>=0.1,<0.2", "but the workspace has 0.2.1; widen the bounds"),
        ("src/toy_top/py.typed", None, None, "lacks toy_top/py.typed"),
        ("tests/test_it.py", "== 42", "== 43", "1 failed"),
        ("tests/test_it.py", "import toy_top\n", "import packaging, toy_top, yaml\n", "No module named 'yaml'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_tagged(
    workspace: Path, path: str, old: str | None, new: str | None, message: str
) -> None:
    _change(workspace, path, old, new)
    _is_refused(_release("toy-top", "--root", str(workspace)), workspace, message)


def _change(workspace: Path, path: str, old: str | None, new: str | None) -> None:
    """Another text in a file of toy-top, or none of that file, committed."""
    file = workspace / "packages" / "toy-top" / path
    if old is None or new is None:
        file.unlink()
    else:
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
    _commit(workspace)


def _is_refused(done: subprocess.CompletedProcess[str], workspace: Path, message: str) -> None:
    assert done.returncode == 2
    assert message in done.stderr
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in done.stderr
    assert _tags(workspace) == [] and not _git(workspace, "status", "--porcelain")


def test_an_unknown_package_is_told_which_there_are(workspace: Path) -> None:
    done = _before_building("toy", "--root", str(workspace))
    assert (done.returncode, done.stderr) == (2, "release: there is no packages/toy; there are toy-base, toy-top\n")


def test_a_release_runs_every_test(workspace: Path) -> None:
    done = _before_building("toy-base", "--root", str(workspace), "--", "-k", "it")
    assert done.returncode == 2
    assert "a release runs every test: options for pytest are for --dry-run" in done.stderr
    assert _tags(workspace) == []


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_could_be_released(package: str) -> None:
    # The tests run elsewhere with more random points. The workspace's conftest.py registers the profile.
    one = ["--hypothesis-profile=one", str(ROOT / "conftest.py")]
    done = _release(package, "--dry-run", "--", *one, seconds=3900)
    assert done.returncode == 0, done.stderr
    assert "the tag slime-" in done.stdout


@pytest.mark.timeout(300)
def test_the_core_can_be_installed_and_used_outside_the_workspace() -> None:
    """Its tests are all imported there, so nothing is missing; those of the types run."""
    done = _release("slime-core", "--dry-run", "--", "-k", "types", seconds=280)
    assert done.returncode == 0, done.stderr
    assert "the tag slime-" in done.stdout
    assert " passed" in done.stdout and " deselected" in done.stdout
