"""What `scripts/test --changed` runs, quickest first: ruff, the nearest tests, all unit tests, types, real ones."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reach import Choice, Graph, Reached, changed_files, choose, load_recording

ROOT = Path(__file__).resolve().parents[1]
RECORDING = ROOT / "outputs" / "test" / "children.json"
NEAREST = 2
# In order: what needs no framework answers first.
ENVIRONMENTS = ("core", "convert", "launch", "rollout", "megatron", "integration")


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: For the table.
        environment: The tox environment that it runs in.
        command: In that environment.
        tests: Whether it is pytest, which writes a JUnit file.
    """

    name: str
    environment: str
    command: tuple[str, ...]
    tests: bool = False


def plan(revision: str, marks: Sequence[str]) -> tuple[list[Step], list[str]]:
    """The steps for what changed since a revision, and lines that say what was chosen and why.

    Args:
        revision: What to compare with.
        marks: Options of pytest.
    """
    changed = changed_files(ROOT, revision)
    if not changed:
        return [], [f"nothing changed since {revision}"]
    rules = tomllib.loads((ROOT / "scripts" / "reach.toml").read_text(encoding="utf-8"))["rule"]
    choice = choose(Graph(ROOT, load_recording(RECORDING)), changed, rules)
    shown = ", ".join(changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
    lines = [f"changed since {revision}: {shown}", *choice.said, *reasons(choice.reached)]
    return list(steps(changed, choice, marks)), lines


def reasons(reached: Sequence[Reached]) -> Iterator[str]:
    """A line for each environment: how many test files, why, and which come first."""
    for environment in ENVIRONMENTS:
        found = [one for one in reached if one.environment == environment]
        if found:
            why = Counter("start it in a process" if one.started else "import or read it" for one in found)
            first = ", ".join(Path(one.test).stem for one in found[:3])
            counts = ", ".join(f"{count} {how}" for how, count in why.items())
            yield f"{environment}: {len(found)} test files ({counts}), first {first}"


def steps(changed: Sequence[str], choice: Choice, marks: Sequence[str]) -> Iterator[Step]:
    """The commands, quickest first."""
    there = [path for path in changed if (ROOT / path).is_file()]
    code = [path for path in there if path.endswith(".py")]
    if code:
        yield Step("ruff", "lint", ("ruff", "check", "--force-exclude", *code))
        yield Step("format", "lint", ("ruff", "format", "--check", "--force-exclude", *code))
    unit = [one for one in choice.reached if not one.real]
    nearest = unit[:NEAREST] if unit and unit[0].steps < len(ENVIRONMENTS) else []
    nearest = [one for one in nearest if one.environment == nearest[0].environment]
    yield from _pytest("nearest", nearest, marks)
    yield Step("tidy", "lint", ("python", "scripts/tidy.py"))
    yield from _pytest("unit", [one for one in unit if one not in nearest], marks)
    if code:
        yield Step("mypy", "lint", ("mypy",))
        yield Step("imports", "lint", ("lint-imports",))
    if there:
        yield Step("spelling", "lint", ("codespell", *there))
    if any(path.endswith(".md") for path in changed):
        yield Step("pages", "lint", ("python", "scripts/docs.py", "--check"))
    yield from _pytest("real", [one for one in choice.reached if one.real], marks)


def _pytest(what: str, reached: Sequence[Reached], marks: Sequence[str]) -> Iterator[Step]:
    """A step for each environment; its files in the order that they have here."""
    # The environment of the nearest file first, then those that start up fast.
    first = [one.environment for one in reached[:1]]
    for environment in dict.fromkeys([*first, *ENVIRONMENTS]):
        files = [one.test for one in reached if one.environment == environment]
        if files:
            yield Step(f"{environment}-{what}", environment, ("pytest", "--verbose", *marks, *files), tests=True)
