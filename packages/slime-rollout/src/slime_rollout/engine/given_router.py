"""A router that others run: engines are registered there for as long as the run lasts, and it is never stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError
from slime_rollout.engine.ports import free_port
from slime_rollout.engine.router import Router
from slime_rollout.engine.router_api import CONTROL_TIMEOUT_SECONDS, RouterApi, Workers
from slime_rollout.http import HttpError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
MISSED_CHECKS = 3


class GivenRouter(RouterApi):
    """A running sglang-router of somebody else. Made by :meth:`connect`; used like :class:`Router`.

    It shows the engines of this run alone: those that it is told of, and those that it was offered.
    """

    attempts = 3
    exit_code = None
    """It is not this run's process."""

    def __init__(self, url: str, known: Collection[str] = ()) -> None:
        self.url = url
        self._known = frozenset(known)
        self._added: set[str] = set()
        self._next_check = 0.0
        self._missed = 0

    @classmethod
    def connect(cls, url: str, engine_urls: Collection[str] = ()) -> GivenRouter:
        """Find out that a router is there, and that it sends requests to nobody else.

        Args:
            url: Address of the router.
            engine_urls: Engines of this run that may be registered there already.

        Raises:
            EngineStartError: Nobody answers, it is no sglang-router, or it has healthy workers that are not this run's:
                requests would go to them, too.
        """
        router = cls(url.rstrip("/"), engine_urls)
        try:
            workers = router._all_workers(router.attempts)
        except HttpError as error:
            raise EngineStartError(f"--sglang-router-url {url} does not answer as a router: {error}") from error
        others = {worker: healthy for worker, (_, healthy) in workers.items() if worker not in engine_urls}
        if used := sorted(worker for worker, healthy in others.items() if healthy):
            raise EngineStartError(
                f"the router {url} sends requests to {', '.join(used)}, not of this run; give a router without other "
                f"workers, or remove them with DELETE {router.url}/workers/ID"
            )
        if others:
            logger.warning("the router %s has workers that do not answer: %s", url, ", ".join(sorted(others)))
        return router

    def is_ready(self, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Whether it answers.

        Args:
            timeout: How long to wait for the answer, in seconds.
        """
        return self.answers(timeout)

    def offer_worker(self, url: str, role: Mapping[str, Any] | None = None, *, attempts: int | None = None) -> None:
        """Ask it to use an engine, and remember that: :meth:`RouterApi.offer_worker`.

        Also one that is taken out stays this run's: the router lists it only when it has tried it, perhaps after that.
        """
        self._added.add(url)
        super().offer_worker(url, role, attempts=attempts)

    def process_ids(self) -> list[int]:
        """None of this run."""
        return []

    def check(self) -> None:
        """Raise if it has not answered three times in a row. It is asked every five seconds at most.

        Raises:
            EngineDiedError: It has not.
        """
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        self._missed = 0 if self.is_ready() else self._missed + 1
        if self._missed >= MISSED_CHECKS:
            raise EngineDiedError(f"the router {self.url}, which others run, does not answer; start it again")

    def log_excerpt(self) -> str:
        """Where its log is."""
        return "the log of the router, which others run"

    def request_stop(self) -> None:
        """Take this run's engines out of it. What was registered before the run stays."""
        try:
            for url in sorted(self._added):
                self.remove_worker(url)
        except HttpError as error:
            logger.warning("engines of this run may be left in the router %s: %s", self.url, error)
        self._added.clear()

    def stop(self) -> None:
        """Take this run's engines out of it; the router itself goes on."""
        self.request_stop()

    def _workers(self, attempts: int) -> Workers:
        ours = self._known | self._added
        return {url: state for url, state in self._all_workers(attempts).items() if url in ours}

    def _all_workers(self, attempts: int) -> Workers:
        """Also those that are not this run's."""
        return super()._workers(attempts)


AnyRouter = Router | GivenRouter


def open_router(config: EngineConfig, engine_urls: Sequence[str], *, log_path: Path) -> AnyRouter:
    """The router of the config for engines that others run: a new one, or one that others run, too.

    Args:
        config: ``sglang_router_url``, or how to start one.
        engine_urls: Engines of the run. Their ports are not taken, and a given router may know them.
        log_path: Where a new one writes its log.

    Raises:
        EngineStartError: The given one cannot be used.
        PortInUseError: A port that was asked for is taken.
    """
    if config.sglang_router_url is not None:
        return GivenRouter.connect(config.sglang_router_url, engine_urls)
    taken = {int(url.rsplit(":", 1)[1]) for url in engine_urls}
    port = config.sglang_router_port or free_port(config.sglang_router_ip, without=taken)
    prometheus_port = free_port(without={port, *taken})
    return Router.start(config, port=port, prometheus_port=prometheus_port, log_path=log_path)
