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


RUN_FILE = "unexpected 'base.toml'; give a run file as --config base.toml"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        *((f"{name} base.toml", RUN_FILE) for name in ("train", "train-async", "sft", "eval", "plan")),
        ("submit --ray-address http://h:1 base.toml", RUN_FILE),
        ("train --lr 1e-5 base.toml", RUN_FILE),
        ("eval --lr 1e-5 base.toml", RUN_FILE),
        ("plan --device h100 base.toml", RUN_FILE),
        ("plan --json base.toml", RUN_FILE),
        ("plan base.toml --device none-such", RUN_FILE),
        ("train Base.YML", "unexpected 'Base.YML'; give a run file as --config Base.YML"),
        ("train run.sh", "unexpected 'run.sh'; `slime-launch migrate run.sh --toml run.toml` makes a run file of"),
        ("sft rows.jsonl", "unexpected 'rows.jsonl'; give rows as --prompt-data rows.jsonl, or held-out ones as"),
        ("sft lr=1e-6", "unexpected 'lr=1e-6'; here it is --lr 1e-6"),
    ],
)
def test_a_file_without_its_flag_is_one_error_that_has_the_flag(words, line, workspace, capsys, monkeypatch):
    monkeypatch.chdir(workspace)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(train, "supervise", None)
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    said = [said for said in err.splitlines() if said.startswith("slime-launch: ")]
    assert len(said) == 1 and said[0].startswith(f"slime-launch: {line}") and not out.strip("{}").count("missing")


def test_a_second_run_file_is_one_too_many(workspace, flags, to_words, capsys, monkeypatch):
    monkeypatch.chdir(workspace)
    (workspace / "run.toml").write_text('rm-type = "math"\n')
    assert main(["plan", "--config", "run.toml", "other.toml", *to_words(flags)]) == 2
    assert "unexpected 'other.toml' after --config; that flag takes no such value" in capsys.readouterr().err


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
