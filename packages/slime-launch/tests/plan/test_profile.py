"""Profiles: their file, what it refuses, and what speeds it says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_launch.errors import ProfileError
from slime_launch.plan.profile import (
    EngineSpeed,
    LoopSpeed,
    Profile,
    TrainerSpeed,
    mean_of,
    read_profile,
    write_profile,
)

ENGINE = EngineSpeed(decode=((2, 20.0), (4, 30.0)), most_running=6)
PROFILE = Profile(
    lengths=((0.0, 10), (0.5, 20), (1.0, 100)),
    engine=ENGINE,
    trainer=TrainerSpeed(gpus=4, token_seconds=0.001, fixed_seconds=0.5, send_seconds=2.0),
    loop=LoopSpeed(hand_over_seconds=3.0),
    notes=("a guess: “half”",),
)
LEAST = """
lengths = [[0, 10], [1, 10]]
[engine]
decode = [[1, 10]]
[trainer]
token_seconds = 0.1
"""


def test_a_profile_is_read_as_it_was_written(tmp_path):
    write_profile(PROFILE, tmp_path / "p.toml")
    assert read_profile(tmp_path / "p.toml") == PROFILE


def test_a_file_may_leave_out_all_that_has_a_default(tmp_path):
    (tmp_path / "p.toml").write_text(LEAST)
    profile = read_profile(tmp_path / "p.toml")
    assert (profile.engine.gpus, profile.loop, profile.reward_workers) == (1, LoopSpeed(), None)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[0, 10], [1, 10]]", "[[0, 10], [0.9, 10]]", "end at part 1"),
        ("[[0, 10], [1, 10]]", "[[0, 10], [1, 5]]", "grow"),
        ("[[0, 10], [1, 10]]", '"long"', "give pairs of numbers"),
        ("[[1, 10]]", "[[1, 0]]", "engine.decode has a speed of 0 or less"),
        ("[[1, 10]]", "[[2, 10], [1, 20]]", "growing"),
        ("[[1, 10]]", "[]", "give pairs of numbers"),
        ("token_seconds = 0.1", "token_seconds = -1", "trainer.token_seconds is -1; give a number of 0 or more"),
        ("token_seconds = 0.1", "", "[trainer] has no token_seconds; give it"),
        ("token_seconds = 0.1", "token_seconds = 1\ntokens = 1", "[trainer] has unknown tokens; known: gpus,"),
        ("lengths", "dropped = 1.0\nlengths", "no group would be left"),
        ("lengths", "reward_workers = 0\nlengths", "reward_workers is 0"),
        ("[engine]", "engine = 3\n[other]", "engine is 3; give a table [engine]"),
        ("[engine]", "[engine", "is not TOML"),
    ],
)
def test_what_a_file_has_wrong_is_said_with_its_name(tmp_path, old, new, said):
    path = tmp_path / "p.toml"
    path.write_text(LEAST.replace(old, new, 1))
    with pytest.raises(ProfileError) as raised:
        read_profile(path)
    assert said in str(raised.value) and str(path) in str(raised.value)


def test_a_file_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(ProfileError, match=r"cannot be read.*slime-launch report RUN --profile FILE writes one"):
        read_profile(tmp_path / "none.toml")


def test_an_engine_is_as_fast_as_its_points_say_and_linear_between_them():
    one, two, three, four, five, six = ENGINE.token_seconds()[1:]
    assert (one, two) == (0.1, 0.1)  # each as fast as at the first point
    assert three == pytest.approx(3 / 25)
    assert (four, five, six) == pytest.approx((4 / 30, 5 / 30, 6 / 30))  # no more in all than at the last


def test_a_trainer_on_more_gpus_is_faster_but_for_the_fixed_part():
    trainer = PROFILE.trainer
    assert trainer.seconds(1000, 4, 1) == 1.5
    assert trainer.seconds(1000, 8, 2) == 1.5


def test_the_mean_length_is_that_of_the_drawn_ones():
    drawn = PROFILE.draw(20_000, np.random.default_rng(0))
    assert mean_of(PROFILE.lengths) == 0.5 * 15 + 0.5 * 60
    assert np.mean(drawn) == pytest.approx(mean_of(PROFILE.lengths), rel=0.02)


@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 9))
def test_lengths_are_within_their_bounds(count, most, seed):
    drawn = PROFILE.draw(count, np.random.default_rng(seed), most)
    assert len(drawn) == count and all(min(10, most) <= one <= min(100, most) for one in drawn)
