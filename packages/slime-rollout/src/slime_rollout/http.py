"""HTTP to engines, routers and services: one session, one error and one retry policy."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import logging
import math
import os
import random
import threading
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import orjson

from slime_core.errors import SlimeError
from slime_core.redact import redacted

if TYPE_CHECKING:  # slow to import, and whoever only reads flags does not need it
    import aiohttp
    import yarl

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_SECONDS = 60.0
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, *(10.0,) * 30)
"""Mean seconds before each retry of a generation request: five minutes, as long as an engine may take to restart."""
QUICK_DELAYS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Mean seconds before each retry of any other request, as far as it is given that many attempts."""

REQUESTS = 64
"""Most requests to a `Service` at once."""
ATTEMPTS = 4
"""How often a `Service` is asked."""
MOST_BYTES = 64 * 2**20
"""Largest answer, unpacked, where a request says nothing else."""
INCOMPLETE = "incomplete"
"""The version of engines' weights while an update is unfinished: no sample of them counts."""

_LONGEST_DELAY = RETRY_DELAYS[-1]
_JITTER = 0.25
_QUIET_SECONDS = 5.0
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # uvicorn, and so SGLang, closes a connection that was idle for 5 s
_READ_AHEAD = 2**20  # bytes
_SHOWN = 300  # characters
_JSON_HEADERS = {"Content-Type": "application/json"}
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # of zlib: told apart by the header


class _Asked:
    """Addresses of servers → how many requests wait there, and since when none was answered. Of this whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[int, float]] = {}

    @contextlib.contextmanager
    def __call__(self, url: str) -> Iterator[None]:
        """Count a request while the block runs; its end is an answer, of whatever kind."""
        server = url[: url.find("/", len("https://"))] if url.count("/") > 2 else url
        with self._lock:
            count, since = self._waiting.get(server, (0, time.monotonic()))
            self._waiting[server] = (count + 1, since)
        try:
            yield
        finally:
            with self._lock:
                count, _ = self._waiting.pop(server)
                if count > 1:
                    self._waiting[server] = (count - 1, time.monotonic())

    def silent(self, seconds: float = 10.0) -> list[str]:
        """Addresses that requests wait for, and that have answered none for so long."""
        limit = time.monotonic() - seconds
        with self._lock:
            return sorted(server for server, (_, since) in self._waiting.items() if since < limit)


ASKED = _Asked()
"""Servers that the process's requests wait for: whoever looks for the cause of a stall asks it."""


class HttpError(SlimeError):
    """A request without a good answer.

    Attributes:
        status: HTTP status, or ``None`` if there was no answer.
        body: The answer's text, or the cause if there was no answer.
        retry_after: Seconds that the server asks to wait; 0 if it does not ask.
        may_run: Whether the server may still work on the request.
        untrusted: Whether the server's certificate was refused, before anything was sent.
    """

    def __init__(
        self,
        method: str,
        url: str,
        status: int | None,
        body: str,
        *,
        timed_out: bool = False,
        taken: bool = True,
        retry_after: float = 0.0,
        untrusted: bool = False,
    ) -> None:
        self.url, self.status, self.body = url, status, redacted(body)  # services repeat what they were sent
        self.timed_out, self.retry_after, self.untrusted = timed_out, retry_after, untrusted
        self.may_run = taken and status not in (429, 503)
        super().__init__(f"{method} {redacted(url)}: {'no answer: ' if status is None else ''}{self.problem}")

    @property
    def problem(self) -> str:
        """The cause, on one line: ``HTTP 503: busy``, or ``Connection refused``."""
        text = excerpt(self.body)
        return text if self.status is None else f"HTTP {self.status}: {text}"

    @property
    def may_pass(self) -> bool:
        """Whether the same request could succeed later: no answer, a server error, 408 or 429."""
        if self.untrusted:
            return False
        # sglang-router answers 408 and 429 when its queue is full.
        return self.status is None or self.status in (408, 429) or (self.status >= 500 and self.status != 501)


class Retries:
    """Decides which failed requests are retried and when, counts and logs them. One object serves a whole client.

    ``delays`` are the mean seconds before each retry. Each varies by a quarter, in the same way in every run, so that
    requests that failed together are not repeated together. Lines of the log are at least ``quiet_seconds`` apart.
    """

    def __init__(self, delays: Sequence[float], *, quiet_seconds: float = _QUIET_SECONDS) -> None:
        self.count = 0
        self._delays = tuple(delays)
        self._quiet_seconds = quiet_seconds
        self._random = random.Random(0)
        self._last_logged = -math.inf
        self._unlogged = 0

    def wait_after(self, attempt: int, error: HttpError) -> float:
        """Seconds to wait after ``attempt``, counted from 1; raises ``error`` if a retry is useless or was the last."""
        if not error.may_pass or attempt > len(self._delays):
            raise error
        wait = max(self._delays[attempt - 1] * self._random.uniform(1 - _JITTER, 1 + _JITTER), error.retry_after)
        self.count += 1
        self._log(f"attempt {attempt} of {len(self._delays) + 1} failed: {error}", wait)
        return wait

    def _log(self, failure: str, wait: float) -> None:
        now = time.monotonic()
        if now - self._last_logged < self._quiet_seconds:
            self._unlogged += 1  # hundreds of requests fail at once where an engine dies
            return
        others = f"; so did {self._unlogged} other attempts" if self._unlogged else ""
        logger.warning("%s; trying again in %.3g s%s", failure, wait, others)
        self._last_logged, self._unlogged = now, 0


def patient_delays(seconds: float) -> tuple[float, ...]:
    """`RETRY_DELAYS`, extended to at least ``seconds`` in all: for runs that replace failed engines."""
    more = max(0.0, seconds - sum(RETRY_DELAYS))
    return (*RETRY_DELAYS, *(_LONGEST_DELAY,) * math.ceil(more / _LONGEST_DELAY))


def key_headers(key: str | None) -> dict[str, str]:
    """Headers that carry an API key to engines and routers; none without a key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def make_session(timeout: float | None = None, *, key: str | None = None) -> aiohttp.ClientSession:
    """A session for the running event loop; without ``timeout``, in seconds, only connecting is limited.

    ``key`` is for :func:`key_headers`. Proxies of the environment are ignored: they do not know our loopback.
    """
    import aiohttp

    connect = _CONNECT_SECONDS if timeout is None else None
    return aiohttp.ClientSession(
        headers=key_headers(key),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=connect),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        read_bufsize=_READ_AHEAD,
        auto_decompress=False,  # it would unpack whatever comes, to any size
    )


async def exchange(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    strict: bool = False,
    most: int = MOST_BYTES,
) -> bytes:
    """One attempt with JSON as ``body``; returns the body of a successful answer, or raises `HttpError`.

    ``strict`` accepts status 200 only, and follows no redirects; otherwise those to the same scheme, host and port are
    followed. An answer of more than ``most`` bytes, unpacked, is an error.
    """
    import aiohttp

    if body is not None:
        headers = {**_JSON_HEADERS, **headers} if headers else _JSON_HEADERS
    how, data = method, body
    to: str | yarl.URL = url
    text = b""
    for _ in range(_MOST_REDIRECTS):
        try:
            with ASKED(url):
                async with session.request(how, to, data=data, headers=headers, allow_redirects=False) as answer:
                    content = await _content(answer, most)
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            is_connecting = isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError)
            is_late = isinstance(error, TimeoutError)
            cause = _reason(error, session)
            untrusted = isinstance(error, aiohttp.ClientConnectorCertificateError)
            raise HttpError(
                method, url, None, cause, timed_out=is_late, taken=not is_connecting, untrusted=untrusted
            ) from error
        if content is None:
            problem = f"an answer of more than {most:,} bytes, which are the most that are read here"
            raise HttpError(method, url, answer.status, problem)
        if answer.status == 200 or (not strict and 200 <= answer.status < 300):
            return content
        text = content
        goes_to = answer.headers.get("Location")
        if strict or goes_to is None or answer.status not in _REDIRECTS:
            break
        to = _redirected(method, url, answer.status, to, goes_to)
        if answer.status < 307 and how != "HEAD":  # RFC 9110, 15.4: what is there is to be read, nothing sent again
            how, data = "GET", None
    after = retry_after_seconds(answer.headers.get("Retry-After"))
    raise HttpError(method, url, answer.status, text.decode(errors="backslashreplace"), retry_after=after)


def _redirected(method: str, url: str, status: int, asked: str | yarl.URL, location: str) -> yarl.URL:
    """Where a redirect goes; `HttpError` if that is another server: what is sent is meant for this one."""
    import yarl  # which is what aiohttp reads addresses with

    own = yarl.URL(url)
    try:
        to = yarl.URL(asked).join(yarl.URL(location))
        if (to.scheme, to.host, to.port) == (own.scheme, own.host, own.port):
            return to
    except ValueError:  # not an address
        pass
    problem = (
        f"redirected to {excerpt(location)}, another server; nothing was sent there: give its address if it is meant"
    )
    raise HttpError(method, url, status, problem)


async def _content(answer: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The body of an answer, unpacked; ``None`` if it has more than ``most`` bytes."""
    import aiohttp

    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise aiohttp.ClientPayloadError(f"Content-Encoding {excerpt(encoding)}, which nobody asked for")
    unpack = None if encoding in ("", "identity") else zlib.decompressobj(_GZIP_OR_ZLIB)
    parts, size = [], 0
    async for part in answer.content.iter_any():
        try:
            part = part if unpack is None else unpack.decompress(part, most - size + 1)
        except zlib.error as error:
            raise aiohttp.ClientPayloadError(f"not of the Content-Encoding {encoding} ({error})") from error
        if unpack is not None and unpack.unused_data:  # it would be kept, whatever its size
            raise aiohttp.ClientPayloadError(f"more than one body of the Content-Encoding {encoding}")
        parts.append(part)
        size += len(part)
        if size > most:
            return None
    if unpack is not None and size and not unpack.eof:
        raise aiohttp.ClientPayloadError(f"a body of the Content-Encoding {encoding} is cut off")
    return b"".join(parts)


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None,
    retries: Retries,
    *,
    most: int = MOST_BYTES,
) -> Any:
    """Send a request until it succeeds; returns the parsed answer, or raises the last `HttpError`."""
    attempt = 1
    while True:
        try:
            return parse_body(await exchange(session, method, url, body, most=most))
        except HttpError as error:
            wait = retries.wait_after(attempt, error)
        await asyncio.sleep(min(wait, _LONGEST_DELAY))
        attempt += 1


def call(
    method: str,
    url: str,
    payload: Any = None,
    *,
    key: str | None = None,
    timeout: float = CONTROL_TIMEOUT_SECONDS,
    attempts: int = 1,
) -> Any:
    """Send one request and wait for its answer, for code that is not asynchronous.

    ``key`` is as of :func:`key_headers`. ``timeout`` limits one attempt, in seconds; ``attempts`` above 1 are for
    requests that may be repeated. Returns the answer as :func:`parse_body` gives it, or raises `HttpError`.
    """
    retries = Retries(QUICK_DELAYS[: attempts - 1], quiet_seconds=0.0)
    body = None if payload is None else orjson.dumps(payload)

    async def work() -> Any:
        async with make_session(timeout, key=key) as session:
            return await request(session, method, url, body, retries)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:  # an event loop cannot run inside another
        return thread.submit(asyncio.run, work()).result()


class Service:
    """A reward service or a teacher. Its connections are kept while requests are pending.

    ``timeout`` limits one attempt, in seconds; waiting for a turn is not counted.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url = url
        self._timeout = timeout
        self._turns = asyncio.Semaphore(REQUESTS)
        self._retries = Retries(QUICK_DELAYS[: ATTEMPTS - 1])
        self._pending = 0

    async def ask(self, payload: Any, *, most: int = MOST_BYTES) -> Any:
        """POST ``payload``; returns the answer as :func:`parse_body` gives it, or raises `HttpError`.

        ``most`` is the largest answer that is read, in bytes.
        """
        async with self._kept_session() as session, self._turns:
            try:
                body = orjson.dumps(payload)
            except orjson.JSONEncodeError:  # half a surrogate pair, which a model may write
                body = json.dumps(payload).encode()
            return await request(session, "POST", self.url, body, self._retries, most=most)

    @contextlib.asynccontextmanager
    async def _kept_session(self) -> AsyncIterator[aiohttp.ClientSession]:
        if not self._pending:
            self._session = make_session(self._timeout)
        session = self._session
        self._pending += 1
        try:
            yield session
        finally:
            self._pending -= 1
            if not self._pending:
                await session.close()


def parse_body(content: bytes) -> Any:
    """Parsed JSON; the text if it is not JSON; ``None`` if it is empty."""
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def excerpt(content: bytes | str) -> str:
    """The beginning of a body or message, on one line and printable."""
    start = content[: 10 * _SHOWN]
    start = start.encode(errors="backslashreplace") if isinstance(start, str) else start
    text = " ".join(start.decode(errors="backslashreplace").split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + " …"


def retry_after_seconds(value: str | None, *, now: float | None = None) -> float:
    """The header ``Retry-After`` (RFC 9110, 10.2.3), a number or a date, in seconds from now; 0 if unset or invalid."""
    text = (value or "").strip()
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return 0.0
    return max(0.0, moment - (time.time() if now is None else now))


def _reason(error: Exception, session: aiohttp.ClientSession) -> str:
    import aiohttp

    if isinstance(error, TimeoutError):
        total = session.timeout.total
        return f"no connection within {_CONNECT_SECONDS:g} s" if total is None else f"time limit of {total:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"its certificate is refused ({error.certificate_error}); if an authority of your own signed it, set "
            "SSL_CERT_FILE to that one's certificate"
        )
    if not isinstance(error, aiohttp.ClientConnectorError):
        return f"{type(error).__name__}: {error}"
    number = error.os_error.errno or 0
    return f"no connection ({os.strerror(number) if number > 0 else error.os_error})"
