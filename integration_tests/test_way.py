"""How far it is from a rollout to its requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "way.py"


def test_a_prompt_takes_a_short_way() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^(\d+) files; (\d+) calls: generation_service\.", done.stdout, re.M)
    assert found is not None, done.stdout
    files, calls = map(int, found.groups())
    print(f"{files} files, {calls} calls")
    assert files <= 23 and 5 < calls <= 10
