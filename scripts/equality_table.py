"""Print the trainer's equality tables, which docs/reference/layouts.md shows, from the results of its tests.

scripts/test --full megatron
python scripts/equality_table.py outputs/test/megatron.xml

Of several files, those of a run in portions, the last that has a cell counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

KINDS = ("loss", "grad_norm", "gradient", "weight")


def main(argv: Sequence[str]) -> int:
    """Print the tables of some files; returns the exit code."""
    if not argv:
        print(__doc__)
        return 2
    results = [Path(name).read_text(encoding="utf-8") for name in argv]
    print("\n\n".join(f"{precision}\n\n{table(results, precision)}" for precision in ("fp32", "bf16")))
    return 0


def table(results: Sequence[str], precision: str) -> str:
    """The Markdown table of JUnit files: a row for each layout, a column for each family; – is not compared."""
    cells: dict[str, dict[str, str]] = {}
    for case in (case for one in results for case in ElementTree.fromstring(one).iter("testcase")):
        found = {each.get("name", ""): each.get("value", "") for each in case.iter("property")}
        if "layout" in found and found.get("precision", "fp32") == precision:
            family = found["family"].partition("/")[0]
            cells.setdefault(found["layout"], {})[family] = " ".join(
                f"{float(found[kind]):.0e}".replace("e-0", "e-").replace("0e+00", "0") if kind in found else "–"
                for kind in KINDS
            )
    families = list(dict.fromkeys(family for row in cells.values() for family in row))
    lines = [["layout", *families], ["---"] * (len(families) + 1)]
    lines += [[layout, *(row.get(family, "") for family in families)] for layout, row in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
