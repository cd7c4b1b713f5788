"""The HTTP client of `/generate`: bounded, with a deadline, retries of what may pass, and aborts that reach engines."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from slime_core.types import Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion, excerpt, of_failed_update
from slime_rollout.generate.control import EngineControl
from slime_rollout.generate.in_flight import InFlight
from slime_rollout.generate.retry import RETRIED_STATUSES, RETRY_DELAYS, BackOff, Failure

logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""Longest time from :meth:`EngineClient.abort` until the requests it is about have returned."""

_TELL_AGAIN = (0.5, 2.0, 8.0)  # an engine ignores the abort of a request that has not reached it yet
_LEAVING_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_KEEP_ALIVE_SECONDS = 4.0  # SGLang closes a connection that was idle for 5 s
_READ_AHEAD = 2**20
ROUTING_KEY = "X-SMG-Routing-Key"


class EngineClient:
    """Sends generation requests to a router, or straight to an engine. An asynchronous context manager.

    Sent again are requests whose connection was refused or broke, and those answered with 408, 429, 500, 502, 503 or
    504, or with weights of an update that failed, after increasing times or when ``Retry-After`` says. The seed makes a
    repeated request give the same tokens as long as the weights are the same, and the answer says which weights gave
    it. It has a request id of its own, and engines are told to abort the one before, which may still run. Any other
    answer is an error at once: it would be the same again.

    A request that nobody waits for any more, because its task was cancelled or its time is over, is aborted at the
    engines in the background. Leaving the client waits for that, five seconds at most, and stops what is in flight.

    Args:
        url: Address of the router or engine, such as ``http://127.0.0.1:30000``.
        concurrency: Most requests in flight at once; the others wait here, and their time limit has not begun.
        timeout: Time limit of one request with all its retries, in seconds.
        retry_delays: Mean seconds before each retry.
        cache_namespace: Asked before each attempt: engines share cached prefixes only among requests of one namespace
            (SGLang's ``extra_key``); ``None`` is one, too.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout: float,
        retry_delays: Sequence[float] = RETRY_DELAYS,
        cache_namespace: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._url = url.rstrip("/")
        self._cache_namespace = cache_namespace
        # A queue of free places: a semaphore takes longer the more wait for it.
        self._places: asyncio.Queue[None] = asyncio.Queue()
        for _ in range(concurrency):
            self._places.put_nowait(None)
        self._timeout = timeout
        self._back_off = BackOff(retry_delays)
        self._prefix = f"{uuid.uuid4().hex}-"
        self._numbers = itertools.count()
        self._in_flight: dict[str, InFlight] = {}
        self._session: aiohttp.ClientSession | None = None
        self._control: EngineControl | None = None

    @property
    def retries(self) -> int:
        """How many attempts failed and were repeated, of all requests."""
        return self._back_off.retries

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers={"Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=_READ_AHEAD,
        )
        self._control = EngineControl(self._session, self._url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, control = self._opened()
        try:
            for request in self._in_flight.values():  # of tasks that nobody waited for
                request.stop()
                request.leave()
            await _unfinished(list(self._in_flight.values()), _LEAVING_SECONDS)
            await control.close()
        finally:
            self._session = self._control = None
            await session.close()

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling_params: dict[str, Any],
        *,
        rid: str | None = None,
        session_id: str | None = None,
    ) -> Completion:
        """Sample one continuation.

        Args:
            input_ids: Token ids to continue.
            sampling_params: SGLang's, such as :meth:`SamplingParams.to_request` gives.
            rid: Name of the request for :meth:`abort`, like no other in flight and the beginning of none: an engine
                aborts all that begin with it. Made here if not given.
            session_id: Requests of one session go to the same engine, if the router's policy heeds that.

        Returns:
            What was sampled; if it was aborted, with that status and :meth:`Completion.certain` of the tokens so far.

        Raises:
            GenerationError: The engine refused, did not answer in time or not at all, or answered something else; or
                ``rid`` is in flight already.
        """
        body = {"input_ids": list(input_ids), "sampling_params": sampling_params, "return_logprob": True}
        content = await self._post("/generate", body, rid=rid, session_id=session_id)
        done = Completion.nothing() if content is None else Completion.from_json(content)
        return done.certain(sampling_params) if done.status is Status.ABORTED else done

    async def abort(self, rid: str) -> None:
        """Stop one request, wherever it is. Its :meth:`generate` returns the tokens that it has got.

        Returns when it has, after at most :data:`ABORT_SECONDS`; an engine that does not answer within them is left,
        and the tokens with it. For a request of another client: returns when the engines were told.
        """
        _, control = self._opened()
        if (request := self._in_flight.get(rid)) is None:
            await control.abort([rid])
        else:
            await self._stop([request])

    async def abort_all(self) -> None:
        """Stop all requests of this client as :meth:`abort` does, and nobody else's."""
        await self._stop(list(self._in_flight.values()))

    async def _stop(self, requests: Sequence[InFlight]) -> None:
        """Stop requests, each by its name: SGLang drops an abort of what only begins one."""
        _, control = self._opened()
        for request in requests:
            request.stop()
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await control.abort(_sent(requests))
                for pause in (*_TELL_AGAIN, ABORT_SECONDS):
                    if not (requests := await _unfinished(requests, pause)):
                        return
                    await control.abort(_sent(requests))
        except TimeoutError:
            logger.warning("%s: %d aborted requests gave no answer in %g s", self._url, len(requests), ABORT_SECONDS)
            for request in requests:
                request.leave()
            await _unfinished(requests, _LEAVING_SECONDS)

    async def _post(
        self, path: str, body: dict[str, Any], *, rid: str | None = None, session_id: str | None = None
    ) -> bytes | None:
        """The content of a good answer; ``None`` if the request was aborted and there is none."""
        _, control = self._opened()
        request = self._enter(rid)
        try:
            async with request.scope:
                await self._places.get()
                try:
                    return await self._attempts(request, path, body, _headers(session_id))
                finally:
                    self._places.put_nowait(None)
        except TimeoutError:
            control.abort_later(request.sent)
            if request.stopped:
                return None
            raise self._too_late(path, request) from None
        except asyncio.CancelledError:
            control.abort_later(request.sent)
            raise
        finally:
            del self._in_flight[request.rid]
            request.finished.set_result(None)

    def _enter(self, rid: str | None) -> InFlight:
        # Of one length: an engine takes the name of one request for all that begin so.
        request = InFlight(f"{self._prefix}{next(self._numbers):012}" if rid is None else rid)
        if not request.rid or request.rid in self._in_flight:
            raise GenerationError(
                f"the request id {request.rid!r} is {'in flight already' if request.rid else 'empty'}; "
                "give every request its own, or none"
            )
        self._in_flight[request.rid] = request
        return request

    async def _attempts(
        self, request: InFlight, path: str, body: dict[str, Any], headers: dict[str, str] | None
    ) -> bytes | None:
        _, control = self._opened()
        where, waits = self._url + path, self._back_off.waits()
        request.begin(self._timeout)
        while not request.stopped:
            request.name_attempt()
            sent = body | {"rid": request.sent}
            if (namespace := self._cache_namespace()) is not None:
                sent["extra_key"] = namespace
            outcome = await self._attempt(where, _dump(sent), headers)
            if isinstance(outcome, bytes):
                return outcome
            request.problem = outcome.problem
            if outcome.may_run:
                control.abort_later(request.sent)
            if not request.stopped and not await request.pause(self._back_off.next_wait(waits, where, outcome)):
                raise self._too_late(path, request)
        return None

    async def _attempt(self, where: str, body: bytes, headers: dict[str, str] | None) -> bytes | Failure:
        """One request: the body of a good answer, or what went wrong if that is worth another try."""
        session, _ = self._opened()
        try:
            async with session.post(where, data=body, headers=headers, allow_redirects=False) as answer:
                content = await answer.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise GenerationError(
                    f"{where}: this process may open no more files, and each of {len(self._in_flight)} requests is "
                    "one; raise `ulimit -n` or lower --rollout-concurrency"
                ) from error
            return Failure(f"no connection ({excerpt(str(error))})", may_run=False)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return Failure(f"the connection broke ({excerpt(str(error))})")
        except aiohttp.ClientError as error:
            raise GenerationError(f"{where} is no address of a router or engine ({excerpt(str(error))})") from error
        if answer.status == 200:
            if of_failed_update(content):
                return Failure("an engine answered with weights of an update that failed", may_run=False)
            return content
        if answer.status in RETRIED_STATUSES:
            return Failure.of_status(answer.status, excerpt(content), answer.headers.get("Retry-After"))
        raise GenerationError(f"{where} refused a request (HTTP {answer.status}): {excerpt(content)}")

    def _too_late(self, path: str, request: InFlight) -> GenerationError:
        history = f" (attempt {request.attempts}: {request.problem})" if request.problem else ""
        return GenerationError(
            f"{self._url}{path} gave no answer within {self._timeout:g} s{history}; shorten "
            "--rollout-max-response-len, lower --rollout-concurrency or raise --rollout-request-timeout"
        )

    def _opened(self) -> tuple[aiohttp.ClientSession, EngineControl]:
        if self._session is None or self._control is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        return self._session, self._control


async def _unfinished(requests: Sequence[InFlight], seconds: float) -> list[InFlight]:
    """Those that have not returned after so many seconds."""
    if waiting := [request.finished for request in requests if not request.finished.done()]:
        await asyncio.wait(waiting, timeout=seconds)
    return [request for request in requests if not request.finished.done()]


def _sent(requests: Sequence[InFlight]) -> list[str]:
    return [request.sent for request in requests if request.sent]


def _headers(session_id: str | None) -> dict[str, str] | None:
    if session_id is None:
        return None
    plain = session_id.isascii() and session_id.isprintable()
    return {ROUTING_KEY: session_id if plain else urllib.parse.quote(session_id, errors="replace")}


def _dump(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:  # orjson.JSONEncodeError is one
        raise GenerationError(
            f"a request cannot be written as JSON ({error}); give token ids and sampling_params as plain values"
        ) from error
