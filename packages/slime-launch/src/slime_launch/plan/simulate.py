"""A run as a discrete-event simulation: when engines generate, trainers train, and who waits for whom.

It has the rules of the run itself: those of the loop (`slime_launch.loop`), and which groups are in flight and which
are trained on (`slime_rollout.collect`). Two processes of simpy take turns: the loop with its trainers, and the engines
with what scores their responses. Engines look ahead to the next thing that somebody else does, so an event of simpy's
is a finished group, not a response, and a run of 512 GPUs takes seconds.

Not in it: that a group's lengths are alike, that a router prefers engines with a prompt in their cache, failures, and
that engines which answer held-out prompts generate more slowly meanwhile.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import Any, TypeAlias

import simpy

from slime_launch.plan.fleet import SimulatedFleet, SimulatedScorers
from slime_launch.plan.groups import Group, GroupFlow
from slime_launch.plan.profile import Profile
from slime_launch.plan.setup import Setup

Process: TypeAlias = Generator[simpy.Event, Any, None]
SLICES = 8
"""Of an optimizer phase: before each is looked whether engines work too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The outcome of a simulated run.

    Rates and shares are of the time after the first quarter of its steps, when it has got going.

    Attributes:
        ends: Seconds from the start to the end of each step.
        samples_per_second: Samples that were trained on.
        tokens_per_second: Response tokens of those.
        trainers_idle: Part of the time in which the trainers do not train (``perf/wait_time_ratio``).
        engines_idle: Part of the engines' time in which they generate nothing.
        mean_staleness: Versions between a sample's oldest token and the weights it trained, in the whole run.
        most_staleness: The largest of those.
        started: Groups that were begun, each counted once.
        trained: Groups that were trained on; ``dropped`` ones were filtered, ``left`` ones were not needed any more.
        repeated: Samples that were generated again because they were too old; ``again`` are those as a part of the
            samples that were trained on.
    """

    ends: list[float]
    steps_per_hour: float
    samples_per_second: float
    tokens_per_second: float
    trainers_idle: float
    engines_idle: float
    mean_staleness: float
    most_staleness: int
    started: int
    trained: int
    dropped: int
    left: int
    repeated: int
    again: float


def simulate(profile: Profile, setup: Setup) -> SimulatedRun:
    """Simulate a run to its end."""
    return _Run(profile, setup).outcome()


class _Run:
    """The two processes, and what is counted."""

    def __init__(self, profile: Profile, setup: Setup) -> None:
        self._profile, self._setup = profile, setup
        self._env = simpy.Environment()
        self._fleet = SimulatedFleet(
            profile.engine, setup.engines, prompt_tokens=profile.prompt_tokens, concurrency=setup.concurrency
        )
        self._scorers = SimulatedScorers(profile.reward_seconds, profile.reward_workers)
        self._groups = GroupFlow(self._env, profile, setup, self._fleet)
        self._ends: list[float] = []
        self._tokens: list[int] = []
        self._busy: list[tuple[float, float]] = []  # seconds that trainers and engines have worked, at each end
        self._trained = self._training = 0.0
        self._stale_sum = self._stale_most = 0

    def outcome(self) -> SimulatedRun:
        """Run it, and add it up."""
        self._env.process(self._engines())
        self._env.run(until=self._env.process(self._loop()))
        setup, first = self._setup, self._setup.steps // 4
        begin = self._ends[first - 1] if first else 0.0
        seconds = max(self._ends[-1] - begin, 1e-12)
        before = self._busy[first - 1] if first else (0.0, 0.0)
        trainers, engines = (now - then for now, then in zip(self._busy[-1], before, strict=True))
        samples = (setup.steps - first) * setup.prompts * setup.samples
        return SimulatedRun(
            ends=self._ends,
            steps_per_hour=3600 * (setup.steps - first) / seconds,
            samples_per_second=samples / seconds,
            tokens_per_second=sum(self._tokens[first:]) / seconds,
            trainers_idle=max(0.0, 1 - trainers / seconds),
            engines_idle=max(0.0, 1 - engines / (seconds * setup.engines)),
            mean_staleness=self._stale_sum / (setup.steps * setup.prompts * setup.samples),
            most_staleness=self._stale_most,
            started=self._groups.started,
            trained=setup.steps * setup.prompts,
            dropped=self._groups.dropped,
            left=self._groups.left,
            repeated=self._groups.repeated,
            again=self._groups.repeated / (setup.steps * setup.prompts * setup.samples),
        )

    def _loop(self) -> Process:
        """`slime_launch.loop.run_loop`."""
        env, loop, trainer, setup = self._env, self._profile.loop, self._profile.trainer, self._setup
        before = loop.prepare_seconds + ((loop.hand_over_seconds or 0.0) if setup.hands_over else 0.0)
        for number in range(setup.steps):
            groups: list[Group] = yield self._groups.collect(number)
            tokens = self._count(groups, number)
            yield env.timeout(before)
            yield from self._train(trainer.seconds(tokens, setup.actor_gpus, setup.optimizer_steps))
            done = number + 1
            saves, evaluates = self._is_due(done, setup.save_interval), self._is_due(done, setup.evaluate_interval)
            if done % setup.update_interval == 0 or saves or evaluates:
                self._fleet.set_rate(env.now, 0.0)
                yield env.timeout(trainer.send_seconds)
                self._fleet.resume(env.now, done)
                self._groups.wake()
            after = loop.between_seconds
            after += (loop.save_seconds if saves else 0.0) + (loop.evaluate_seconds if evaluates else 0.0)
            yield env.timeout(after)
            self._ends.append(env.now)
            self._tokens.append(tokens)
            self._busy.append((self._training, self._fleet.busy_seconds(env.now)))

    def _train(self, seconds: float) -> Process:
        """Train for so long; it and the engines are slower while both work, where the profile says so."""
        env, slowdown = self._env, self._profile.loop.overlap_slowdown
        parts = SLICES if slowdown > 1 and self._setup.ahead is not None else 1
        began = env.now
        for _ in range(parts):
            beside = slowdown if parts > 1 and self._fleet.in_flight else 1.0
            self._set_rate(1 / beside)
            yield env.timeout(seconds / parts * beside)
        self._set_rate(1.0)
        self._training += env.now - began

    def _set_rate(self, rate: float) -> None:
        if self._profile.loop.overlap_slowdown > 1:
            self._fleet.set_rate(self._env.now, rate)
            self._groups.wake()

    def _is_due(self, done: int, interval: int | None) -> bool:
        return interval is not None and (done % interval == 0 or done == self._setup.steps)

    def _count(self, groups: list[Group], version: int) -> int:
        """Response tokens of a rollout; its ages are added up."""
        ages = [version - response.version for group in groups for response in group]
        self._stale_sum += sum(ages)
        self._stale_most = max(self._stale_most, *ages)
        return sum(response.length for group in groups for response in group)

    def _engines(self) -> Process:
        """Generate until a group is scored or somebody else does something, and hand groups over at their time."""
        env, groups, scored = self._env, self._groups, self._groups.scored
        while True:
            limit = env.peek()
            self._generate(limit)
            if scored and scored[0][0] <= limit:
                yield env.timeout(max(0.0, scored[0][0] - env.now))
                groups.take(scored.popleft()[1])
            elif math.isfinite(limit):
                yield env.timeout(limit - env.now)
            else:
                groups.changed = env.event()
                yield groups.changed

    def _generate(self, limit: float) -> None:
        """Finish responses until a group is scored, or until ``limit``: nobody hands others in before."""
        finish, left, scored = self._fleet.finish, self._groups.unfinished, self._groups.scored
        while found := finish(scored[0][0] if scored and scored[0][0] < limit else limit):
            scored_at, number = self._scorers.scored_at(found[0]), found[1].group
            if left[number] > 1:
                left[number] -= 1
            else:
                del left[number]
                scored.append((scored_at, number))
