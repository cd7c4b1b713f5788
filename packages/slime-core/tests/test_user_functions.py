import importlib
import sys
from pathlib import Path

import pytest

from slime_core.errors import ConfigError
from slime_core.user_functions import load_function

SOURCE = """
def plain(args, sample): return 3
def optional(args, sample, extra=None): return 4
def any_number(*args): return 5
def one(sample): return 1
def three(args, sample, extra): return 1
class Callable:
    def __call__(self, args, sample): return 6
made = Callable()
not_callable = 5
"""
ARGUMENTS = ("args", "sample")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize(("name", "value"), [("plain", 3), ("optional", 4), ("any_number", 5), ("made", 6)])
def test_what_can_be_called_is_found(file, name, value):
    assert load_function(f"{file}:{name}", "--f", arguments=ARGUMENTS)(None, None) == value


def test_a_built_in_that_does_not_tell_its_arguments():
    assert load_function("builtins.max", "--f", arguments=ARGUMENTS) is max


@pytest.mark.parametrize("path", ["my_package.functions.plain", "my_package.functions:plain"])
def test_a_function_of_a_package(tmp_path, monkeypatch, path):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "functions.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_function(path, "--f", arguments=ARGUMENTS)(None, None) == 3


def test_a_folders_modules_are_found_for_what_is_named_there_and_after_all_others(tmp_path, monkeypatch):
    (tmp_path / "here_alone.py").write_text("import colorsys\ndef score(): return colorsys.__file__\n")
    for name in ("colorsys", "textwrap", "an_extra_that_is_not_installed"):
        (tmp_path / f"{name}.py").write_text("raise ZeroDivisionError")
    path = [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", list(path))
    monkeypatch.chdir(tmp_path)
    for module, name in (("textwrap", "dedent"), ("slime_core.words", "counted")):
        monkeypatch.delitem(sys.modules, "textwrap", raising=False)
        assert load_function(f"{module}:{name}", "--custom-rm-path").__module__ == module
        assert sys.path == path, "nothing of the folder is named"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("an_extra_that_is_not_installed")
    assert Path(load_function("here_alone.score", "--custom-rm-path")()).parent != tmp_path
    assert sys.path == [*path, str(tmp_path)]
    load_function("here_alone.score", "--custom-rm-path")
    assert sys.path == [*path, str(tmp_path)]


def test_a_file_is_loaded_once(file):
    assert load_function(f"{file}:plain", "--f") is load_function(f"{file}:plain", "--f")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{file}", "names no function; write pkg.mod.fn, pkg.mod:fn or file.py:fn"),
        ("{file}:", "names no function"),
        ("plain", "names no function"),
        ("{file}:nope", "has no function nope; it has any_number, one, "),
        ("{file}:not_callable", "has no function not_callable"),
        ("{dir}/none.py:plain", "does not load: FileNotFoundError"),
        ("no_such_package.rewards.plain", "does not load: ModuleNotFoundError: No module named 'no_such_package'"),
        ("{file}:one", "takes (sample); it is called with 2 arguments, (args, sample)"),
        ("{file}:three", "takes (args, sample, extra)"),
    ],
)
def test_a_function_that_cannot_serve_is_refused(file, path, words):
    given = path.format(file=file, dir=file.parent)
    with pytest.raises(ConfigError) as caught:
        load_function(given, "--f", arguments=ARGUMENTS)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--f {given}")


@pytest.mark.parametrize(
    ("source", "words"),
    [("import sys; sys.exit('usage: …')", "SystemExit: usage"), ("def plain(args, sample) return 1", "SyntaxError")],
)
def test_a_file_that_does_not_load(file, source, words):
    file.write_text(source)
    with pytest.raises(ConfigError, match=f"does not load: {words}"):
        load_function(f"{file}:plain", "--f")


def test_a_file_alone_means_the_first_usual_name_that_it_has(tmp_path):
    path = tmp_path / "hook.py"
    path.write_text("def second(): return 2\ndef third(): return 3\n")
    assert load_function(str(path), "--f", usual_names=("first", "second"))() == 2
    assert load_function(f"{path}:third", "--f", usual_names=("first", "second"))() == 3
    with pytest.raises(ConfigError, match="has no function first or fourth; it has second, third"):
        load_function(str(path), "--f", usual_names=("first", "fourth"))
    with pytest.raises(ConfigError, match="names no function"):
        load_function(str(path), "--f")
