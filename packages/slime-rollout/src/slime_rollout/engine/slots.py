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

from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineError, PortInUseError
from slime_rollout.engine.router import LIVENESS_PATH, ExternalRouter, Router
from slime_rollout.engine.server import EngineLauncher, ServingProcess, SGLangEngine
from slime_rollout.engine.spec import EngineSpec

logger = logging.getLogger(__name__)

# How often a start is retried on another port.
PORT_ATTEMPTS = 5
AS_STARTED = "as started"
EVENTS_FILE = "engine_events.jsonl"

P = TypeVar("P", bound=ServingProcess)


@dataclasses.dataclass
class Probe:
    """A pending health check of a process.

    Attributes:
        problem: ``None`` if all is well, else what is wrong.
        since: When it began, in seconds of the monotonic clock.
        updates: How many weight updates had begun by then.
    """

    problem: Future[str | None]
    since: float
    updates: int


@dataclasses.dataclass(eq=False)
class Occupant(Generic[P]):
    """One process in a slot, and its state. Its replacement is another object, with a fresh state.

    Attributes:
        process: The process.
        started: When it was started, in seconds of the monotonic clock.
        up: Whether it has answered.
        weights: An update's version, :data:`AS_STARTED` or `slime_rollout.http.INCOMPLETE`. Engines only.
        in_router: Whether the router sends it requests. Engines only.
        checked: When the last successful health check began.
        due: When the next one is due.
        probe: The pending one.
        silent: Whether it did not answer a request of a weight update.
        no_successor: Why it could not be replaced, after it has ended.
    """

    process: P
    started: float = dataclasses.field(default_factory=time.monotonic)
    up: bool = False
    weights: str = AS_STARTED
    in_router: bool = False
    checked: float = 0.0
    due: float = 0.0
    probe: Probe | None = None
    silent: bool = False
    no_successor: str | None = None


class Slot(abc.ABC, Generic[P]):
    """A place for one process; empty before :meth:`start`.

    Attributes:
        name: Such as ``engine 0``.
        health_path: What a process that works answers.
        restarts: How often its process was replaced because it failed.
    """

    name: str
    health_path: str

    def __init__(self) -> None:
        self.restarts = 0
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
        """Start a process in it.

        Raises:
            PortInUseError: The port that was asked for is taken, or so were all that were tried. Nothing was started.
            SupervisionError: The log file cannot be written.
        """
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
            self._now.process.request_stop()

    def stop(self) -> None:
        """End its process, if there is one; returns when it is gone."""
        if self._now is not None:
            self._now.process.stop()

    def is_ready(self, timeout: float) -> bool:
        """Whether its process answers within ``timeout`` seconds. Starts it on another port if it has lost its own.

        Raises:
            EngineStartError: It ended before it ever answered.
            EngineDiedError: It ended later.
        """
        try:
            return self.process.is_ready(timeout)
        except EngineError:
            if self.move():
                return False
            raise

    def move(self) -> bool:
        """Start again on another port if the process has ended because another program had taken its port.

        Returns:
            Whether it did; not more than :data:`PORT_ATTEMPTS` times.
        """
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


class EngineSlot(Slot[SGLangEngine]):
    """The slot of one engine. Each server in it has a port of its own, so an address always means one process.

    Args:
        index: Number of the engine.
        spec: What is served; its port is chosen at each start.
        launcher: Starts the engine.
        log_path: Log of all servers in this slot.
    """

    health_path = "/health_generate"
    _may_move = True

    def __init__(self, index: int, spec: EngineSpec, launcher: EngineLauncher, *, log_path: Path) -> None:
        super().__init__()
        self.name = f"engine {index}"
        self._spec = dataclasses.replace(spec, port=0)
        self._launcher, self._log_path = launcher, log_path

    def _start(self) -> SGLangEngine:
        return self._launcher.start(self._spec, log_path=self._log_path)


class RouterSlot(Slot[Router]):
    """The router's slot. A router that replaces another one has its address."""

    name = "router"
    health_path = LIVENESS_PATH

    def __init__(self, config: EngineConfig, ports: Ports, *, log_path: Path, disaggregated: bool = False) -> None:
        super().__init__()
        self._config, self._ports, self._log_path = config, ports, log_path
        self._disaggregated = disaggregated
        self._port: int | None = None

    @property
    def _may_move(self) -> bool:
        return self._config.sglang_router_port is None and self.restarts == 0

    def _start(self) -> Router:
        if self._port is None or self._may_move:
            self._port = self._config.sglang_router_port or self._ports.take(self._config.sglang_router_ip)
        return Router.start(
            self._config,
            port=self._port,
            prometheus_port=self._ports.take(),
            log_path=self._log_path,
            disaggregated=self._disaggregated,
        )


class ExternalRouterSlot(Slot[Any]):
    """The slot of an external router: it is neither started, replaced nor stopped."""

    name = "router"
    health_path = LIVENESS_PATH
    _may_move = False

    def __init__(self, url: str, engine_urls: Collection[str] = ()) -> None:
        super().__init__()
        self._url, self._engine_urls = url, engine_urls

    def _start(self) -> ExternalRouter:
        return ExternalRouter.connect(self._url, self._engine_urls)


AnyRouterSlot = RouterSlot | ExternalRouterSlot


def router_slot(
    config: EngineConfig,
    ports: Ports,
    *,
    log_path: Path,
    engine_urls: Collection[str] = (),
    disaggregated: bool = False,
) -> AnyRouterSlot:
    """The slot of the router that ``config`` asks for.

    Args:
        config: ``sglang_router_url``, or how to start a router.
        ports: Where its port comes from.
        log_path: Where a router that is started writes its log.
        engine_urls: External engines of this run, which an external router may know already.
        disaggregated: Whether its engines are prefill and decode engines.
    """
    if config.sglang_router_url is not None:
        return ExternalRouterSlot(config.sglang_router_url, engine_urls)
    return RouterSlot(config, ports, log_path=log_path, disaggregated=disaggregated)


class Event(enum.StrEnum):
    """What happens to the process in a slot.

    Attributes:
        UNHEALTHY: It has ended, or gave no good answer in time.
        KILLED: What was left of it was ended by SIGKILL.
        RESTARTED: Another process was started in its place.
        STARTED: That process answers.
        WEIGHTS: It has the current weights.
        REGISTERED: The router sends it requests.
        BUDGET_EXHAUSTED: It may not be restarted again; the run ends.
    """

    UNHEALTHY = "unhealthy"
    KILLED = "killed"
    RESTARTED = "restarted"
    STARTED = "started"
    WEIGHTS = "weights"
    REGISTERED = "registered"
    BUDGET_EXHAUSTED = "budget_exhausted"


_SERIOUS = {Event.UNHEALTHY, Event.BUDGET_EXHAUSTED}


class EventLog:
    """Writes events to a file, one JSON object a line, and to this process's log.

    Args:
        path: The file. Events of earlier runs stay in it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def write(self, slot: Slot[Any], event: Event, detail: str) -> None:
        """Add an event of the process in ``slot``; ``detail`` says more in words."""
        level = logging.WARNING if event in _SERIOUS else logging.INFO
        logger.log(level, "%s (%s) %s: %s", slot.name, slot.url, event.value, detail)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "engine": slot.name, "event": event.value, "url": slot.url, "detail": detail}
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All events in a fleet's ``log_dir``, in order; none if nothing has happened."""
    path = directory / EVENTS_FILE
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
