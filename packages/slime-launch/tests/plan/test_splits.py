"""Other ways to run a command on the same GPUs: which are tried, and which is best."""

import shlex

import pytest

from slime_launch.errors import ProfileError
from slime_launch.flags import parse_train
from slime_launch.plan.profile import EngineSpeed, LoopSpeed, Profile
from slime_launch.plan.splits import best_of, command_of, in_config_file, try_ways
from support.simulated_profile import PROFILE, WORDS


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
        command = shlex.split(command_of(way, words, gpus_per_node=8))
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
    assert in_config_file(ahead, settings.origins) == ["--over-sampling-batch-size", "--partial-rollout"]
    assert in_config_file(ways[0], settings.origins) == []


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
