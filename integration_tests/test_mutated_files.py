"""Files of every kind that people get from others, altered: each is read right, or refused in a line.

Every mutant is read by a process of its own, forked from one that has everything loaded, with 2 GiB of memory and 20 s
of computing. Mutants have numbers, which make them again: `python reading_mutants.py DIR NUMBER 1`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from reading_mutants import MEMORY, READERS, SECONDS

PROGRAM = Path(__file__).with_name("reading_mutants.py")
FEW, MANY = 200, 10_000


def read_mutants(work: Path, first: int, count: int, seconds: float) -> list[dict[str, Any]]:
    """What became of mutants, with a summary printed."""
    own = {name: str(work / name) for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    for place in own.values():
        Path(place).mkdir()
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with (work / "errors").open("wb") as errors:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(work), str(first), str(count)],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | own | threads,
            timeout=seconds,
            check=False,
        )
    assert done.returncode == 0, (work / "errors").read_text(errors="replace")[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    ends = Counter(one["end"] for one in found)
    slowest, largest = (max(found, key=lambda one, name=name: one[name]) for name in ("seconds", "grown"))
    print(f"{len(found):,} files: {dict(ends)}; slowest: {slowest}; largest: {largest}")
    return found


def assert_sound(found: list[dict[str, Any]], count: int) -> None:
    """All were read, or refused in a line; by every reader there were both."""
    assert len({one["number"] for one in found}) == len(found) == count
    wrong = [one for one in found if one["end"] not in ("read", "refused")]
    assert not wrong, json.dumps(wrong[:5], indent=1)
    assert max(one["seconds"] for one in found) < SECONDS and max(one["grown"] for one in found) < MEMORY
    assert {one["reader"] for one in found} == READERS.keys()


@pytest.mark.timeout(900)
def test_some_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    found = read_mutants(tmp_path, 0, FEW, 840)
    assert_sound(found, FEW)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ten_thousand_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    found = read_mutants(tmp_path, 0, MANY, 4 * 1700)
    assert_sound(found, MANY)
    ends = Counter((one["reader"], one["end"]) for one in found)
    assert len(ends) == 2 * len(READERS), "a reader takes everything, or nothing"
    for name in ("sparse", "pipe", "/dev/zero", "in small", "template", "a pickle", "deep"):
        assert any(name in one["how"] for one in found), name
