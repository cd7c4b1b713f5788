"""A service of the user's that is asked about samples, one request for each."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from slime_rollout.connections import Connections

REQUESTS = 64  # at once
ATTEMPTS = 4


class Service:
    """Asks from any event loop: at most 64 requests at once, each tried up to four times.

    Refused connections, time-outs, 408, 429 and 5xx are tried again; any other 4xx is not. Connections are kept and
    used again, on an event loop of the service's own, which starts with the first request and ends with the last
    reference.

    Args:
        url: Address of the service.
        timeout: Time limit of one attempt, in seconds. Waiting for a turn is not counted.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connections: Connections | None = None

    async def ask(self, payload: Any) -> Any:
        """What the service answers to a POST of ``payload``: parsed JSON, its text if it is none, ``None`` if empty.

        Raises:
            HttpError: The answer was no success, or there was none.
        """
        return await asyncio.wrap_future(self._connected().submit(_dump(payload)))

    def _connected(self) -> Connections:
        from slime_rollout.connections import Connections  # aiohttp is much to import for those who only check

        with self._lock:
            if self._connections is None:
                self._connections = Connections(self.url, timeout=self._timeout, at_once=REQUESTS, attempts=ATTEMPTS)
                weakref.finalize(self, self._connections.close)
            return self._connections


def _dump(payload: Any) -> bytes:
    try:
        return orjson.dumps(payload)
    except orjson.JSONEncodeError:  # half a surrogate pair, which a model may write
        return json.dumps(payload).encode()
