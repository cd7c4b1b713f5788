import ast
import subprocess
import sys
from pathlib import Path

from slime_megatron import service

LOADED = "import sys, slime_megatron.service; print(*(name for name in sys.modules if name.startswith('slime_')))"


def test_the_face_to_a_launcher_gives_what_types_say():
    [by_type] = [part for part in ast.parse(Path(service.__file__).read_text()).body if isinstance(part, ast.If)]
    assert service.__all__ == sorted(one.name for line in by_type.body for one in line.names)
    assert all(getattr(service, name) is not None for name in service.__all__)


def test_importing_the_face_to_a_launcher_loads_nothing_else():
    found = subprocess.run([sys.executable, "-P", "-c", LOADED], capture_output=True, text=True, check=True)
    assert not [name for name in found.stdout.split() if name.startswith("slime_megatron.") and "service" not in name]
