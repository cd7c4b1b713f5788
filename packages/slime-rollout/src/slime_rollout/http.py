"""Control traffic to engines and the router: time limits, and few, logged retries for refused connections and 5xx."""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from typing import Any

import orjson

from slime_core.errors import SlimeError

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_SECONDS = 60.0
_BACKOFF_SECONDS = 0.2
_SHOWN_CHARACTERS = 500
_PIECE = 2**20  # bytes
# Engines and the router are asked directly: a proxy of the environment (`http_proxy`) knows nothing of this machine's
# loopback address, and would see every weight update of a cluster.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class HttpError(SlimeError):
    """A request that got no good answer.

    Attributes:
        url: Where it went.
        status: HTTP status, or ``None`` if there was no answer.
        body: The answer's text.
        timed_out: Whether there was no answer within the time limit.
    """

    def __init__(self, method: str, url: str, status: int | None, body: str, *, timed_out: bool = False) -> None:
        self.url = url
        self.status = status
        self.body = body
        self.timed_out = timed_out
        answer = f"HTTP {status}" if status is not None else "no answer"
        super().__init__(f"{method} {url}: {answer}: {body[:_SHOWN_CHARACTERS]}")

    @property
    def may_pass(self) -> bool:
        """Whether the same request could succeed later: no answer, a server error, 408 or 429, but no other 4xx."""
        return self.status is None or self.status >= 500 or self.status in (408, 429)


def call(
    method: str,
    url: str,
    payload: Any = None,
    *,
    timeout: float = CONTROL_TIMEOUT_SECONDS,
    attempts: int = 1,
) -> Any:
    """Send one request and wait for its answer.

    Args:
        method: ``GET``, ``POST`` …
        url: Full address.
        payload: What to send as JSON; nothing if ``None``.
        timeout: Time limit of one attempt in seconds.
        attempts: How often to try at most; more than 1 only for requests that may be repeated.

    Returns:
        The parsed answer; its text if it is not JSON; ``None`` if it is empty.

    Raises:
        HttpError: The answer was no success, or there was none.
    """
    for attempt in range(1, attempts + 1):
        try:
            return parse_body(_exchange(method, url, payload, timeout))
        except HttpError as error:
            if not error.may_pass or attempt == attempts:
                raise
            logger.warning("attempt %d of %d failed: %s", attempt, attempts, error)
            time.sleep(_BACKOFF_SECONDS * 2 ** (attempt - 1))
    raise AssertionError("attempts must be 1 or more")


def _exchange(method: str, url: str, payload: Any, timeout: float) -> bytes:
    body = None if payload is None else orjson.dumps(payload)
    headers = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    try:
        end = time.monotonic() + timeout
        with _DIRECT.open(request, timeout=timeout) as answer:
            return _read(answer, end)
    except urllib.error.HTTPError as error:
        with error:
            raise HttpError(method, url, error.code, error.read().decode(errors="replace")) from None
    except TimeoutError:
        raise HttpError(method, url, None, f"time limit of {timeout:g} s", timed_out=True) from None
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError) as error:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        text = f"time limit of {timeout:g} s" if late else str(reason)
        raise HttpError(method, url, None, text, timed_out=late) from None


def _read(answer: http.client.HTTPResponse, end: float) -> bytes:
    """The body, as far as it comes before ``end``: the socket's own time limit begins anew with every piece."""
    pieces = []
    while piece := answer.read1(_PIECE):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError
    content = b"".join(pieces)
    if answer.length:
        raise http.client.IncompleteRead(content, answer.length)
    return content


def parse_body(content: bytes) -> Any:
    """What an answer holds: parsed JSON, its text if it is not JSON, ``None`` if it is empty."""
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")
