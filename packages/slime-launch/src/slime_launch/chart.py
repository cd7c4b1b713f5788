"""A curve as a picture and as characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 60
HEIGHT = 6


def draw_chart(values: Sequence[float], *, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Columns of block characters, the smallest value at the bottom and the largest at the top.

    Args:
        values: At least one number. More than ``width`` are averaged in equal parts.
        width: Most columns.
        height: Rows.

    Returns:
        The rows, top first, with the scale at the left.
    """
    columns = _shrink(values, width)
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    eighths = [round((value - low) / span * (height * 8 - 1)) + 1 for value in columns]
    rows = []
    for row in reversed(range(height)):
        label = f"{high:.3g}" if row == height - 1 else f"{low:.3g}" if row == 0 else ""
        cells = "".join(BLOCKS[max(0, min(8, level - 8 * row))] for level in eighths)
        rows.append(f"{label:>8} ┤{cells}")
    return rows


def save_curve(values: Sequence[float], path: Path) -> None:
    """Draw mean reward over rollouts as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(values) + 1), values, marker=".", linewidth=1.2)
    axes.set_xlabel("rollout")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(place * len(values) / width) for place in range(width + 1)]
    return [fmean(values[start:stop]) for start, stop in pairwise(edges)]
