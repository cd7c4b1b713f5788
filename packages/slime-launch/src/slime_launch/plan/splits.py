"""Other ways to run a command on the same number of GPUs: who has how many, and how far ahead is generated."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence

from slime_core.errors import ConfigError
from slime_launch.config import Settings
from slime_launch.derived import global_batch_size
from slime_launch.errors import ProfileError
from slime_launch.parser import without
from slime_launch.plan.profile import Profile
from slime_launch.plan.setup import setup_of
from slime_launch.plan.simulate import SimulatedRun, simulate

BUFFERS = (None, 1, 2, 4)
MOST_SPLITS = 9
MOST_STEPS, LEAST_STEPS, SAMPLES = 200, 16, 100_000
"""Rollouts of a simulation: as many as have so many samples together, within these bounds."""
AS_GOOD = 0.02
"""Ways whose throughput differs by less are equally fast; the freshest of those is best."""
CHANGED = (
    *("--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus", "--rollout-max-num-gpus", "--colocate"),
    *("--offload", "--offload-train", "--offload-rollout", "--no-offload-train", "--no-offload-rollout"),
    "--async-buffer-size",
)
NOT_AHEAD = ("--over-sampling-batch-size", "--partial-rollout", "--mask-offpolicy-in-partial-rollout")
"""Flags that a run which generates ahead cannot have."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedWay:
    """One way to run the command, and what came of it.

    Attributes:
        rollout_gpus: GPUs that generate; with ``shared`` the same that train.
        ahead: ``--async-buffer-size``; ``None`` without.
    """

    actor_gpus: int
    rollout_gpus: int
    shared: bool
    ahead: int | None
    is_own: bool
    outcome: SimulatedRun


def try_ways(
    profile: Profile,
    settings: Settings,
    *,
    gpus_per_node: int,
    on_way: Callable[[int, int], None] = lambda done, total: None,
) -> list[PlannedWay]:
    """Simulate the command and its other ways; ``on_way`` hears how many are done, and of how many.

    Raises:
        ProfileError: The profile does not fit the command, or the command does not generate and train.
    """
    _check(profile, settings)
    samples = settings.rollout.selection.rollout_batch_size * settings.samples_per_prompt
    setup = setup_of(settings.flags(), steps=min(MOST_STEPS, max(LEAST_STEPS, SAMPLES // samples)))
    cluster, own_ahead = settings.cluster, settings.rollout.selection.async_buffer_size
    own = (cluster.actor_gpus, cluster.rollout_gpus, cluster.colocate, own_ahead)
    ways = [own]
    for actor, rollout in _splits(settings, gpus_per_node):
        buffers = sorted({one for one in (*BUFFERS, own_ahead) if one is not None})
        ways += [(actor, rollout, False, ahead) for ahead in (None, *buffers)]
    if profile.loop.hand_over_seconds is not None and not cluster.colocate:
        total = cluster.actor_gpus + cluster.rollout_gpus
        if _trains_on(settings, total, gpus_per_node):
            ways.append((total, total, True, None))
    found: list[PlannedWay] = []
    ways = list(dict.fromkeys(ways))
    for way in ways:
        on_way(len(found), len(ways))
        actor, rollout, shared, ahead = way
        changed = dataclasses.replace(
            setup,
            actor_gpus=actor,
            engines=max(1, rollout // settings.engine.rollout_num_gpus_per_engine),
            ahead=ahead,
            in_flight=None if ahead is not None else setup.in_flight,
            partial=ahead is None and setup.partial,
            hands_over=setup.hands_over if way[:3] == own[:3] else shared,
        )
        outcome, is_own = simulate(profile, changed), way == own
        found.append(
            PlannedWay(
                actor_gpus=actor, rollout_gpus=rollout, shared=shared, ahead=ahead, is_own=is_own, outcome=outcome
            )
        )
    return found


def best_of(ways: Sequence[PlannedWay]) -> PlannedWay:
    """The fastest; of those that are about as fast, the one with the freshest samples, then the command's own."""
    fastest = max(way.outcome.samples_per_second for way in ways)
    good = [way for way in ways if way.outcome.samples_per_second >= (1 - AS_GOOD) * fastest]
    return min(good, key=lambda way: (round(way.outcome.mean_staleness, 1), not way.is_own, way.ahead or 0))


def command_of(way: PlannedWay, words: Sequence[str], *, gpus_per_node: int) -> str:
    """The command that runs it so, for a shell."""
    kept = list(words) if way.is_own else [*without(words, _gone(way)), *_flags_of(way, gpus_per_node)]
    return shlex.join(["slime-launch", "train", *kept])


def in_config_file(way: PlannedWay, origins: Mapping[str, str]) -> list[str]:
    """Flags of the file of ``--config`` that must go for this way: a command line cannot take them back."""
    gone = () if way.is_own else [name for name in _gone(way) if name not in _flags_of(way, 1)]
    dests = ((name, name.removeprefix("--").replace("-", "_")) for name in gone)
    return [name for name, dest in dests if origins.get(dest) == "config file"]


def _check(profile: Profile, settings: Settings) -> None:
    if not settings.kind.sends or settings.kind.only_evaluates:
        raise ProfileError("--simulate is about runs that generate and train, and this command does not do both")
    if settings.rollout.rollout_function is not None or settings.engine.rollout_external_engine_addrs:
        raise ProfileError(
            "--simulate knows slime's own rollouts on its own engines; leave out --rollout-function-path and "
            "--rollout-external-engine-addrs"
        )
    gpus = settings.engine.rollout_num_gpus_per_engine
    if gpus != profile.engine.gpus:
        raise ProfileError(
            f"the profile is of engines of {profile.engine.gpus} GPUs, and --rollout-num-gpus-per-engine is {gpus}; "
            "give the same, or a profile of such engines"
        )
    if not settings.cluster.rollout_gpus:
        raise ProfileError("nothing says how many GPUs generate; give --rollout-num-gpus or --colocate")
    if settings.kind.hands_over and profile.loop.hand_over_seconds is None:
        raise ProfileError(
            "the profile has no loop.hand_over_seconds, which this command needs (--colocate, --offload-…); add it, or "
            "take the profile of such a run"
        )


def _splits(settings: Settings, gpus_per_node: int) -> list[tuple[int, int]]:
    """GPUs that train and that generate: the possible splits, at most some, evenly spread."""
    cluster, size = settings.cluster, settings.engine.rollout_num_gpus_per_engine
    total = cluster.actor_gpus if cluster.colocate else cluster.actor_gpus + cluster.rollout_gpus
    found = [
        (total - rollout, rollout)
        for rollout in range(size, total, size)
        if _trains_on(settings, total - rollout, gpus_per_node)
    ]
    if len(found) <= MOST_SPLITS:
        return found
    own = (cluster.actor_gpus, cluster.rollout_gpus)
    places = {round(number * (len(found) - 1) / (MOST_SPLITS - 1)) for number in range(MOST_SPLITS)}
    return [split for place, split in enumerate(found) if place in places or split == own]


def _trains_on(settings: Settings, gpus: int, gpus_per_node: int) -> bool:
    """Whether trainers can have so many: whole nodes, and a batch that is shared out evenly."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        return False
    try:
        return global_batch_size(settings) % settings.megatron.data_parallel_size(gpus) == 0
    except ConfigError:
        return False


def _gone(way: PlannedWay) -> tuple[str, ...]:
    """Flags that this way has otherwise."""
    return CHANGED if way.ahead is None else (*CHANGED, *NOT_AHEAD)


def _flags_of(way: PlannedWay, gpus_per_node: int) -> list[str]:
    nodes = max(1, way.actor_gpus // gpus_per_node)
    words = ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", str(way.actor_gpus // nodes)]
    words += ["--colocate"] if way.shared else ["--rollout-num-gpus", str(way.rollout_gpus)]
    return words + ([] if way.ahead is None else ["--async-buffer-size", str(way.ahead)])
