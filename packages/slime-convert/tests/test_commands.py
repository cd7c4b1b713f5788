"""Messages about calls from Python, told as messages about commands."""

import inspect
import re
from pathlib import Path

import pytest

import slime_convert
from slime_convert.commands import ARGUMENTS, COMMANDS, in_flags
from slime_convert.formats.hf import OutputOptions

PACKAGE = Path(slime_convert.__file__).parent


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(("argument", "flag"), ARGUMENTS.items())
def test_what_a_call_is_told_of_its_arguments_a_command_is_told_of_its_flags(argument, flag):
    own = [name for command in COMMANDS for one in command.flags for name in one.names]
    assert flag in own
    name = argument.partition("=")[0]
    functions = [getattr(slime_convert, name) for name in slime_convert.__all__ if name.islower()]
    takes = {parameter for function in functions for parameter in inspect.signature(function).parameters}
    assert name in takes | OutputOptions.__annotations__.keys()
    assert (
        in_flags(f"choose another, or give {argument}; not x{argument}")
        == f"choose another, or give {flag}; not x{argument}"
    )


def test_no_message_of_the_library_names_one_of_these_flags():
    told = {
        (path.name, flag)
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("commands.py", "cli.py")
        for text in re.findall(r'"([^"\n]*)"', path.read_text())
        for flag in ARGUMENTS.values()
        if re.search(rf"(?<![\w-]){flag}(?![\w-])", text)
    }
    assert told == set()
