"""Groups of a simulated run: which are begun when, and which are trained on."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np
import simpy

from slime_launch.plan.fleet import Response, SimulatedFleet
from slime_launch.plan.profile import Profile
from slime_launch.plan.setup import Setup

Group: TypeAlias = list[Response]


class GroupFlow:
    """Which groups are in flight, and which are trained on: the rules of `slime_rollout.collect.Collector`."""

    def __init__(self, env: simpy.Environment, profile: Profile, setup: Setup, fleet: SimulatedFleet) -> None:
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
        stale = [group for group in self.ready if self._is_stale(group)]
        self.ready = deque(group for group in self.ready if not self._is_stale(group))
        self._begin(stale)
        self._start()
        self._complete()
        return complete

    def take(self, number: int) -> None:
        """A group is finished and scored."""
        group = self.running.pop(number)
        if self._profile.dropped and self._numbers.random() < self._profile.dropped:
            self.dropped += 1
        elif self._is_stale(group):
            self._begin([group])
        else:
            self.ready.append(group)
        self._start()
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
            self._start()
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

    def _start(self) -> None:
        """Begin as many groups as may be started: those that were given back first."""
        self._begin([self._buffer.popleft() if self._buffer else self._new() for _ in range(self._room())])

    def _begin(self, groups: list[Group]) -> None:
        """Hand groups to the engines; what was generated for a stale one is forgotten."""
        if not groups:
            return
        for group in filter(self._is_stale, groups):
            self.repeated += len(group)
            for response in group:
                response.begin_anew()
        self._fleet.add((one for group in groups for one in group if not one.is_done), self._env.now)
        for group in groups:
            left = sum(not response.is_done for response in group)
            if left:
                self.running[group[0].group], self.unfinished[group[0].group] = group, left
            else:  # it is there already
                self.ready.append(group)
        self.wake()

    def wake(self) -> None:
        """Let the engines look again for something to do, if they wait."""
        if self.changed is not None:
            self.changed.succeed()
            self.changed = None

    def _new(self) -> Group:
        count = self._setup.samples
        if len(self._drawn) < count:
            self._drawn.extend(self._profile.draw(count * 4096, self._numbers, self._setup.longest))
        number, self.started = self.started, self.started + 1
        return [Response(number, length, float(length)) for length in (self._drawn.popleft() for _ in range(count))]

    def _is_stale(self, group: Group) -> bool:
        most = self._setup.most_stale
        return most is not None and any(0 <= one.version < self._version - most for one in group)
