"""`plan --simulate`: which ways are tried, which is best, and what is printed of them."""

import json
import shlex

import pytest

from slime_launch.cli import main
from slime_launch.errors import ProfileError
from slime_launch.flags import parse_train
from slime_launch.plan.profile import EngineSpeed, LoopSpeed, Profile, TrainerSpeed, write_profile
from slime_launch.plan.splits import best_of, command_of, in_config_file, try_ways

PROFILE = Profile(
    lengths=((0.0, 5), (0.9, 30), (1.0, 100)),
    engine=EngineSpeed(decode=((1, 30.0), (8, 100.0))),
    trainer=TrainerSpeed(gpus=1, token_seconds=0.05, send_seconds=0.1),
    notes=("engine.decode: a guess",),
)
COMMAND = (
    "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 20 --rollout-batch-size 8 --n-samples-per-prompt 2 "
    "--actor-num-gpus-per-node 2 --rollout-num-gpus 2"
)
WORDS = COMMAND.split()


def ways_of(*more, profile=PROFILE, gpus_per_node=8):
    """The ways of the command above."""
    return try_ways(profile, parse_train([*WORDS, *more]), gpus_per_node=gpus_per_node)


def splits(ways):
    """What was tried: GPUs that train, GPUs that generate, how far ahead."""
    return [(way.actor_gpus, "shared" if way.shared else way.rollout_gpus, way.ahead) for way in ways]


def test_the_command_comes_first_and_then_every_split_with_every_buffer():
    tried = splits(ways_of())
    others = [(1, 3, ahead) for ahead in (None, 1, 2, 4)] + [(2, 2, ahead) for ahead in (1, 2, 4)]
    assert tried[0] == (2, 2, None)
    assert sorted(tried[1:], key=str) == sorted(others, key=str)  # 3 ranks cannot share 16 samples out evenly
    assert splits(ways_of("--async-buffer-size", "3"))[0] == (2, 2, 3)


def test_trainers_have_whole_nodes_and_engines_all_their_gpus():
    more = ("--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4")
    assert {way.actor_gpus for way in ways_of(*more, gpus_per_node=2)} == {4, 2, 1}
    engines = Profile(
        lengths=PROFILE.lengths, trainer=PROFILE.trainer, engine=EngineSpeed(gpus=4, decode=PROFILE.engine.decode)
    )
    found = ways_of(*more, "--rollout-num-gpus-per-engine", "4", profile=engines)
    assert {way.actor_gpus for way in found} == {4}


def test_shared_gpus_are_tried_where_the_hand_over_is_known():
    known = Profile(
        lengths=PROFILE.lengths, trainer=PROFILE.trainer, engine=PROFILE.engine, loop=LoopSpeed(hand_over_seconds=1.0)
    )
    assert (4, "shared", None) in splits(ways_of(profile=known))
    assert splits(ways_of("--colocate", profile=known))[0] == (2, "shared", None)


def test_the_best_is_the_freshest_of_the_fastest():
    ways = ways_of()
    best = best_of(ways)
    fastest = max(way.outcome.samples_per_second for way in ways)
    as_good = [way for way in ways if way.outcome.samples_per_second >= 0.98 * fastest]
    assert best in as_good
    assert best.outcome.mean_staleness <= min(way.outcome.mean_staleness for way in as_good) + 0.1


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--over-sampling-batch-size", "12", "--partial-rollout"),
        ("--rollout-num-gpus=2", "--async-buffer-size=1", "--max-weight-staleness", "2"),
    ],
)
def test_the_command_of_a_way_is_that_way(more):
    words = [*WORDS, *more]
    settings = parse_train(words)
    for way in try_ways(PROFILE, settings, gpus_per_node=8):
        command = shlex.split(command_of(way, words, settings, gpus_per_node=8))
        assert command[:2] == ["slime-launch", "train"]
        again = parse_train(command[2:])
        found = (again.cluster.actor_gpus, again.cluster.rollout_gpus, again.rollout.selection.async_buffer_size)
        assert found == (way.actor_gpus, way.rollout_gpus, way.ahead)
        assert again.rollout.data == settings.rollout.data


def test_flags_of_a_config_file_that_must_go_are_named(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("partial-rollout = true\nover-sampling-batch-size = 12\nrollout-num-gpus = 2\n")
    words = [*WORDS[:-2], "--config", str(path)]
    settings = parse_train(words)
    ways = try_ways(PROFILE, settings, gpus_per_node=8)
    ahead = next(way for way in ways if way.ahead == 1)
    assert in_config_file(ahead, settings) == ["--over-sampling-batch-size", "--partial-rollout"]
    assert in_config_file(ways[0], settings) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--debug-rollout-only",), "generate and train"),
        (("--rollout-num-gpus-per-engine", "2"), "engines of 1 GPUs, and --rollout-num-gpus-per-engine is 2"),
        (("--offload-train",), "the profile has no loop.hand_over_seconds"),
    ],
)
def test_a_command_that_the_profile_does_not_fit_is_refused(more, said):
    with pytest.raises(ProfileError) as raised:
        ways_of(*more)
    assert said in str(raised.value)


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
