"""What importing slime_core and slime_convert costs: CPU seconds of a fresh interpreter, the least of several.

The goal is less than 0.1 s for every name, beyond `import torch` where it is needed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _records import Record

GOAL = 0.1
CASES = {
    "slime_core": ("import torch", "import slime_core"),
    "types and settings": ("import torch", "import slime_core; slime_core.Sample; slime_core.AlgorithmConfig"),
    "types and settings, without torch": ("", "import slime_core; slime_core.Sample; slime_core.AlgorithmConfig"),
    "all algorithms": ("import torch", "import slime_core.ops"),
    "slime_convert, without torch": ("", "import slime_convert; slime_convert.ModelShape; slime_convert.WeightMap"),
    "a conversion, without torch": ("", "import slime_convert; slime_convert.hf_to_torch_dist"),
}


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure every case.

    Args:
        out: Not used.
        quick: Two interpreters per case instead of five.
    """
    repeats = 2 if quick else 5
    return [
        Record(case, "import", min(cpu_seconds(*statements) for _ in range(repeats)), "s", False, GOAL)
        for case, statements in CASES.items()
    ]


def cpu_seconds(before: str, statement: str) -> float:
    """CPU time of a statement in a fresh interpreter, after another one."""
    code = f"{before}\nimport time\nstart = time.process_time()\n{statement}\nprint(time.process_time() - start)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
