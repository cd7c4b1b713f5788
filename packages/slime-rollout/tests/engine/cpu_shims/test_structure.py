"""What transformers finds in its files, remembered: the same as it finds itself."""

import json
import os
import subprocess
import sys

import pytest

from slime_rollout.engine.sglang_flags import CPU_SHIMS

CODE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slime_cpu_shims import structure
import transformers.utils.import_utils as before
models = str(Path(before.__file__).parents[1] / "models")
own = before.create_import_structure_from_path(models)
structure._remember(before)
first = before.create_import_structure_from_path(models)
again = before.create_import_structure_from_path(models + "/__init__.py")
assert first == own and again == own, "the structure differs"
again.clear()
assert before.create_import_structure_from_path(models) == own, "the caller's copy is the remembered one"
assert before.create_import_structure_from_path(models + "/llama") == own["llama"]
print("good")
"""


def run(home):
    environment = {**os.environ, "XDG_CACHE_HOME": str(home)}
    words = [sys.executable, "-c", CODE, str(CPU_SHIMS)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "good\n"


def test_it_is_what_transformers_finds_and_is_kept(tmp_path):
    run(tmp_path)
    (file,) = (tmp_path / "slime").iterdir()
    assert json.loads(file.read_bytes())
    written = file.stat().st_mtime_ns
    run(tmp_path)
    assert file.stat().st_mtime_ns == written


@pytest.mark.parametrize("content", [b"", b"[[", b"null", b"[1]", b'[["a", 1]]'])
def test_a_file_that_is_not_ours_is_read_anew(content, tmp_path):
    run(tmp_path)
    (file,) = (tmp_path / "slime").iterdir()
    file.write_bytes(content)
    run(tmp_path)
    assert json.loads(file.read_bytes())


def test_without_a_place_to_keep_it_the_files_are_read(tmp_path):
    (tmp_path / "slime").write_text("no directory")
    run(tmp_path)
