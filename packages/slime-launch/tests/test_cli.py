"""Command lines that are wrong: one error, a line each."""

import pytest

from slime_launch import train
from slime_launch.cli import main

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
