"""The client of `/generate`: bounded, with a deadline, retries of what may pass, and aborts that reach the engines."""

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
from slime_rollout.generate.completion import Completion, FailedUpdateError
from slime_rollout.http import RETRY_DELAYS, HttpError, Retries, excerpt, exchange, make_session

logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0
"""Longest time from :meth:`EngineClient.abort` until the requests it is about have returned."""
CONTROL_SECONDS = 5.0
"""Longest time that sending aborts to the engines takes."""
ROUTING_KEY = "X-SMG-Routing-Key"

_ABORT_AGAIN = (0.5, 2.0, 8.0)  # an engine ignores the abort of a request that has not reached it yet
_LEAVING_SECONDS = 1.0
_KNOWN_SECONDS = 2.0  # then the router is asked for its engines again
_ASKING_SECONDS = 2.0
_ABORTS_AT_ONCE = 8  # to one engine


class EngineClient:
    """Sends generation requests to a router, or straight to an engine. An asynchronous context manager.

    A request that may pass is sent again (see :class:`~slime_rollout.http.Retries`), also after an answer with weights
    of an update that failed. Its seed gives the same tokens as long as the weights are the same, and the answer says
    which weights gave it. Each attempt has an id of its own, and engines abort the one before, which may still run.

    A request whose task was cancelled or whose deadline is over is aborted at the engines in the background. Leaving
    the client waits for that, five seconds at most, and stops what is in flight.

    Args:
        url: Address of the router or engine, such as ``http://127.0.0.1:30000``.
        concurrency: Most requests in flight at once; the others wait here, and their time limit has not begun.
        timeout: Time limit of one request with all its retries, in seconds.
        retry_delays: Mean seconds before each retry.
        cache_namespace: Asked before each attempt: engines share cached prefixes only among requests of one namespace
            (SGLang's ``extra_key``); ``None`` is a namespace, too.
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
        self._where = f"{self._url}/generate"
        self._cache_namespace = cache_namespace
        # A queue of free places: a semaphore takes longer the more wait for it.
        self._places: asyncio.Queue[None] = asyncio.Queue()
        for _ in range(concurrency):
            self._places.put_nowait(None)
        self._timeout = timeout
        self._retries = Retries(retry_delays)
        self._prefix = f"{uuid.uuid4().hex}-"
        self._numbers = itertools.count()
        self._in_flight: dict[str, _Request] = {}
        self._control: EngineControl | None = None

    @property
    def retries(self) -> int:
        """How many attempts failed and were repeated, of all requests."""
        return self._retries.count

    async def __aenter__(self) -> EngineClient:
        self._control = EngineControl(make_session(), self._url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        control = self._opened()
        try:
            for request in self._in_flight.values():  # of tasks that nobody waited for
                request.stop()
                request.leave()
            await _unfinished(list(self._in_flight.values()), _LEAVING_SECONDS)
            await control.close()
        finally:
            self._control = None
            await control.session.close()

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
            rid: Name of the request for :meth:`abort`, unlike any other in flight and not the beginning of one: an
                engine aborts all that begin with it. Made here by default.
            session_id: Requests of one session go to the same engine, if the router's policy heeds that.

        Returns:
            What was sampled; if it was aborted, with that status and :meth:`Completion.certain` of the tokens so far.

        Raises:
            GenerationError: The engine refused, did not answer in time or at all, or its answer is invalid; or ``rid``
                is in flight already.
        """
        control, request = self._opened(), self._enter(rid)
        body = {"input_ids": list(input_ids), "sampling_params": sampling_params, "return_logprob": True}
        done = Completion.nothing()
        try:
            async with request.scope:
                await self._places.get()
                try:
                    done = await self._attempts(control, request, body, _headers(session_id))
                finally:
                    self._places.put_nowait(None)
        except TimeoutError:
            control.abort_later(request.sent)
            if not request.stopped:
                raise self._too_late(request) from None
        except asyncio.CancelledError:
            control.abort_later(request.sent)
            raise
        finally:
            del self._in_flight[request.rid]
            request.finished.set_result(None)
        return done.certain(sampling_params) if done.status is Status.ABORTED else done

    async def abort(self, rid: str) -> None:
        """Stop one request, wherever it is. Its :meth:`generate` returns the tokens so far.

        Returns when it has, after at most :data:`ABORT_SECONDS`; an engine that does not answer within them is left,
        and the tokens with it. For a request of another client: returns when the engines were asked.
        """
        if (request := self._in_flight.get(rid)) is None:
            await self._opened().abort([rid])
        else:
            await self._stop([request])

    async def abort_all(self) -> None:
        """Stop all requests of this client as :meth:`abort` does, and nobody else's."""
        await self._stop(list(self._in_flight.values()))

    async def _stop(self, requests: Sequence[_Request]) -> None:
        """Stop requests, each by its name: SGLang drops an abort of a mere beginning."""
        control = self._opened()
        for request in requests:
            request.stop()
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await control.abort(_sent(requests))
                for pause in (*_ABORT_AGAIN, ABORT_SECONDS):
                    if not (requests := await _unfinished(requests, pause)):
                        return
                    await control.abort(_sent(requests))
        except TimeoutError:
            logger.warning("%s: %d aborted requests gave no answer in %g s", self._url, len(requests), ABORT_SECONDS)
            for request in requests:
                request.leave()
            await _unfinished(requests, _LEAVING_SECONDS)

    def _enter(self, rid: str | None) -> _Request:
        # Of one length: an engine takes the name of one request for all that begin so.
        request = _Request(f"{self._prefix}{next(self._numbers):012}" if rid is None else rid)
        if not request.rid or request.rid in self._in_flight:
            raise GenerationError(
                f"the request id {request.rid!r} is {'in flight already' if request.rid else 'empty'}; "
                "give every request its own, or none"
            )
        self._in_flight[request.rid] = request
        return request

    async def _attempts(
        self, control: EngineControl, request: _Request, body: dict[str, Any], headers: dict[str, str] | None
    ) -> Completion:
        request.begin(self._timeout)
        while not request.stopped:
            request.name_attempt()
            sent = body | {"rid": request.sent}
            if (namespace := self._cache_namespace()) is not None:
                sent["extra_key"] = namespace
            try:
                content = await exchange(
                    control.session, "POST", self._where, _dump(sent), headers=headers, strict=True
                )
                return Completion.from_json(content)
            except FailedUpdateError as failed:
                error = HttpError("POST", self._where, None, str(failed), taken=False)
            except HttpError as failed:
                error = failed
            wait = self._wait_after(control, request, error)
            if not request.stopped and not await request.pause(wait):
                raise self._too_late(request)
        return Completion.nothing()

    def _wait_after(self, control: EngineControl, request: _Request, error: HttpError) -> float:
        """Seconds until the next attempt.

        Raises:
            GenerationError: Another attempt is not allowed, or would fail in the same way.
        """
        request.problem = error.problem
        if (hopeless := self._hopeless(error)) is not None:
            raise hopeless from error
        if error.may_run:
            control.abort_later(request.sent)
        if request.stopped:
            return 0.0
        try:
            return self._retries.wait_after(request.attempts, error)
        except HttpError:
            raise GenerationError(
                f"{self._where} failed {request.attempts} times, at last with: {error.problem}; "
                "see the logs of router and engines"
            ) from error

    def _hopeless(self, error: HttpError) -> GenerationError | None:
        """Why another attempt would fail in the same way, if it would."""
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            return GenerationError(
                f"{self._where}: this process may open no more files, and each of {len(self._in_flight)} requests is "
                "one; raise `ulimit -n` or lower --rollout-concurrency"
            )
        if not isinstance(cause, TimeoutError | aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | None):
            return GenerationError(f"{self._where} is not the address of a router or engine ({error.problem})")
        if error.may_pass:
            return None
        return GenerationError(f"{self._where} refused a request (HTTP {error.status}): {excerpt(error.body)}")

    def _too_late(self, request: _Request) -> GenerationError:
        history = f" (attempt {request.attempts}: {request.problem})" if request.problem else ""
        return GenerationError(
            f"{self._where} gave no answer within {self._timeout:g} s{history}; shorten "
            "--rollout-max-response-len, lower --rollout-concurrency or raise --rollout-request-timeout"
        )

    def _opened(self) -> EngineControl:
        if self._control is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        return self._control


class _Request:
    """One call of `EngineClient.generate`.

    Attributes:
        rid: The request's name for the caller.
        sent: Its name for the engines, which differs from attempt to attempt; empty before the first.
        attempts: How many were sent.
        problem: What was wrong with the last one that failed.
        stopped: Whether it is to stop.
        finished: Done as soon as the call returns.
        scope: Entered around everything; ends at the deadline, or when the answer is not waited for.
    """

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.sent = ""
        self.attempts = 0
        self.problem = ""
        self.stopped = False
        self.scope = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._waits_here = True

    def begin(self, seconds: float) -> None:
        """There is room for it: its time limit begins."""
        self._waits_here = False
        if not self.stopped:
            self.scope.reschedule(self._loop.time() + seconds)

    def name_attempt(self) -> None:
        """Name the next attempt. No name is the beginning of another: engines abort all that begin alike."""
        self.attempts += 1
        self.sent = self.rid if self.attempts == 1 else f"{self.attempts}~{self.rid}"

    async def pause(self, seconds: float) -> bool:
        """Wait before the next attempt; ``False`` at once if the deadline comes before that."""
        if (end := self.scope.when()) is not None and self._loop.time() + seconds >= end:
            return False
        self._waits_here = True
        await asyncio.sleep(seconds)
        self._waits_here = False
        return True

    def stop(self) -> None:
        """Cancel: immediately if it waits here, otherwise when the engine replies."""
        self.stopped = True
        if self._waits_here:
            self.leave()

    def leave(self) -> None:
        """End it now, without the engine's answer."""
        if not (self.finished.done() or self.scope.expired()):
            self.scope.reschedule(self._loop.time())


class EngineControl:
    """Sends aborts to the engines behind an address; sglang-router does not. Errors are logged, not raised.

    Args:
        session: What to send with.
        url: Address of a router, or of one engine.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self._url = url
        self._known: tuple[str, ...] = ()
        self._known_until = 0.0
        self._later: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def abort(self, rids: Sequence[str]) -> None:
        """Ask every engine to abort these requests, and those whose names begin with one of theirs.

        Takes at most :data:`CONTROL_SECONDS`.
        """
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                urls = await self.engine_urls()
                if not await self._abort_at(urls, rids):
                    self._known_until = 0.0  # one may have been restarted elsewhere
                    await self._abort_at(sorted(set(await self.engine_urls()) - set(urls)), rids)
        except TimeoutError:
            logger.warning("the engines of %s took no abort within %g s", self._url, CONTROL_SECONDS)

    def abort_later(self, rid: str) -> None:
        """As :meth:`abort`, in the background; :meth:`close` waits for it.

        Nothing happens for an empty ``rid``, that of a request that was never sent: it would be all requests.
        """
        if not rid:
            return
        self._later.append(rid)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._abort_pending())

    async def close(self) -> None:
        """Finish what :meth:`abort_later` began; takes at most :data:`CONTROL_SECONDS`."""
        if self._task is None:
            return
        try:
            await asyncio.wait({self._task}, timeout=CONTROL_SECONDS)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def engine_urls(self) -> tuple[str, ...]:
        """The router's engines, or the address itself if it is an engine; at most two seconds old.

        Without an answer: those that were known before.
        """
        now = asyncio.get_running_loop().time()
        if now >= self._known_until:
            try:
                async with asyncio.timeout(_ASKING_SECONDS):
                    self._known = await self._ask()
                self._known_until = now + _KNOWN_SECONDS
            except (HttpError, TimeoutError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s/workers does not list the engines: %s", self._url, excerpt(repr(error)))
        return self._known

    async def _ask(self) -> tuple[str, ...]:
        try:
            content = await exchange(self.session, "GET", f"{self._url}/workers", strict=True)
        except HttpError as error:
            if error.status in (404, 405):  # an engine
                return (self._url,)
            raise
        return tuple(str(worker["url"]).rstrip("/") for worker in orjson.loads(content)["workers"])

    async def _abort_pending(self) -> None:
        while self._later:
            rids, self._later = self._later, []
            await self.abort(rids)

    async def _abort_at(self, urls: Sequence[str], rids: Sequence[str]) -> bool:
        """Whether all of these engines took all aborts."""
        lanes = [rids[lane::_ABORTS_AT_ONCE] for lane in range(min(_ABORTS_AT_ONCE, len(rids)))]
        return all(await asyncio.gather(*(self._abort_in_turn(url, lane) for url in urls for lane in lanes)))

    async def _abort_in_turn(self, url: str, rids: Sequence[str]) -> bool:
        try:
            for rid in rids:
                body = orjson.dumps({"rid": rid})
                await exchange(self.session, "POST", f"{url}/abort_request", body, strict=True)
        except HttpError as error:
            logger.warning("%s/abort_request failed: %s", url, error.problem)
            return False
        return True


async def _unfinished(requests: Sequence[_Request], seconds: float) -> list[_Request]:
    """Those that have not returned after so many seconds."""
    if waiting := [request.finished for request in requests if not request.finished.done()]:
        await asyncio.wait(waiting, timeout=seconds)
    return [request for request in requests if not request.finished.done()]


def _sent(requests: Sequence[_Request]) -> list[str]:
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
