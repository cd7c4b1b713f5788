"""How far it is from a rollout to its requests."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "way.py"


def test_a_prompt_takes_a_short_way():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    files, calls = map(int, re.search(r"^(\d+) files; (\d+) calls: generation_service\.", done.stdout, re.M).groups())
    print(f"{files} files, {calls} calls")
    assert files <= 40 and 5 < calls <= 10
