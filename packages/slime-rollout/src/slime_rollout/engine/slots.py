"""The places of a fleet. A place stays; the process that fills it may be replaced by another one."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineError, PortInUseError
from slime_rollout.engine.given_router import GivenRouter
from slime_rollout.engine.probes import Probe
from slime_rollout.engine.process import ServingProcess
from slime_rollout.engine.router import Router
from slime_rollout.engine.server import EngineSpec, SGLangEngine

# How often a start is tried again on another port where somebody was quicker.
PORT_ATTEMPTS = 5
LOOPBACK = "127.0.0.1"

AS_STARTED = "as started"

P = TypeVar("P", bound=ServingProcess)

FreePort = Callable[[str], int]
"""Gives a free port of an address, which nobody in the fleet has had before."""


@dataclasses.dataclass(eq=False)
class Occupant(Generic[P]):
    """One process in a place, and what is known of it. Of its replacement, which is another object, nothing is known.

    Attributes:
        process: The process.
        started: When it was started, in seconds of the monotonic clock.
        up: Whether it has answered.
        weights: An update's version, :data:`AS_STARTED` or `slime_rollout.weight_version.INCOMPLETE`. Engines only.
        in_router: Whether the router sends it requests. Engines only.
        checked: When the last question that it answered well was asked.
        due: When to ask next.
        probe: The question that is open now.
        silent: Whether it did not answer a request of a weight update.
        no_successor: Why no other process could be started in its place, after it has ended.
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
    """A place. Nothing is in it before :meth:`start`.

    Attributes:
        name: Such as ``engine 0``.
        health_path: What a process that works answers.
        restarts: How often that was replaced because it failed.
    """

    name: str
    health_path: str

    def __init__(self, config: EngineConfig, *, log_path: Path, free_port: FreePort) -> None:
        self.restarts = 0
        self._config = config
        self._log_path = log_path
        self._free_port = free_port
        self._moves = 0
        self._now: Occupant[P] | None = None

    @property
    def now(self) -> Occupant[P]:
        """The process that fills it, and what is known of it."""
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
        """Start a process and have it fill the place.

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
        """Whether its process answers; if that has lost its port to somebody else, starts it on another one.

        Args:
            timeout: How long to wait for the answer, in seconds.

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
        """Start again on another port where the process has ended because somebody has taken its port.

        Returns:
            Whether that was so, and not so too often already.
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
    """The place of one engine. Each server in it has a port of its own, so an address always means one process.

    Args:
        index: Number of the engine.
        config: How it is started.
        spec: Tells for a port what is served there.
        log_path: Log of all servers in this place.
        free_port: Where ports come from.
    """

    health_path = "/health_generate"

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        spec: Callable[[int], EngineSpec],
        *,
        log_path: Path,
        free_port: FreePort,
    ) -> None:
        super().__init__(config, log_path=log_path, free_port=free_port)
        self.name = f"engine {index}"
        self._spec = spec

    @property
    def _may_move(self) -> bool:
        return True

    def _start(self) -> SGLangEngine:
        spec = self._spec(self._free_port(LOOPBACK))
        return SGLangEngine.start(self._config, spec, log_path=self._log_path)


class RouterSlot(Slot[Router]):
    """The router's place. A router that replaces another one has its address."""

    name = "router"
    health_path = "/liveness"

    def __init__(
        self, config: EngineConfig, *, log_path: Path, free_port: FreePort, disaggregated: bool = False
    ) -> None:
        super().__init__(config, log_path=log_path, free_port=free_port)
        self._port: int | None = None
        self._disaggregated = disaggregated

    @property
    def _may_move(self) -> bool:
        return self._config.sglang_router_port is None and self.restarts == 0

    def _start(self) -> Router:
        if self._port is None or self._may_move:
            self._port = self._config.sglang_router_port or self._free_port(self._config.sglang_router_ip)
        prometheus_port = self._free_port(LOOPBACK)
        return Router.start(
            self._config,
            port=self._port,
            prometheus_port=prometheus_port,
            log_path=self._log_path,
            disaggregated=self._disaggregated,
        )


class GivenRouterSlot(Slot[Any]):
    """The place of a router that others run: it is found there, and neither replaced nor stopped."""

    name = "router"
    health_path = "/liveness"

    @property
    def _may_move(self) -> bool:
        return False

    def _start(self) -> GivenRouter:
        return GivenRouter.connect(str(self._config.sglang_router_url))


AnyRouterSlot = RouterSlot | GivenRouterSlot
