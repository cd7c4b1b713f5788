"""Which of our files run in the child processes of each test file, recorded by coverage.py for `scripts/test --record`.

Every Python process that starts while a test runs measures itself: coverage.py begins with the interpreter, and its
context is the test that pytest names in PYTEST_CURRENT_TEST. A process that several tests share counts for the first
of them, and one that SIGKILL ends leaves nothing: a recording adds to what the import graph knows and replaces nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from coverage import CoverageData

COVERAGE = "coverage>=7.10,<8"


def settings(folder: Path, root: Path) -> dict[str, str]:
    """The environment in which every Python process measures itself and leaves its data in a folder.

    Args:
        folder: For the data.
        root: The checkout; its pyproject.toml says how to measure.
    """
    return {
        "COVERAGE_PROCESS_START": str(root / "pyproject.toml"),
        "SLIME_RECORDING": str(folder / "data"),
        "SLIME_SOURCES": str(root / "packages"),
    }


def collect(folder: Path, root: Path) -> dict[str, list[str]]:
    """Test file → files of the packages that ran in its child processes, as paths from the root."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.iterdir()):
        data = CoverageData(str(path))
        data.read()
        # "packages/…/tests/test_a.py::test_b (call)", and nothing for the process of pytest itself
        tests = {context.partition("::")[0] for context in data.measured_contexts()} - {""}
        files = {str(Path(file).relative_to(root)) for file in data.measured_files() if "/src/" in file}
        for test in tests:
            found.setdefault(test, set()).update(files)
    return {test: sorted(files) for test, files in sorted(found.items())}


def save(recorded: dict[str, list[str]], path: Path) -> None:
    """Write a recording; test files that did not run keep what an earlier one knows of them."""
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(earlier | recorded, indent=1), encoding="utf-8")
