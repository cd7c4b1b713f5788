"""Fault tolerance: a thread that replaces engines and the router where they die or hang.

What a slot goes through:

    answers ──▶ dead or silent ──▶ killed ──▶ restarted ──▶ answers ──▶ has the current ──▶ registered
                (out of the router)                                     weights

An engine is in the router exactly while it answers and has the weights of the last confirmed update. The weights come
from the caller, who sends them to the engines that are ``behind``, and then confirms the update.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NoReturn

from slime_core.errors import SlimeError
from slime_rollout.engine import EngineError, EngineRestartsError, NoRoomError, PortInUseError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.router import OFFER_SECONDS
from slime_rollout.engine.server import ServingProcess, SGLangEngine
from slime_rollout.engine.slots import AS_STARTED, EngineSlot, Event, EventLog, Occupant, Probe, RouterSlot, Slot
from slime_rollout.http import INCOMPLETE, HttpError, call

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
START_POLL_SECONDS = 0.5
START_TIMEOUT_SECONDS = 10.0
PROBE_AGAIN_SECONDS = 0.5
# Another program has a port that cannot be changed, perhaps for a moment.
PORT_AGAIN_SECONDS = 5.0
# An engine's node is gone, and another one may join.
ROOM_AGAIN_SECONDS = 2.0
# The only path that an engine answers while its generation is paused for new weights.
PAUSED_HEALTH_PATH = "/health"
# The router's list is read so often while an engine is missing there, and else.
TRY_SECONDS, LOOK_SECONDS = 0.5, 5.0
# The router tries an engine that hangs for twice as long as one that refuses connections.
OFFER_AGAIN_SECONDS = 2.0 * OFFER_SECONDS
# A proxy before the router may answer for it while it restarts; the router itself refuses for good.
REFUSED_SECONDS = 30.0

Wanted = Mapping[str, Occupant[SGLangEngine]]
"""By address, the engines that should get requests."""


class Registry:
    """The router's list of engines. Used by the monitor's thread only, except :attr:`next_look`."""

    def __init__(
        self, engines: Sequence[EngineSlot], router: RouterSlot, note: Callable[[Slot[Any], Event, str], None]
    ) -> None:
        self._engines, self._router, self._note = engines, router, note
        # When to look next if no engine is missing; 0 as soon as possible. Set under the monitor's lock.
        self.next_look = self._next_try = 0.0
        self.offered: dict[str, float] = {}  # engines that the router does not list yet → when they were offered
        self._refused_since: float | None = None
        self._last_warning = ""

    def is_due(self, wanted: Wanted) -> bool:
        """Whether to look now: often while an engine is missing, else now and then. Called under the lock.

        A :attr:`next_look` of 0 from here on causes another look, also while this one is under way.
        """
        now = time.monotonic()
        if now < (self.next_look if all(occupant.in_router for occupant in wanted.values()) else self._next_try):
            return False
        self._next_try, self.next_look = now + TRY_SECONDS, now + LOOK_SECONDS
        return True

    def take_out(self, url: str) -> None:
        """Remove an engine from the router now, without waiting for the next look."""
        if self._router.now.up:
            try:
                self._router.process.remove_worker(url)
            except HttpError as error:
                logger.warning("the router may still send requests to %s: %s", url, error)

    def register(self, wanted: Wanted) -> None:
        """Have the router list ``wanted`` alone; an `EngineError` if it has refused that for REFUSED_SECONDS."""
        router = self._router.process
        try:
            known = router.workers()
            for url in known.keys() - wanted.keys():
                router.remove_worker(url)
            self._offer({url: occupant for url, occupant in wanted.items() if url not in known})
        except HttpError as error:
            self._failed(error)
            self.next_look = 0.0
            return
        self._refused_since, self._last_warning = None, ""
        for slot in self._engines:
            was, slot.now.in_router = slot.now.in_router, slot.now.in_router and slot.url in wanted
            if not was and slot.url in wanted and known.get(slot.url, ("", False))[1]:
                slot.now.in_router = True
                self._note(slot, Event.REGISTERED, f"with weights {slot.now.weights}")

    def _failed(self, error: HttpError) -> None:
        """Another look may succeed, unless the router refuses; each reason is logged once while it lasts."""
        now = time.monotonic()
        if error.may_pass:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > REFUSED_SECONDS:
            raise EngineError(
                f"the router {self._router.url} refuses this run's engines: {error}; see that it is an sglang-router "
                "that accepts workers from this machine"
            ) from error
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            logger.warning("the router's engines cannot be checked: %s", error)

    def _offer(self, missing: Wanted) -> None:
        """Offer engines to the router, each only once while it may be trying: one of them may hang unnoticed."""
        now = time.monotonic()
        self.offered = {
            url: since for url, since in self.offered.items() if url in missing and now - since < OFFER_AGAIN_SECONDS
        }
        for url in missing.keys() - self.offered.keys():
            self._router.process.offer_worker(url, missing[url].process.spec.router_role)
            self.offered[url] = now


class FleetMonitor:
    """Watches a fleet that is up and in the router, and repairs it. All methods may be called from any thread.

    A process that has ended is noticed within a second of the end of its whole tree, and one that hangs within
    ``rollout_health_check_interval`` plus ``rollout_health_check_timeout``; a few seconds later where another failure
    holds the thread up.
    """

    def __init__(
        self, engines: Sequence[EngineSlot], router: RouterSlot, config: EngineConfig, events: EventLog
    ) -> None:
        self._engines = list(engines)
        self._router = router
        self._config = config
        self._note = events.write
        self._slots: list[Slot[Any]] = [*engines] if router.is_external else [*engines, router]
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure: SlimeError | None = None
        self._weights = AS_STARTED
        self._updating: list[Occupant[Any]] | None = None
        self._updates = 0
        self._asleep = self._full = False  # whether engines cannot generate, and whether there is no memory for others
        self._faults = self._faults_before_update = 0
        self._ask_all_since = 0.0
        self._registry = Registry(engines, router, events.write)
        self._pool = ThreadPoolExecutor(2 * len(self._slots), thread_name_prefix="engine-health")
        self._thread = threading.Thread(target=self._run, name="engine-monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._router.now.up = True
        for slot in self._slots:
            if not slot.now.has_no_room:
                slot.now.up = True
                slot.now.due = time.monotonic() + self._config.rollout_health_check_first_wait
        for engine in self._engines:
            engine.now.in_router = engine.now.up
        self._thread.start()

    def stop(self) -> None:
        """End watching; nothing is restarted afterwards. Does nothing the second time."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check(self) -> None:
        """As :meth:`Fleet.check`."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)  # it is raised many times

    def behind(self) -> list[str]:
        """As :meth:`Fleet.engines_behind`."""
        with self._lock:
            return [] if self._updating is not None else [slot.url for slot in self._behind()]

    def not_serving(self) -> list[str]:
        """As :meth:`Fleet.not_serving`."""
        lost = [
            slot.name for slot in self._engines if not (slot.now.in_router or (slot.spare and slot.now.has_no_room))
        ]
        return lost if self._router.now.up else [*lost, self._router.name]

    def serves(self) -> bool:
        """As :meth:`Fleet.serves`."""
        return any(slot.now.in_router for slot in self._engines)

    def begin_update(self, *, only_behind: bool) -> list[str]:
        """As :meth:`Fleet.begin_update`; until the update ends, no engine enters the router."""
        self.check()
        while True:
            with self._lock:
                slots = self._behind() if only_behind else [slot for slot in self._engines if slot.now.up]
                occupants = [slot.now for slot in slots]
                if occupants:
                    self._updating = occupants
                    self._updates += 1
                    self._faults_before_update = self._faults
                if occupants or only_behind:
                    return [occupant.process.url for occupant in occupants]
            self._wait()

    def confirm_update(self, version: int) -> None:
        """The engines of the last :meth:`begin_update` enter the router; those that came up meanwhile are behind."""
        with self._lock:
            updated, self._updating = self._updating or [], None
            for occupant in updated:
                occupant.weights = str(version)
            self._weights = str(version)
            self._registry.next_look = 0.0
            for slot in self._engines:
                if slot.now in updated and slot.now.up and not slot.now.in_router:
                    self._note(slot, Event.WEIGHTS, f"version {version}")

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """As :meth:`Fleet.fail_update`: checks every engine, and replaces ``silent`` even if they pass."""
        with self._lock:
            for occupant in self._updating or ():
                occupant.weights = INCOMPLETE
                occupant.silent = occupant.process.url in silent
            self._updating = None
            self._registry.next_look = 0.0
            since = self._ask_all_since = time.monotonic()
        while any(slot.now.up and slot.now.checked < since for slot in self._engines):
            self._wait()
        self.check()
        return self._faults > self._faults_before_update

    def begin_sleep(self) -> None:
        """As :meth:`Fleet.begin_sleep`: what dies from here on is replaced when the engines wake."""
        while not all(slot.now.up or slot.now.no_successor or slot.now.has_no_room for slot in self._engines):
            self._wait()
        with self._lock:
            self._asleep = self._full = True
            self._updates += 1
            pending = [slot.now.probe.problem for slot in self._engines if slot.now.probe is not None]
        wait(pending, 2 * self._config.rollout_health_check_timeout)  # they ask for a token

    def end_sleep(self, *, awake: bool) -> None:
        """As :meth:`Fleet.end_sleep`."""
        with self._lock:
            self._asleep, self._full = not awake, False
            for slot in self._engines:
                if slot.now.due == math.inf:
                    slot.now.due = time.monotonic()

    def replace(self, urls: Collection[str]) -> None:
        """As :meth:`Fleet.replace`."""
        with self._lock:
            failed = [slot.now for slot in self._engines if slot.url in urls]
            for occupant in failed:
                occupant.silent = True
        while any(occupant.up for occupant in failed):
            self._wait()

    def _behind(self) -> list[EngineSlot]:
        return [slot for slot in self._engines if slot.now.up and slot.now.weights != self._weights]

    def _wait(self) -> None:
        """Sleep for a moment, in a method that waits for the monitor."""
        self.check()
        if self._stopping.wait(POLL_SECONDS):
            raise EngineError("the engines were stopped")

    def _run(self) -> None:
        try:
            while not self._stopping.wait(POLL_SECONDS):
                self._look_at_all()
        except SlimeError as error:
            self._failure = error
        except Exception as error:
            logger.exception("the engines are not watched any more")
            self._failure = EngineError(f"fault tolerance failed: {type(error).__name__}: {error}")

    def _look_at_all(self) -> None:
        for slot in self._slots:
            if slot.now.has_no_room:
                if time.monotonic() >= slot.now.due and not self._full:
                    self._start_again(slot)
            elif (problem := self._problem(slot)) is not None:
                self._replace(slot, problem)
        if self._router.now.up:
            self._register()

    def _problem(self, slot: Slot[Any]) -> str | None:
        """The problem with a process; ``None`` if there is none, or if it is not known yet.

        A probe that was pending when an update began is replaced by one of another path: paused engines do not answer
        the first.
        """
        now = slot.now
        if now.process.exit_code is not None:
            if slot.move():
                self._note(slot, Event.RESTARTED, "on another port, as another program had taken the last one")
                return None
            if now.no_successor is not None:
                return now.no_successor if time.monotonic() >= now.due else None
            return f"{'ended by itself' if now.up else 'did not start'} ({now.process.ending})"
        if now.up and now.silent:
            return "gave no answer to a request of a weight update or for its memory"
        probe = now.probe
        if probe is None or probe.updates != self._updates or probe.since < self._ask_all_since:
            if time.monotonic() >= now.due or now.checked < self._ask_all_since:
                self._ask(slot)
            return None
        if not probe.problem.done():
            return None
        now.probe = None
        return self._judge(slot, probe, probe.problem.result())

    def _ask(self, slot: Slot[Any]) -> None:
        now = slot.now
        with self._lock:
            paused = now in (self._updating or ()) or (self._asleep and slot is not self._router)
            path = PAUSED_HEALTH_PATH if paused else slot.health_path
            since, updates = time.monotonic(), self._updates
        if now.up:
            timeout = self._config.rollout_health_check_timeout
            problem = self._pool.submit(no_answer, now.process.url + path, timeout, self._stopping)
        else:
            problem = self._pool.submit(not_ready, now.process)
        now.probe = Probe(problem, since, updates)

    def _judge(self, slot: Slot[Any], probe: Probe, problem: str | None) -> str | None:
        now = slot.now
        if problem is None:
            now.checked = probe.since
            now.due = probe.since + self._config.rollout_health_check_interval
            if not now.up:
                self._came_up(slot)
            return None
        if now.up:
            return problem
        now.due = time.monotonic() + START_POLL_SECONDS
        limit = self._config.engine_startup_timeout
        return f"{problem} within {limit:g} s of its start" if time.monotonic() - now.started > limit else None

    def _came_up(self, slot: Slot[Any]) -> None:
        now = slot.now
        now.due = time.monotonic() + self._config.rollout_health_check_first_wait
        self._note(slot, Event.STARTED, f"after {time.monotonic() - now.started:.1f} s")
        with self._lock:
            now.up = True
            if slot is not self._router and now.weights == self._weights:
                self._note(slot, Event.WEIGHTS, f"{AS_STARTED}, as no update was sent yet")

    def _replace(self, slot: Slot[Any], problem: str) -> None:
        """End a process and start another one in its slot, or give up if the budget is used up."""
        now = slot.now
        slot.first_problem = slot.first_problem or problem
        if slot is self._router:
            self._registry.offered.clear()
        with self._lock:  # in this order for who looks without it: an engine that is unhealthy does not serve, …
            for lost in self._engines if slot is self._router else [slot]:
                lost.now.in_router = False
            self._note(slot, Event.UNHEALTHY, problem)
            now.up = False  # … and of one that is not up the reason is written down
            self._faults += 1
        if slot is not self._router:
            self._registry.take_out(now.process.url)
        if now.process.exit_code is None:
            now.process.kill()
            self._note(slot, Event.KILLED, "with all its processes")
        if self._full and slot is not self._router:
            now.no_successor, now.due = f"{problem} while there was no memory for another", math.inf
            return
        if slot.restarts >= self._config.rollout_max_restarts:
            self._give_up(slot, problem)
        self._start_again(slot)

    def _start_again(self, slot: Slot[Any]) -> None:
        """Start another process in a slot; one that no node has room for is tried again.

        That is not counted, nor is the start on a node that has joined: nodes may come and go as often as they like.
        """
        now = slot.now
        joined = now.has_no_room
        slot.restarts += not joined
        try:
            slot.start()
        except NoRoomError as error:
            slot.restarts -= not joined
            if not joined:
                self._note(slot, Event.NO_ROOM, str(error))
            now.has_no_room, now.due = True, time.monotonic() + ROOM_AGAIN_SECONDS
            return
        except PortInUseError as error:
            logger.warning("%s was not restarted: %s", slot.name, error)
            now.no_successor, now.due = f"could not be started: {error}", time.monotonic() + PORT_AGAIN_SECONDS
            now.has_no_room = False
            return
        counted = f"restart {slot.restarts} of {self._config.rollout_max_restarts}"
        self._note(slot, Event.RESTARTED, "as a node has room for it" if joined else counted)

    def _give_up(self, slot: Slot[Any], problem: str) -> NoReturn:
        message = (
            f"{slot.name} ({slot.url}) {problem}, after it was restarted {slot.restarts} times, as often as "
            "--rollout-max-restarts allows"
        )
        if slot.restarts:
            message += f"; the first cause: {slot.first_problem}"
        self._note(slot, Event.BUDGET_EXHAUSTED, message)
        raise EngineRestartsError(f"{message}; {slot.process.log_excerpt()}")

    def _register(self) -> None:
        with self._lock:
            wanted = {
                slot.url: slot.now
                for slot in self._engines
                if slot.now.up and slot.now.weights == self._weights and (slot.now.in_router or self._updating is None)
            }
            is_due = self._registry.is_due(wanted)
        if is_due:
            self._registry.register(wanted)


def no_answer(url: str, timeout: float, stopping: threading.Event) -> str | None:
    """Retry a health check until it succeeds; ``None``, or the problem after ``timeout`` seconds or when stopping."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            call("GET", url, timeout=max(deadline - time.monotonic(), 0.1))
        except HttpError as error:
            problem = str(error)
        else:
            return None
        if time.monotonic() >= deadline - PROBE_AGAIN_SECONDS or stopping.wait(PROBE_AGAIN_SECONDS):
            return f"gave no good answer within {timeout:g} s: {problem}"


def not_ready(process: ServingProcess) -> str | None:
    """``None`` once a process that was restarted answers, and is set up as at the fleet's start."""
    try:
        if not process.is_ready(START_TIMEOUT_SECONDS):
            return "did not answer"
        if isinstance(process, SGLangEngine):
            process.freeze_gc()
    except EngineError:  # it has ended, which `_problem` notices
        return "has ended"
    return None
