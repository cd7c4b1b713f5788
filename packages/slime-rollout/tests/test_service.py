import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["", ".service", ".checks"])
def test_a_face_gives_what_types_say_and_nothing_else(name):
    face = importlib.import_module(f"slime_rollout{name}")
    [by_type] = [part for part in ast.parse(Path(face.__file__).read_text()).body if isinstance(part, ast.If)]
    assert face.__all__ == sorted(one.name for line in by_type.body for one in line.names)
    assert all(getattr(face, one) is not None for one in face.__all__)


def test_importing_a_face_is_light():
    code = "import sys, slime_rollout.service, slime_rollout.checks; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert not {"torch", "numpy", "transformers", "aiohttp", "slime_rollout.data"} & {*loaded}
