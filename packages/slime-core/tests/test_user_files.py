"""Functions of a file in other processes, which import its module by name."""

import multiprocessing
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest

from slime_core.errors import ConfigError
from slime_core.user_functions import load_function

SOURCE = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

WORD = (Path(__file__).parent / "word.txt").read_text()

@dataclass
class Found:
    text: str

def work(text):
    return Found(f"{WORD} {text}")

def in_a_pool(method, text):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(work, text).result(60).text
"""


@pytest.fixture
def file(tmp_path, request):
    path = tmp_path / getattr(request, "param", "mine.py")
    path.parent.mkdir(exist_ok=True)
    path.write_text(SOURCE)
    (path.parent / "word.txt").write_text("a")
    return path


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_file_may_have_a_pool_of_its_own(file, method):
    assert load_function(f"{file}:in_a_pool", "--f")(method, "b") == "a b"


@pytest.mark.parametrize("file", ["my.reward v2.py", "100%/größe-[1].py", "json.py"], indirect=True)
def test_a_file_may_have_any_name(file):
    work = load_function(f"{file}:work", "--f")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(work, "b").result(60).text == "a b"


def test_files_of_one_name_are_told_apart(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def which(): return {name!r}")
    found = [load_function(f"{tmp_path}/{name}/mine.py:which", "--f") for name in ("one", "two")]
    assert [pickle.loads(pickle.dumps(function))() for function in found] == ["one", "two"]


def test_what_a_file_makes_is_read_by_a_process_that_has_not_loaded_it(file):
    text = pickle.dumps(load_function(f"{file}:work", "--f")("b"))
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).text)"
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, timeout=240, check=True)
    assert done.stdout.split() == [b"a", b"b"]


def test_a_file_that_raises_is_not_kept(tmp_path):
    path = tmp_path / "late.py"
    path.write_text("raise RuntimeError('not yet')")
    with pytest.raises(ConfigError, match=r"late\.py does not load: RuntimeError: not yet"):
        load_function(f"{path}:work", "--f")
    path.write_text("def work(): return 'this time'")
    assert load_function(f"{path}:work", "--f")() == "this time"
