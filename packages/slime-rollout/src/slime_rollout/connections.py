"""The connections to a service: few, used again; each request has a time limit and further attempts."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Any

import aiohttp

from slime_rollout.http import HttpError, parse_body
from slime_rollout.loop_thread import LoopThread

logger = logging.getLogger(__name__)

_BACKOFF_SECONDS = 0.2
_KEEP_ALIVE_SECONDS = 4.0  # uvicorn closes a connection that was idle for 5 s
_MOST_BYTES = 2**28


class Connections:
    """A thread with an event loop, and the connections to a service that live there.

    Args:
        url: Address of the service.
        timeout: Time limit of one attempt, in seconds.
        at_once: Most requests at once.
        attempts: How often each is tried at most.
    """

    def __init__(self, url: str, *, timeout: float, at_once: int, attempts: int) -> None:
        self._url, self._timeout, self._attempts = url, timeout, attempts
        self._session: aiohttp.ClientSession | None = None
        self._turns = asyncio.Semaphore(at_once)
        self._thread = LoopThread("slime-service")

    def submit(self, body: bytes) -> Future[Any]:
        """Send a POST of ``body``; the future has the parsed answer or raises `HttpError`, and may be cancelled."""
        return self._thread.submit(self._ask(body))

    def close(self) -> None:
        """Close the connections and end the thread. Does not wait."""
        self._thread.close(self._close_session)

    async def _ask(self, body: bytes) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": "application/json"},
            )
        async with self._turns:
            for attempt in range(1, self._attempts + 1):
                try:
                    return parse_body(await self._exchange(self._session, body))
                except HttpError as error:
                    if not error.may_pass or attempt == self._attempts:
                        raise
                    logger.warning("attempt %d of %d failed: %s", attempt, self._attempts, error)
                await asyncio.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _exchange(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        try:
            async with session.post(self._url, data=body) as answer:
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > _MOST_BYTES:
                        raise HttpError("POST", self._url, None, f"an answer of more than {_MOST_BYTES >> 20} MiB")
        except TimeoutError:
            raise HttpError("POST", self._url, None, f"time limit of {self._timeout:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise HttpError("POST", self._url, None, str(error) or type(error).__name__) from None
        if not 200 <= answer.status < 300:
            raise HttpError("POST", self._url, answer.status, content.decode(errors="replace"))
        return bytes(content)
