import importlib
import shlex

import pytest

from slime_convert.commands import COMMANDS as CONVERT_COMMANDS
from slime_launch import train
from slime_launch.cli import main
from slime_launch.commands import COMMANDS, MEANT, usage
from slime_launch.flags import train_groups
from slime_launch.new_task import find_recipe
from slime_launch.parser import build_parser, parse_all


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_in_the_usage(name):
    module, _, function = COMMANDS[name].function.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert f"\n  {name} " in usage()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tarin", "did you mean train?"),
        ("Train", "did you mean train?"),
        ("evl", "did you mean eval?"),
        ("train_async", "did you mean train-async?"),
        ("train_async.py", "did you mean train-async?"),
        ("dpo", "here it is slime-launch sft --loss-type dpo_loss"),
        ("train_dpo", "here it is slime-launch sft --loss-type dpo_loss"),
        ("train_ppo_ray", "here it is slime-launch train --advantage-estimator ppo"),
        ("GRPO", "here it is slime-launch train"),
        ("reward_model", "here it is slime-launch sft --loss-type rm_loss"),
        ("base.toml", "a command comes first, such as slime-launch train --config base.toml"),
        ("--config", "a command comes first, such as slime-launch train --config …"),
        ("stray", f"allowed: {', '.join(COMMANDS)}"),
    ],
)
def test_an_unknown_command_is_answered_with_the_one_that_is_meant(word, said, capsys):
    assert main([word, "--lr", "1"]) == 2
    assert capsys.readouterr().err == f"slime-launch: unknown command {word}; {said}\n"


@pytest.mark.parametrize("text", MEANT.values())
def test_every_answer_to_an_unknown_command_is_a_command_that_there_is(text):
    program, word, *flags = text.partition(",")[0].split()
    if program == "slime-launch" and not word.startswith("--"):
        assert word in COMMANDS
        assert flags[:2] != ["NAME", "--from"] or find_recipe(flags[2])
        groups = train_groups()
        parsed = parse_all(groups, build_parser(groups, prog="p", description=""), flags if word != "new" else [])
        assert [line for line in parsed.problems if not line.startswith("missing ")] == []
    elif program == "slime-convert" and not word.startswith("--"):
        assert word in [command.name for command in CONVERT_COMMANDS]


def test_no_answer_is_hidden_by_a_command_or_another_answer():
    words = [word for row in MEANT for word in row]
    assert len(words) == len({*words, *COMMANDS}) - len(COMMANDS)


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


@pytest.mark.parametrize(
    ("words", "file", "is_said"),
    [
        ("--num-rollout 3", "", True),
        ("--num-rollout=3", "", True),
        ("", "num_rollout = 3", True),
        ("--num-rollout 0", "num_rollout = 3", False),
        ("--num-rollout 0", "", False),
        ("", "", False),
    ],
)
def test_eval_says_that_a_number_of_rollouts_has_no_effect(words, file, is_said, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(train, "train", lambda argv, notes=(): seen.append((argv[-2:], list(notes))) or 0)
    (tmp_path / "run.toml").write_text(file)
    assert main(["eval", *words.split(), "--config", str(tmp_path / "run.toml")]) == 0
    said = ["no effect, as the run only evaluates: --num-rollout"]
    assert seen == [(["--num-rollout", "0"], said if is_said else [])]


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
