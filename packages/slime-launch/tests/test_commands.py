import importlib

import pytest

from slime_launch import train
from slime_launch.cli import main
from slime_launch.commands import COMMANDS, usage


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_in_the_usage(name):
    module, _, function = COMMANDS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert f"\n  {name} " in usage()


def test_the_usage_is_what_no_words_give(capsys):
    assert main([]) == main(["--help"]) == 0
    assert capsys.readouterr().out == f"{usage()}\n" * 2


@pytest.mark.parametrize(
    ("words", "passed"),
    [
        (["--lr", "1"], ["--async-buffer-size", "1", "--lr", "1"]),
        (["--async-buffer-size", "4"], ["--async-buffer-size", "4"]),
        (["--async-buffer-size=4"], ["--async-buffer-size=4"]),
    ],
)
def test_train_async_generates_one_rollout_ahead_unless_told(words, passed, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda argv: seen.append(argv) or 0)
    assert main(["train-async", *words]) == 0
    assert seen == [passed]
