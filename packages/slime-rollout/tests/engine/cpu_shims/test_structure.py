"""What transformers finds in its files, remembered: the same as it finds itself."""

import subprocess
import sys

from slime_rollout.engine.sglang_flags import CPU_SHIMS

CODE = """
import importlib, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from slime_cpu_shims import structure
import transformers.utils.import_utils as library
models = str(Path(library.__file__).parents[1] / "models")
looks = library.create_import_structure_from_path
own = looks(models)

def check(home):
    os.environ["XDG_CACHE_HOME"] = home
    library.create_import_structure_from_path = looks
    importlib.reload(structure)._remember(library)
    find = library.create_import_structure_from_path
    first = find(models)
    again = find(models + "/__init__.py")
    assert first == own and again == own, "the structure differs"
    again.clear()
    assert find(models) == own, "the caller's copy is the remembered one"
    assert find(models + "/llama") == own["llama"]

for home in sys.argv[2:]:
    check(home)
    try:
        (file,) = Path(home, "slime").iterdir()
    except NotADirectoryError:
        continue
    assert json.loads(file.read_bytes())
    written = file.stat().st_mtime_ns
    check(home)
    assert file.stat().st_mtime_ns == written, "it is written once more"
    for content in (b"", b"[[", b"null", b"[1]", b'[["a", 1]]'):
        file.write_bytes(content)
        check(home)
        assert json.loads(file.read_bytes()), content
print("good")
"""


def test_it_is_what_transformers_finds_and_is_kept_where_there_is_a_place(tmp_path):
    """What lies there and is not ours is read again."""
    kept, nowhere = tmp_path / "kept", tmp_path / "nowhere"
    nowhere.mkdir()
    (nowhere / "slime").write_text("no directory")
    words = [sys.executable, "-c", CODE, str(CPU_SHIMS), str(kept), str(nowhere)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "good\n"
