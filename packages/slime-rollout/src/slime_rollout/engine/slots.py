"""The slots of a fleet, and the log of what happens to them.

A slot stays; the process that fills it may be replaced by another one.
"""

from __future__ import annotations

import abc
import dataclasses
import datetime
import enum
import json
import logging
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from slime_core.files import open_to_append, read_text
from slime_rollout.engine import EngineError, PortInUseError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.router import LIVENESS_PATH, ExternalRouter, Router
from slime_rollout.engine.server import EngineLauncher, EngineSpec, ServingProcess, SGLangEngine

logger = logging.getLogger(__name__)

# How often a start is retried on another port.
PORT_ATTEMPTS = 5
AS_STARTED = "as started"
EVENTS_FILE = "engine_events.jsonl"

P = TypeVar("P", bound=ServingProcess)


@dataclasses.dataclass
class Probe:
    """A pending health check of a process: its problem is ``None`` if all is well. Times are monotonic seconds."""

    problem: Future[str | None]
    since: float
    updates: int  # weight updates that had begun by then


@dataclasses.dataclass(eq=False)
class Occupant(Generic[P]):
    """One process in a slot, and its state. Its replacement is another object, with a fresh state.

    Times are monotonic seconds. ``weights`` and ``in_router`` are of engines only.
    """

    process: P
    started: float = dataclasses.field(default_factory=time.monotonic)
    up: bool = False  # whether it has answered
    weights: str = AS_STARTED  # that, an update's version, or `http.INCOMPLETE`
    in_router: bool = False  # whether the router sends it requests
    checked: float = 0.0  # when the last successful health check began
    due: float = 0.0  # when the next one is due
    probe: Probe | None = None  # the pending one
    silent: bool = False  # whether it did not answer a request of a weight update
    no_successor: str | None = None  # why it could not be replaced, after it has ended
    has_no_room: bool = False  # whether it has ended, or never was, and waits for a node that has room for another one


class Slot(abc.ABC, Generic[P]):
    """A place for one process, such as ``engine 0``; empty before :meth:`start`.

    A process that works answers ``health_path``. ``restarts`` counts how often it was replaced because it failed, for
    ``first_problem`` the first time. A slot that is ``spare`` has no process until a node has room for it.
    """

    name: str
    health_path: str
    spare = False

    def __init__(self) -> None:
        self.restarts = 0
        self.first_problem: str | None = None
        self._moves = 0
        self._now: Occupant[P] | None = None

    @property
    def now(self) -> Occupant[P]:
        """The process that fills it, and its state."""
        if self._now is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._now

    @property
    def process(self) -> P:
        """The process that fills it."""
        return self.now.process

    @property
    def url(self) -> str:
        """Address of that process."""
        return self.process.url

    def start(self) -> None:
        """Start a process in it; `PortInUseError` if the port that was asked for is taken, or all that were tried."""
        for attempt in range(PORT_ATTEMPTS + 1):
            try:
                self._now = Occupant(self._start())
                return
            except PortInUseError:
                if not self._may_move or attempt == PORT_ATTEMPTS:
                    raise

    def request_stop(self) -> None:
        """Ask its process to end, without waiting."""
        if self._now is not None:
            self.process.request_stop()

    def stop(self) -> None:
        """End its process, if there is one; returns when it is gone."""
        if self._now is not None:
            self.process.stop()

    def is_ready(self, timeout: float) -> bool:
        """As :meth:`ServingProcess.is_ready`; starts the process on another port if it has lost its own."""
        try:
            return self.process.is_ready(timeout)
        except EngineError:
            if self.move():
                return False
            raise

    def move(self) -> bool:
        """Whether it started a process again, on another port, which had ended because its own was taken."""
        if self.now.up or not self._may_move or self._moves == PORT_ATTEMPTS:
            return False
        if self.process.exit_code is None or not self.process.found_port_taken():
            return False
        self._moves += 1
        self.start()
        return True

    @property
    @abc.abstractmethod
    def _may_move(self) -> bool:
        """Whether another port would do."""

    @abc.abstractmethod
    def _start(self) -> P: ...


class _NoProcess:
    """Stands for the process of a spare engine before there is one."""

    log_path, pid, ending = None, 0, "no node had room for it"

    def poll(self) -> int:
        return -1  # it has ended, as it were

    def process_ids(self) -> list[int]:
        return []

    def log_tail(self, lines: int) -> str:
        return ""

    def request_stop(self) -> None:
        pass

    stop = kill = request_stop


class EngineSlot(Slot[SGLangEngine]):
    """The slot of one engine. Each server in it has a port of its own, so an address always means one process."""

    health_path = "/health_generate"
    _may_move = True

    def __init__(
        self, index: int, spec: EngineSpec, launcher: EngineLauncher, *, log_path: Path, spare: bool = False
    ) -> None:
        super().__init__()
        self.name = f"engine {index}"
        self._spec = dataclasses.replace(spec, port=0)
        self._launcher, self._log_path = launcher, log_path
        self.spare = spare
        if spare:
            self._now = Occupant(SGLangEngine(_NoProcess(), self._spec), has_no_room=True)

    def _start(self) -> SGLangEngine:
        return self._launcher.start(self._spec, log_path=self._log_path)


class RouterSlot(Slot[Any]):
    """The router's slot. A router that replaces another one has its address; an external one is never replaced.

    ``engine_urls`` are external engines of this run, which an external router may know already.
    """

    name = "router"
    health_path = LIVENESS_PATH

    def __init__(
        self,
        config: EngineConfig,
        ports: Ports,
        *,
        log_path: Path,
        engine_urls: Collection[str] = (),
        disaggregated: bool = False,
    ) -> None:
        super().__init__()
        self._config, self._ports, self._log_path = config, ports, log_path
        self._engine_urls, self._disaggregated = engine_urls, disaggregated
        self._port: int | None = None

    @property
    def is_external(self) -> bool:
        """Whether the router is neither started nor stopped here."""
        return self._config.sglang_router_url is not None

    @property
    def _may_move(self) -> bool:
        return not self.is_external and self._config.sglang_router_port is None and self.restarts == 0

    def _start(self) -> Router | ExternalRouter:
        if self._config.sglang_router_url is not None:
            return ExternalRouter.connect(self._config.sglang_router_url, self._engine_urls, key=self._config.key)
        if self._port is None or self._may_move:
            self._port = self._config.sglang_router_port or self._ports.take(self._config.sglang_router_ip)
        return Router.start(
            self._config,
            port=self._port,
            prometheus_port=self._ports.take(),
            log_path=self._log_path,
            disaggregated=self._disaggregated,
        )


class Event(enum.StrEnum):
    """An event in the life of the process in a slot."""

    UNHEALTHY = "unhealthy"  # it has ended, or gave no good answer in time
    KILLED = "killed"  # what was left of it was ended by SIGKILL
    NO_ROOM = "no_room"  # no node has room for another one; it is tried again
    RESTARTED = "restarted"  # another process was started in its place, or a first one where a node has joined
    STARTED = "started"  # that process answers
    WEIGHTS = "weights"  # it has the current weights
    REGISTERED = "registered"  # the router sends it requests
    BUDGET_EXHAUSTED = "budget_exhausted"  # it may not be restarted again; the run ends


class EventLog:
    """Appends events to :data:`EVENTS_FILE` in a directory, one JSON object a line, and to this process's log."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EVENTS_FILE
        self._lock = threading.Lock()

    def write(self, slot: Slot[Any], event: Event, detail: str) -> None:
        """Add an event of the process in ``slot``; ``detail`` says more in words."""
        level = logging.WARNING if event in (Event.UNHEALTHY, Event.BUDGET_EXHAUSTED) else logging.INFO
        logger.log(level, "%s (%s) %s: %s", slot.name, slot.url, event.value, detail)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "engine": slot.name, "event": event.value, "url": slot.url, "detail": detail}
        with self._lock, open_to_append(self._path) as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events in a fleet's ``log_dir``, in order; none if nothing has happened."""
    path = directory / EVENTS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in read_text(path).splitlines()]
