"""The help of commands that show a few flags of `train`."""

import pytest

from slime_launch.cli import main


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
