"""A small run whose simulation can be worked out by hand."""

import dataclasses

from slime_launch.plan.profile import EngineSpeed, Profile, TrainerSpeed
from slime_launch.plan.setup import Setup
from slime_launch.plan.simulate import simulate

# One response alone gets 10 tokens a second, and any number together no more.
PROFILE = Profile(
    lengths=((0.0, 10), (1.0, 10)),
    engine=EngineSpeed(decode=((1, 10.0),), most_running=100),
    trainer=TrainerSpeed(token_seconds=0.01, fixed_seconds=1.0, send_seconds=0.5),
)


SETUP = Setup(actor_gpus=1, engines=1, prompts=2, samples=2, steps=12)


GENERATE, TRAIN, SEND = 4 * 10 / 10, 1.0 + 40 * 0.01, 0.5


def of(profile=None, setup=None, **changes):
    """A simulation of the case above, with other settings."""
    own = {field.name for field in dataclasses.fields(Setup)}
    setup = dataclasses.replace(setup or SETUP, **{name: value for name, value in changes.items() if name in own})
    others = {name: value for name, value in changes.items() if name not in own}
    return simulate(dataclasses.replace(profile or PROFILE, **others), setup)


def seconds(outcome):
    """Seconds of a step, once it has got going."""
    return 3600 / outcome.steps_per_hour
