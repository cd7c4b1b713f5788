"""Writes docs/benchmarks.md from the figures in benchmarks/baselines and the notes in benchmarks/notes.toml.

python scripts/benchmarks_page.py    writes the page; `scripts/bench --save-baseline` does it, too
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BENCHMARKS = ROOT / "benchmarks"
HEAD = """\
# Benchmarks

Written by `scripts/benchmarks_page.py` from `benchmarks/baselines`, the figures of the last committed run of each
benchmark. `scripts/bench NAME` runs one again and prints the new figures over these; `scripts/bench --list` names all.
Nothing here was measured on CUDA.

Machines are shared, and differ twofold in the speed of their memory. So figures that compare two programs come from one
run in which the two take turns, and a time alone says little about another machine. *load* is what the machine was
doing when a benchmark began (processes that wanted a core); much above 2 means that others took their share.
"""


def page() -> str:
    """The whole page."""
    notes = tomllib.loads((BENCHMARKS / "notes.toml").read_text(encoding="utf-8"))
    sections = [f"## {note['title']}\n\n{note['text']}" for note in notes.values() if "title" in note]
    for path in sorted((BENCHMARKS / "baselines").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        parts = [f"## {path.stem}", _about(path.stem), _machine(run["machine"]), _table(run["records"])]
        if (note := notes.get(path.stem)) is not None:
            parts.append(note["text"].strip())
        sections.append("\n\n".join(parts) + "\n")
    return "\n".join([HEAD, *sections])


def _about(name: str) -> str:
    """The first sentence of a benchmark's docstring."""
    tree = ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['date']}, commit `{machine['commit']}`; {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']:g} GiB, load {machine['load']:g}; Python {machine['python']}, {versions}."
    )


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| case | metric | figure | goal |", "|---|---|---|---|"]
    for record in records:
        bound = "at least" if record["more_is_better"] else "at most"
        goal = "" if record["goal"] is None else f"{bound} {_number(record['goal'])}"
        cells = (record["case"], record["metric"], f"{_number(record['value'])} {record['unit']}", goal)
        lines.append(f"| {' | '.join(cell.replace('|', '·') for cell in cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
