"""What a router is asked over HTTP, whoever runs it: whether it lives, and which engines it sends requests to."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_rollout.engine.errors import EngineStartError
from slime_rollout.http import HttpError, call

POLL_SECONDS = 0.1
CONTROL_TIMEOUT_SECONDS = 5.0
WORKER_TIMEOUT_SECONDS = 60.0
OFFER_SECONDS = 30
NOT_FOUND = 404
# At a start nothing else is held up by asking again.
START_ATTEMPTS = 3

Workers = dict[str, tuple[str, bool]]
"""Address of every engine that a router knows → the router's id of it, and whether it gets requests."""


class RouterApi(abc.ABC):
    """A running sglang-router, by its address.

    Attributes:
        url: Its address.
        attempts: How often a question is asked that gets no answer, or a server error.
    """

    url: str
    attempts: ClassVar[int] = 1

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `EngineDiedError` if it is gone."""

    @abc.abstractmethod
    def log_excerpt(self) -> str:
        """Where its log is, and its last lines where they can be read."""

    def answers(self, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Whether the router itself answers; engines take no part in it.

        Args:
            timeout: How long to wait for the answer, in seconds.
        """
        try:
            call("GET", f"{self.url}/liveness", timeout=timeout)
        except HttpError:
            return False
        return True

    def add_workers(
        self,
        urls: Sequence[str],
        *,
        roles: Mapping[str, Mapping[str, Any]] | None = None,
        timeout: float = WORKER_TIMEOUT_SECONDS,
    ) -> None:
        """Have it use engines; return when it sends them requests.

        Args:
            urls: Addresses of engines that are ready. It may know them already.
            roles: What else the router is told of an engine, by its address.
            timeout: Longest wait in seconds.

        Raises:
            EngineStartError: It does not take one of them.
            EngineDiedError: It is gone.
        """
        try:
            known = self._workers(START_ATTEMPTS)
            for url in urls:
                if url not in known:
                    self.offer_worker(url, (roles or {}).get(url), attempts=START_ATTEMPTS)
            deadline = time.monotonic() + timeout
            while missing := sorted(set(urls) - self.healthy_workers()):
                self.check()
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"the router {self.url} does not use {', '.join(missing)} after {timeout:g} s; see whether it "
                        f"can reach them, and {self.log_excerpt()}"
                    )
                time.sleep(POLL_SECONDS)
        except HttpError as error:
            raise EngineStartError(
                f"the router {self.url} refused an engine: {error}; see {self.log_excerpt()}"
            ) from error

    def healthy_workers(self) -> set[str]:
        """Addresses of the engines that get requests.

        Raises:
            HttpError: As of :meth:`workers`.
        """
        return {url for url, (_, healthy) in self._workers(START_ATTEMPTS).items() if healthy}

    def workers(self) -> Workers:
        """The engines that it knows.

        Raises:
            HttpError: It does not answer in time, or not as a router does.
        """
        return self._workers(self.attempts)

    def offer_worker(self, url: str, role: Mapping[str, Any] | None = None, *, attempts: int | None = None) -> None:
        """Ask it to use an engine, without waiting; it tries the engine first, for :data:`OFFER_SECONDS`.

        It tries ten at once, and does not notice that it is asked again: ten questions about an engine that hangs keep
        every other engine out.

        Args:
            url: Address of the engine.
            role: What else it is told of the engine.
            attempts: As the class's own, unless given.

        Raises:
            HttpError: It does not answer in time.
        """
        call(
            "POST",
            f"{self.url}/workers",
            {"url": url, **(role or {})},
            timeout=CONTROL_TIMEOUT_SECONDS,
            attempts=attempts or self.attempts,
        )

    def remove_worker(self, url: str) -> None:
        """Have it send an engine nothing more; one that it does not know is fine.

        Raises:
            HttpError: It does not answer in time.
        """
        if url not in (workers := self.workers()):
            return
        try:
            call("DELETE", f"{self.url}/workers/{workers[url][0]}", timeout=CONTROL_TIMEOUT_SECONDS)
        except HttpError as error:
            if error.status != NOT_FOUND:  # it has gone since the router was asked
                raise

    def _workers(self, attempts: int) -> Workers:
        answer = call("GET", f"{self.url}/workers", timeout=CONTROL_TIMEOUT_SECONDS, attempts=attempts)
        try:
            return {worker["url"]: (worker["id"], bool(worker["is_healthy"])) for worker in answer["workers"]}
        except (KeyError, TypeError):
            raise HttpError("GET", f"{self.url}/workers", 200, f"no list of workers: {str(answer)[:200]}") from None
