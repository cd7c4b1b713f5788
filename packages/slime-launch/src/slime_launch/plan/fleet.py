"""Engines of a simulated run: the responses of each share it, and every one that finishes is an event of its own.

All responses that run on an engine get a token at a time, so an engine is described by how many tokens each of them
has got since it started. A response of n tokens that starts when they have got p is finished when they have got p + n,
however the speed changes in between. So responses are ordered once, when they start.

Engines have a clock of their own, which stands still while they are paused, and is slow while something else
takes a part of the machine. Nothing else has to be touched for that.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Iterable

from slime_launch.plan.profile import EngineSpeed


@dataclasses.dataclass(slots=True, eq=False)
class Response:
    """One sample of a group.

    Attributes:
        group: The number of its group.
        length: Tokens when it is finished.
        left: Tokens that are left of it, as of when it was last handed in or cut off.
        version: Weights that its first token came from; -1 before there is one.
    """

    group: int
    length: int
    left: float = 0.0
    version: int = -1
    is_done: bool = False

    def begin_anew(self) -> None:
        """Forget what was generated."""
        self.left, self.version, self.is_done = float(self.length), -1, False


class _Engine:
    """Responses that run on one engine, by the progress at which they are finished, and those that wait there."""

    __slots__ = ("busy", "clock", "number", "progress", "running", "stamp", "waiting")

    def __init__(self, number: int) -> None:
        self.number = number
        self.running: list[tuple[float, int, Response]] = []
        self.waiting: deque[Response] = deque()
        self.progress = self.clock = self.busy = 0.0
        self.stamp = 0  # of the last change: an event that was foreseen before is void


class SimulatedFleet:
    """All engines. Times are in seconds; those of events never go back.

    A response goes to the engine with the fewest. ``concurrency`` responses are in flight at most, others wait for one
    to be finished (``--rollout-concurrency``).
    """

    def __init__(self, speed: EngineSpeed, count: int, *, prompt_tokens: int = 0, concurrency: int = 2**62) -> None:
        self._token_seconds = speed.token_seconds()
        self._most = speed.most_running
        rate = speed.prefill_tokens_per_second
        self._prefill = 0.0 if rate is None else 1.0 / rate
        self._prompt = prompt_tokens
        self._engines = [_Engine(number) for number in range(count)]
        self._loads = [0] * count
        self._events: list[tuple[float, int, int]] = []
        self._outside: deque[Response] = deque()
        self._concurrency, self._in_flight, self._serial = concurrency, 0, 0
        self._rate, self._since, self._clock_since = 1.0, 0.0, 0.0  # of the clock, and when it had what since then
        self._busy, self._busy_clock = 0.0, 0.0  # seconds until then, of all engines, and the same by the clock
        self.version = 0

    @property
    def in_flight(self) -> int:
        """Responses that are not finished, those that wait outside included."""
        return self._in_flight + len(self._outside)

    def add(self, responses: Iterable[Response], now: float) -> None:
        """Hand in responses, in their order."""
        self._outside.extend(responses)
        loads = sorted(zip(self._loads, range(len(self._loads)), strict=True))  # which is a heap
        changed: dict[int, None] = {}
        clock = self._clock(now)
        while self._outside and self._in_flight < self._concurrency:
            load, number = loads[0]
            heapq.heapreplace(loads, (load + 1, number))
            self._hand(self._engines[number], self._outside.popleft(), clock)
            changed[number] = None
        for number in changed:
            self._foresee(self._engines[number])

    def finish(self, limit: float) -> tuple[float, Response] | None:
        """The next response that is finished and when, if not after ``limit``; one that waits takes its place."""
        events, engines = self._events, self._engines
        if not self._rate:  # in a pause
            return None
        while events and engines[events[0][1]].stamp != events[0][2]:
            heapq.heappop(events)
        if not events or self._time(events[0][0]) > limit:
            return None
        at, number, stamp = events[0]
        engine = engines[number]
        engine.busy += at - engine.clock
        engine.progress, _, response = heapq.heappop(engine.running)
        engine.clock = at
        self._in_flight -= 1
        self._loads[number] -= 1
        response.is_done, response.left = True, 0.0
        if engine.waiting:
            self._begin(engine, engine.waiting.popleft())
        if self._outside:
            self._hand(engine, self._outside.popleft(), at)
        if running := engine.running:  # what is foreseen takes the place of what came
            after = (running[0][0] - engine.progress) * self._token_seconds[len(running)]
            heapq.heapreplace(events, (engine.clock + after, number, stamp))
        else:
            heapq.heappop(events)
        return self._time(at), response

    def set_rate(self, now: float, rate: float) -> None:
        """Generate at this part of the usual speed from now on; at 0 not at all."""
        clock = self._clock(now)
        self._busy, self._busy_clock = self.busy_seconds(now), self._busy_at(clock)
        self._rate, self._since, self._clock_since = rate, now, clock

    def resume(self, now: float, version: int) -> None:
        """Go on with new weights; keys and values of what runs are computed again (``retract``)."""
        self.set_rate(now, 1.0)
        self.version = version
        if self._prefill:
            clock = self._clock(now)
            for engine in self._engines:
                if engine.running:
                    self._bring_to(engine, clock)
                    engine.clock += self._prefill * sum(
                        self._prompt + one.length - (at - engine.progress) for at, _, one in engine.running
                    )
                    self._foresee(engine)

    def cut_off(self, now: float) -> None:
        """Stop everything; responses know what is left of them, and those that never began are as they were."""
        clock = self._clock(now)
        for engine in self._engines:
            self._bring_to(engine, clock)
            for at, _, response in engine.running:
                response.left = at - engine.progress
            engine.running.clear()
            engine.waiting.clear()
            engine.stamp += 1
        self._events.clear()
        self._outside.clear()
        self._loads = [0] * len(self._loads)
        self._in_flight = 0

    def busy_seconds(self, now: float) -> float:
        """Seconds in which an engine generated until now, of all engines together."""
        if not self._rate:
            return self._busy
        return self._busy + (self._busy_at(self._clock(now)) - self._busy_clock) / self._rate

    def _busy_at(self, clock: float) -> float:
        return sum(
            engine.busy + (max(0.0, clock - engine.clock) if engine.running else 0.0) for engine in self._engines
        )

    def _clock(self, now: float) -> float:
        """The engines' own time."""
        return self._clock_since + (now - self._since) * self._rate

    def _time(self, clock: float) -> float:
        """When the engines' own time is that; not in a pause."""
        return self._since + (clock - self._clock_since) / self._rate

    def _bring_to(self, engine: _Engine, clock: float) -> None:
        if clock <= engine.clock:  # it computes prompts until then
            return
        if running := engine.running:
            engine.busy += clock - engine.clock
            progress = engine.progress + (clock - engine.clock) / self._token_seconds[len(running)]
            engine.progress = min(progress, running[0][0])  # rounding never passes the one that is finished next
        engine.clock = clock

    def _hand(self, engine: _Engine, response: Response, clock: float) -> None:
        self._in_flight += 1
        self._loads[engine.number] += 1
        self._bring_to(engine, clock)
        if len(engine.running) < self._most:
            self._begin(engine, response)
        else:
            engine.waiting.append(response)

    def _begin(self, engine: _Engine, response: Response) -> None:
        """Compute its prompt, and what it had of its response; others on the engine wait for that."""
        self._serial += 1
        heapq.heappush(engine.running, (engine.progress + response.left, self._serial, response))
        if response.version < 0:
            response.version = self.version
        if self._prefill:
            seconds = self._prefill * (self._prompt + response.length - response.left)
            engine.clock += seconds
            engine.busy += seconds

    def _foresee(self, engine: _Engine) -> None:
        engine.stamp += 1
        if running := engine.running:
            at = engine.clock + (running[0][0] - engine.progress) * self._token_seconds[len(running)]
            heapq.heappush(self._events, (at, engine.number, engine.stamp))


class SimulatedScorers:
    """Scores responses in the order in which they are finished, a number of them at a time."""

    def __init__(self, seconds: float, workers: int | None) -> None:
        self._seconds = seconds
        self._free: list[float] | None = None if workers is None or not seconds else [0.0] * workers

    def scored_at(self, finished: float) -> float:
        """When a response is scored that is finished now; to be asked in the order of time."""
        if self._free is None:
            return finished + self._seconds
        at = max(finished, self._free[0]) + self._seconds
        heapq.heapreplace(self._free, at)
        return at
