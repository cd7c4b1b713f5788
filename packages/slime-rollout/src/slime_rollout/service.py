"""A service that is asked about samples, one request for each: a reward service, or a teacher."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import orjson

from slime_rollout.http import QUICK_DELAYS, Retries, make_session, request
from slime_rollout.threads import LoopThread

if TYPE_CHECKING:
    import aiohttp

REQUESTS = 64  # at once
ATTEMPTS = 4


class Service:
    """Asks from any event loop: at most 64 requests at once, each tried up to four times.

    Connections are kept and used again, on an event loop of the service's own, which starts with the first request and
    ends with the last reference.

    Args:
        url: Address of the service.
        timeout: Time limit of one attempt, in seconds. Waiting for a turn is not counted.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connections: _Connections | None = None

    async def ask(self, payload: Any) -> Any:
        """What the service answers to a POST of ``payload``: parsed JSON, its text if it is not, ``None`` if empty.

        Raises:
            HttpError: There was no good answer.
        """
        with self._lock:
            if self._connections is None:
                self._connections = _Connections(self.url, self._timeout)
                weakref.finalize(self, self._connections.close)
            connections = self._connections
        return await asyncio.wrap_future(connections.thread.submit(connections.post(_dump(payload))))


class _Connections:
    """What lives on the service's own event loop. It refers to no `Service`, so that one can end."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url, self._timeout = url, timeout
        self._turns = asyncio.Semaphore(REQUESTS)
        self._retries = Retries(QUICK_DELAYS[: ATTEMPTS - 1])
        self._session: aiohttp.ClientSession | None = None
        self.thread = LoopThread("slime-service")

    async def post(self, body: bytes) -> Any:
        if self._session is None:
            self._session = make_session(self._timeout)
        async with self._turns:
            return await request(self._session, "POST", self._url, body, self._retries)

    def close(self) -> None:
        """Close the connections and end the thread. Does not wait."""
        self.thread.close(self._close_session)

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()


def _dump(payload: Any) -> bytes:
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:  # half a surrogate pair, which a model may write
        return json.dumps(payload).encode()
