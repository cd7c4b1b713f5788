"""Writes docs/reference/metrics.md from the table of metrics. A test compares the two,
and the table with what runs write.

python scripts/metrics_page.py    writes the page
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slime_launch.metric_names import SECTIONS, absent, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
HEAD = """\
# Metrics

Written by `scripts/metrics_page.py` from `slime_launch/metric_names.toml`. All of them go to `metrics.jsonl`,
TensorBoard and, with `--use-wandb`, Weights & Biases. User-defined functions add their own metrics: a custom
loss under `train/`, logging hooks and rollout functions under `rollout/` and `eval/`. Formulas are in
[algorithms.md](algorithms.md#metrics). *same* means that upstream slime uses this name for the same metric.
"""
TITLES = {
    "train": "train: one row per optimizer step",
    "rollout": "rollout and passrate: one row per rollout",
    "perf": "perf: where time and memory go, beside rollout and eval",
    "eval": "eval: one row per evaluation",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in SECTIONS:
        rows = [
            (f"`{name}`", row["is"], row.get("when", "always"), _upstream(row))
            for name, row in table()[section].items()
        ]
        parts.append(f"## {TITLES[section]}\n\n{_markdown(('name', 'what it is', 'when', 'upstream'), rows)}")
    others = [(", ".join(f"`{name}`" for name in names.split(", ")), instead) for names, instead in absent().items()]
    parts.append(f"## Upstream's that are not here\n\n{_markdown(('upstream', 'look at'), others)}")
    return "\n".join(parts)


def _upstream(row: dict[str, str]) -> str:
    name = row.get("upstream", "")
    return "*same*" if name == "=" else name and f"`{name}`"


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", chr(92) + "|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
