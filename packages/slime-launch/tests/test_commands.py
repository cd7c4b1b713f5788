import importlib
import shlex

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


def test_a_job_is_printed_as_a_command_that_runs_it(flags, to_words, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = [*to_words(flags), "--train-env-vars", '{"A": "b c"}']
    assert main(["submit", "--ray-address", "http://head:8265", *words]) == 0
    printed = shlex.split(capsys.readouterr().out)
    assert printed == [
        *["ray", "job", "submit", "--address", "http://head:8265", "--", "slime-launch", "train"],
        *words,
    ]
    monkeypatch.setenv("RAY_ADDRESS", "https://other:1")
    assert main(["submit", *words]) == 0
    assert "--address https://other:1 --" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ray-address", "head:6379"], "--ray-address head:6379 must be the address of the cluster's dashboard"),
        (["--lr", "1"], "--ray-address (not given) must be"),
        (["--ray-address=http://head:8265", "--wandb-key", "k"], "set WANDB_API_KEY there instead"),
        (["--ray-address=http://head:8265", "--num-rolout", "1"], "did you mean --num-rollout"),
    ],
)
def test_a_job_that_cannot_be_submitted_is_one_line(words, message, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["submit", *words]) == 2
    assert message in capsys.readouterr().err
