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
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

import numpy as np
import simpy

from slime_launch.plan.fleet import Fleet, Response, Scorers, lengths_of
from slime_launch.plan.profile import Profile

Group: TypeAlias = list[Response]
Process: TypeAlias = Generator[simpy.Event, Any, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a command says of a run, as far as its speed goes.

    Attributes:
        engines: How many there are.
        prompts: Groups that a rollout is trained on, each of ``samples`` responses.
        steps: Rollouts that are simulated.
        optimizer_steps: Of each rollout.
        in_flight: Groups in flight for a rollout (``--over-sampling-batch-size``).
        ahead: Rollouts generated ahead (``--async-buffer-size``); ``None`` in a run that takes turns.
        most_stale: Most versions between a token and its training (``--max-weight-staleness``).
        longest: Most tokens of a response.
        concurrency: Most responses in flight.
        hands_over: Whether trainers and engines give each other the GPUs.
    """

    actor_gpus: int
    engines: int
    prompts: int
    samples: int
    steps: int
    optimizer_steps: int = 1
    in_flight: int | None = None
    partial: bool = False
    ahead: int | None = None
    most_stale: int | None = None
    update_interval: int = 1
    save_interval: int | None = None
    evaluate_interval: int | None = None
    longest: int | None = None
    concurrency: int = 2**62
    hands_over: bool = False
    seed: int = 1


def setup_of(flags: Mapping[str, Any], *, steps: int) -> Setup:
    """The setup of a run's flags by their names in Python, such as `Settings.flags`, for at most so many steps."""
    actor = flags["actor_num_nodes"] * flags["actor_num_gpus_per_node"]
    rollout = flags["rollout_num_gpus"] or actor
    return Setup(
        actor_gpus=actor,
        engines=max(1, rollout // flags["rollout_num_gpus_per_engine"]),
        prompts=flags["rollout_batch_size"],
        samples=flags["n_samples_per_prompt"],
        steps=max(1, min(steps, flags["num_rollout"] or steps)),
        optimizer_steps=flags["num_steps_per_rollout"],
        in_flight=flags["over_sampling_batch_size"],
        partial=flags["partial_rollout"],
        ahead=flags["async_buffer_size"],
        most_stale=flags["max_weight_staleness"],
        update_interval=flags["update_weights_interval"],
        save_interval=flags["save_interval"] if flags["save"] is not None else None,
        evaluate_interval=flags["eval_interval"] if flags["eval_prompt_data"] or flags["eval_config"] else None,
        longest=flags["rollout_max_response_len"],
        concurrency=flags["rollout_concurrency"],
        hands_over=sleeps(flags, "train") or sleeps(flags, "rollout"),
    )


def sleeps(flags: Mapping[str, Any], half: str) -> bool:
    """Whether trainers (``train``) or engines (``rollout``) give their memory back while the others work."""
    asked = flags["colocate"] or flags["offload"] or flags[f"offload_{half}"]
    return bool(asked and not flags[f"no_offload_{half}"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """What a simulated run did.

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

    @property
    def steps_per_hour(self) -> float:
        """Steps, after the first quarter."""
        first = len(self.ends) // 4
        begin = self.ends[first - 1] if first else 0.0
        return 3600 * (len(self.ends) - first) / max(self.ends[-1] - begin, 1e-12)


def simulate(profile: Profile, setup: Setup) -> SimulatedRun:
    """Simulate a run to its end."""
    return _Run(profile, setup).outcome()


class _Collector:
    """Which groups are in flight, and which are trained on: the rules of `slime_rollout.collect.Collector`."""

    def __init__(self, env: simpy.Environment, profile: Profile, setup: Setup, fleet: Fleet) -> None:
        self._env, self._profile, self._setup, self._fleet = env, profile, setup, fleet
        self._numbers = np.random.default_rng(setup.seed)
        self._drawn: deque[int] = deque()
        self._buffer: deque[Group] = deque()
        self.running: dict[int, Group] = {}
        self.unfinished: dict[int, int] = {}  # responses of each group that are being generated
        self.scored: deque[tuple[float, int]] = deque()  # groups that will be scored, and when, in that order
        self.ready: deque[Group] = deque()
        self._version = 0
        self._is_waiting = False
        self._is_complete: simpy.Event | None = None
        self.changed: simpy.Event | None = None
        self.started = self.dropped = self.repeated = 0

    def collect(self, version: int) -> simpy.Event:
        """Begin to wait for the groups that are trained from ``version``; the event has them."""
        self._version, self._is_waiting = version, True
        self._is_complete = complete = self._env.event()
        aged = [group for group in self.ready if self._age(group) > self._most_stale]
        if aged:
            self.ready = deque(group for group in self.ready if self._age(group) <= self._most_stale)
            for group in aged:
                self._again(group)
        self._start(self._room())
        self._complete()
        return complete

    def take(self, number: int) -> None:
        """A group is finished and scored."""
        group = self.running.pop(number)
        if self._profile.dropped and self._numbers.random() < self._profile.dropped:
            self.dropped += 1
        elif self._age(group) > self._most_stale:
            self._again(group)
        else:
            self.ready.append(group)
        self._start(self._room())
        self._complete()

    @property
    def left(self) -> int:
        """Groups that were begun and are not trained on."""
        return len(self.running) + len(self.ready) + len(self._buffer)

    def _complete(self) -> None:
        """Give the groups out if there are enough, and look ahead, or give back what is left."""
        wanted = self._setup.prompts
        if self._is_complete is None or len(self.ready) < wanted:
            return
        groups = [self.ready.popleft() for _ in range(wanted)]
        self._is_complete.succeed(groups)
        self._is_complete, self._is_waiting = None, False
        self._version += 1
        if self._setup.ahead is not None:
            self._start(self._room())
        else:
            self._give_back()

    def _give_back(self) -> None:
        """What is in flight or left over waits for the next rollout; cut off, or as far as it is finished."""
        if not self.running and not self.ready:
            return
        self._fleet.cut_off(self._env.now)
        back = [*self.ready, *self.running.values()]
        for group in self.running.values():
            for response in group:
                if not response.is_done and not self._setup.partial:
                    response.begin_anew()
        for waiting in (self.ready, self.running, self.unfinished, self.scored):
            waiting.clear()
        self._buffer.extend(sorted(back, key=lambda group: group[0].group))

    def _room(self) -> int:
        """As many groups as may be started (`Collector._wanted`, `_rollouts_ahead`)."""
        have, wanted, setup = len(self.ready) + len(self.running), self._setup.prompts, self._setup
        if setup.ahead is None:
            if not self._is_waiting or have >= wanted:
                return 0
            return (setup.in_flight or wanted) - have
        ahead = setup.ahead
        if setup.most_stale is not None:
            bound = setup.most_stale - (setup.update_interval - 1)
            ahead = min(ahead, bound + 1 if self._is_waiting else bound)
        return max(0, wanted * ahead - have)

    def _start(self, count: int) -> None:
        """Begin groups: those that were given back first."""
        groups: list[Group] = []
        for _ in range(count):
            group = self._buffer.popleft() if self._buffer else self._new()
            if self._age(group) > self._most_stale:
                self.repeated += len(group)
                for response in group:
                    response.begin_anew()
            groups.append(group)
        self._begin(groups)

    def _again(self, group: Group) -> None:
        self.repeated += len(group)
        for response in group:
            response.begin_anew()
        self._begin([group])

    def _begin(self, groups: list[Group]) -> None:
        if not groups:
            return
        self._fleet.add((one for group in groups for one in group if not one.is_done), self._env.now)
        for group in groups:
            left = sum(not response.is_done for response in group)
            if left:
                self.running[group[0].group], self.unfinished[group[0].group] = group, left
            else:  # it is there already
                self.ready.append(group)
        if self.changed is not None:
            self.changed.succeed()
            self.changed = None

    def _new(self) -> Group:
        count = self._setup.samples
        if len(self._drawn) < count:
            self._drawn.extend(self._profile.draw(count * 4096, self._numbers, self._setup.longest))
        number, self.started = self.started, self.started + 1
        return [Response(number, length, float(length)) for length in (self._drawn.popleft() for _ in range(count))]

    @property
    def _most_stale(self) -> float:
        return math.inf if self._setup.most_stale is None else self._setup.most_stale

    def _age(self, group: Group) -> int:
        return max((self._version - one.version for one in group if one.version >= 0), default=0)


class _Run:
    """The two processes, and what is counted."""

    def __init__(self, profile: Profile, setup: Setup) -> None:
        self._profile, self._setup = profile, setup
        self._env = simpy.Environment()
        self._fleet = Fleet(
            profile.engine, setup.engines, prompt_tokens=profile.prompt_tokens, concurrency=setup.concurrency
        )
        self._scorers = Scorers(profile.reward_seconds, profile.reward_workers)
        self._groups = _Collector(self._env, profile, setup, self._fleet)
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
            seconds = trainer.seconds(tokens, setup.actor_gpus, setup.optimizer_steps)
            yield env.timeout(seconds)
            self._training += seconds
            done = number + 1
            saves, evaluates = self._is_due(done, setup.save_interval), self._is_due(done, setup.evaluate_interval)
            if done % setup.update_interval == 0 or saves or evaluates:
                self._fleet.pause(env.now)
                yield env.timeout(trainer.send_seconds)
                self._fleet.resume(env.now, done)
                self._wake()
            after = loop.between_seconds
            after += (loop.save_seconds if saves else 0.0) + (loop.evaluate_seconds if evaluates else 0.0)
            yield env.timeout(after)
            self._ends.append(env.now)
            self._tokens.append(tokens)
            self._busy.append((self._training, self._fleet.busy_seconds(env.now)))

    def _is_due(self, done: int, interval: int | None) -> bool:
        return interval is not None and (done % interval == 0 or done == self._setup.steps)

    def _count(self, groups: list[Group], version: int) -> int:
        """Response tokens of a rollout; its ages are added up."""
        ages = [version - response.version for group in groups for response in group]
        self._stale_sum += sum(ages)
        self._stale_most = max(self._stale_most, *ages)
        return sum(map(lengths_of, groups))

    def _wake(self) -> None:
        if self._groups.changed is not None:
            self._groups.changed.succeed()
            self._groups.changed = None

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
