"""The setup of a simulation, from a command's flags."""

import pytest

from slime_launch.flags import parse_train
from slime_launch.plan.setup import setup_of, sleeps

COMMAND = (
    "--hf-checkpoint hf --load hf --prompt-data p --num-rollout 20 --rollout-batch-size 8 --n-samples-per-prompt 2 "
    "--actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2"
)


def flags_of(*more):
    return parse_train([*COMMAND.split(), *more]).flags()


def test_engines_are_those_of_the_gpus_that_generate_and_steps_no_more_than_the_run_has():
    apart = setup_of(flags_of("--rollout-num-gpus", "6"), steps=100)
    assert (apart.actor_gpus, apart.engines, apart.steps, apart.hands_over) == (4, 3, 20, False)
    shared = setup_of(flags_of("--colocate"), steps=10)
    assert (shared.engines, shared.steps, shared.hands_over) == (2, 10, True)


def test_what_is_not_done_has_no_interval():
    """Nothing is saved without --save, and nothing evaluated without held-out prompts."""
    bare = setup_of(flags_of("--rollout-num-gpus", "2"), steps=1)
    assert (bare.save_interval, bare.evaluate_interval) == (None, None)
    given = ("--save", "s", "--save-interval", "5", "--eval-prompt-data", "e", "--eval-interval", "4")
    found = setup_of(flags_of("--rollout-num-gpus", "2", *given), steps=1)
    assert (found.save_interval, found.evaluate_interval) == (5, 4)


@pytest.mark.parametrize(("more", "halves"), [((), (True, True)), (("--no-offload-rollout",), (True, False))])
def test_a_half_sleeps_unless_the_command_says_that_it_does_not(more, halves):
    flags = flags_of("--colocate", *more)
    assert (sleeps(flags, "train"), sleeps(flags, "rollout")) == halves
