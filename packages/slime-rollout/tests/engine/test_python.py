"""The interpreter of engines: which one it is, and whether it has a package."""

import os
import re
import sys
from pathlib import Path

import pytest

from slime_rollout.engine.python import find_python, importable_in, run_python


def test_whether_a_package_can_be_found_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setenv("PYTHONPATH", "another")  # an answer is kept by it
    monkeypatch.setattr("slime_rollout.engine.python.run_python", lambda *how: asked.append(how) or run_python(*how))
    for _ in range(2):
        assert importable_in(sys.executable, "pytest")
        assert not importable_in(sys.executable, "no_such_package")
    assert len(asked) == 2


def test_an_interpreter_that_was_too_slow_is_asked_again(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "a busy machine")
    monkeypatch.setattr("slime_rollout.engine.python._LOOK_SECONDS", 0.0)
    assert not importable_in(sys.executable, "pytest")
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", "a busy machine")
    assert importable_in(sys.executable, "pytest")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no program", "does not run as a Python interpreter: .*Exec format error"),
        ("#!/bin/sh\necho broken >&2\nexit 3\n", "ended with exit code 3: broken"),
    ],
)
def test_something_that_is_no_interpreter(tmp_path, caplog, text, words):
    python = tmp_path / "python"
    python.write_text(text)
    python.chmod(0o755)
    assert not importable_in(str(python), "sglang")
    assert re.search(words, caplog.text)


@pytest.fixture
def running(tmp_path, monkeypatch):
    """A running environment of its own, in a folder without anything else; the working folder is another one."""
    (tmp_path / "project" / ".venv").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "project" / ".venv"))
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "project"


def engines_environment(folder):
    python = folder / ".venv-engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    python.chmod(0o755)
    return python


def test_without_a_name_the_first_that_has_sglang(monkeypatch, tmp_path, running):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    beside, above = engines_environment(running), engines_environment(tmp_path)
    in_path = tmp_path / "bin" / "python3"
    in_path.parent.mkdir()
    in_path.write_text("")
    in_path.chmod(0o755)
    found: set[str] = set()
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda python, package: python in found)
    for number, (has, expected) in enumerate(
        [
            ([], sys.executable),
            ([above], sys.executable),  # a folder above the working folder is anybody's
            ([in_path, above], in_path),
            ([in_path, beside], beside),
            ([beside, sys.executable], sys.executable),
        ]
    ):
        found = {str(python) for python in has}
        monkeypatch.setenv("PYTHONPATH", str(number))  # what was found is kept by it
        assert find_python(None) == str(expected)


@pytest.mark.parametrize("part", [".venv-engine", ".venv-engine/bin", ".venv-engine/bin/python"])
@pytest.mark.parametrize("fault", ["owner", "writable"])
def test_engines_of_another_user_are_not_run(part, fault, monkeypatch, running, caplog):
    python, asked = engines_environment(running), []
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda python, package: asked.append(python))
    monkeypatch.setenv("PYTHONPATH", f"{part} {fault}")
    if fault == "writable":
        (running / part).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(running / part, 65534, 65534)
    else:
        pytest.skip("only root gives a file to another user")
    assert find_python(None) == sys.executable and str(python) not in asked
    assert f"{running / part} " in caplog.text and f"give --sglang-python {python} if you trust it" in caplog.text


def test_a_link_to_engines_is_as_trusted_as_what_it_leads_to(monkeypatch, running, tmp_path):
    python = engines_environment(tmp_path / "elsewhere")
    (running / ".venv-engine").symlink_to(tmp_path / "elsewhere" / ".venv-engine")
    monkeypatch.setattr("slime_rollout.engine.python.importable_in", lambda python, package: "venv-engine" in python)
    for number, (mode, expected) in enumerate(
        [(0o755, str(running / ".venv-engine/bin/python")), (0o777, sys.executable)]
    ):
        python.parent.chmod(mode)
        monkeypatch.setenv("PYTHONPATH", f"linked {number}")
        assert find_python(None) == expected


def test_no_module_of_the_working_folder_is_imported_by_a_look(running, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("importlib", "json", "argparse", "sglang"):
        Path(f"{name}.py").write_text(f"open('imported', 'a').write('{name}')\n")
    assert not importable_in(sys.executable, "sglang")
    code = "import json, importlib.util; print(json.dumps(1))"
    assert run_python(sys.executable, code, None, 60.0).stdout == "1\n"
    assert run_python(sys.executable, code, {"PATH": ""}, 60.0).stdout == "1\n"
    assert not Path("imported").exists()
