"""What `plan --simulate` prints of a command and its other ways."""

import json

import pytest

from slime_launch.cli import main
from slime_launch.plan.profile import write_profile
from support.simulated_profile import PROFILE, WORDS


@pytest.fixture
def command(flags, workspace, to_words):
    """Runs `plan --simulate` on a good command; gives the words, which know a profile."""
    write_profile(PROFILE, workspace / "p.toml")
    own = ["--simulate", "--profile", str(workspace / "p.toml"), "--picture", str(workspace / "p.png")]
    words = to_words(flags)
    if "--colocate" in words:
        words[words.index("--colocate")] = "--rollout-num-gpus=1"
    return lambda *more: ["plan", *own, *words, *more]


def test_a_table_a_picture_and_the_command_of_the_best(command, workspace, capsys):
    assert main(command()) == 0
    out = capsys.readouterr().out
    assert "this command" in out and "  slime-launch train " in out and "engine.decode: a guess" in out
    assert out.splitlines()[1].split()[:3] == ["train", "generate", "ahead"]
    assert (workspace / "p.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_the_same(command, capsys):
    assert main(command("--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["command"].startswith("slime-launch train ")
    assert {"samples_per_second", "trainers_idle", "engines_idle", "mean_staleness"} <= found["ways"][0].keys()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--picture", "p.gif"], "--picture p.gif must end in .png, .svg or .pdf"),
        (["--picture", "none/p.png"], "--picture none/p.png cannot be written"),
        (["--profile", "none.toml"], "the profile none.toml cannot be read"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_simulated(command, capsys, more, said):
    assert main(command(*more)) == 2
    assert said in capsys.readouterr().err


def test_a_simulation_needs_speeds(capsys):
    assert main(["plan", "--simulate", *WORDS]) == 2
    assert "--simulate needs speeds; add --profile FILE" in capsys.readouterr().err
