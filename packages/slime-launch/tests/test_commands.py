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


STRAYS = [
    *((f"{name} stray --config run.toml", "'stray'") for name in ("train", "train-async", "sft", "eval", "plan")),
    *((f"{name} --config run.toml stray", "'stray' after --config") for name in ("train", "sft", "eval", "plan")),
    ("plan --config run.toml --rollout-stop a --json stray", "'stray' after --json"),
    ("plan --config run.toml --rollout-stop a --device h100 stray", "'stray' after --device"),
    ("plan --config run.toml --rollout-stop a --device=h100 stray", "'stray' after --device=h100"),
    ("submit --ray-address http://h:1 stray --config run.toml", "'stray'"),
    ("replay RUN stray --step 3", "'stray' after RUN"),
    ("replay RUN --step 3 stray", "'stray' after RUN"),
    ("report RUN stray", "RUN holds neither"),
    ("report --serve --port 3 4 RUN", "4 holds neither"),
    ("diff RUN RUN stray", "'stray'"),
    ("diff RUN --colour RUN", "'--colour'"),
    ("migrate run.sh stray", "'stray' after run.sh"),
    ("migrate stray", "stray does not exist"),
    ("doctor stray", "unrecognized arguments: stray"),
    ("completion bash stray", "'stray' after bash"),
    ("recipes stray", "unrecognized arguments: stray"),
    ("new NAME stray", "unrecognized arguments: stray"),
    ("--version stray", "'stray' after --version"),
    ("stray", "unknown command stray"),
]


@pytest.mark.parametrize(("words", "message"), STRAYS)
def test_a_stray_word_is_named_by_every_command(words, message, workspace, capsys, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (workspace / "run.toml").write_text('num-rollout = 1\nrollout-batch-size = 4\nrollout-stop = ["a"]\n')
    (workspace / "run.sh").write_text("python train.py --lr 1\n")
    monkeypatch.setattr(train, "supervise", None)
    assert main(words.split()) == 2
    assert message in "\n".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("name", "shown", "lines"),
    [
        ("eval", ("--eval-prompt-data", "--hf-checkpoint", "--n-samples-per-eval-prompt", "--custom-rm-path"), 100),
        ("sft", ("--prompt-data", "--loss-mask-type", "--lr ", "--save-interval", "--tool-key"), 120),
        ("report", ("RUN [RUN ...]", "--trace"), 30),
        ("replay", ("RUN --step N", "--step"), 20),
        ("plan", ("--simulate", "--write"), 60),
    ],
)
def test_a_command_has_a_help_of_its_own(name, shown, lines, capsys):
    for word in ("--help", "-h"):
        assert main([name, word]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"usage: slime-launch {name} ") and text.count("usage:") == 1
        assert all(part in text for part in shown) and len(text.splitlines()) < lines
        assert name not in ("eval", "sft") or "`slime-launch train --help` lists them" in text
