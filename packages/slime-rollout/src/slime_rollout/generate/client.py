"""The client of `/generate`: bounded, with a deadline, retries, and aborts that reach the engines."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import urllib.parse
import uuid
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from slime_core.types import Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion, FailedUpdateError
from slime_rollout.http import RETRY_DELAYS, HttpError, Retries, excerpt, exchange, make_session
from slime_rollout.limits import ModelLimits

if TYPE_CHECKING:
    from slime_rollout.config import RolloutConfig

logger = logging.getLogger(__name__)

ABORT_SECONDS = 30.0  # from an abort until the requests have returned
CONTROL_SECONDS = 5.0  # to send aborts to the engines
ROUTING_KEY = "X-SMG-Routing-Key"

_ABORT_AGAIN = (0.5, 2.0, 8.0)  # an engine ignores the abort of a request that has not reached it yet
_LEAVING_SECONDS = 1.0
_KNOWN_SECONDS = 2.0  # then the router is asked for its engines again
_LIST_SECONDS = 2.0
_ABORTS_AT_ONCE = 8  # to one engine

# What an answer may take, in bytes of JSON: far more than any engine writes.
_ANSWER_BYTES = 2**20  # beside its tokens
_TOKEN_BYTES = 2**10  # text, log-prob and number of a token
_EXPERTS_BYTES = 2**15  # the experts of a token in all layers
_KEPT_BYTES = 8  # a token that another one was sampled among
_LARGEST_VOCABULARY = 2**19
_MOST_TOKENS = 2**20  # where a request names no limit


class EngineClient:
    """Sends generation requests to a router or an engine. An asynchronous context manager.

    A request that may succeed later is retried (see :class:`~slime_rollout.http.Retries`), also after an answer with
    weights of a failed update. Each attempt has an id of its own, and the engines abort the previous one, which may
    still run.

    sglang-router passes on the fields of a request that it knows; ``return_sampling_mask`` and
    ``return_routed_experts`` are none of them. Requests that need one go straight to one of the router's engines, that
    with the fewest of them, and those of a session to the same one.

    A request whose task is cancelled or whose deadline passes is aborted at the engines in the background. Leaving the
    client waits for that, five seconds at most, and stops what is in flight.

    An engine that computes the tokens of a request again after an update names the experts of the new weights for them.
    So between :meth:`hold` and :meth:`release` no engine has a request that asks for experts: it ends with what was
    sampled, and another one goes on from there.

    Args:
        url: Address of the router or engine, such as ``http://127.0.0.1:30000``.
        concurrency: Most requests in flight; the others are queued, which does not count towards their time limit.
        timeout: Time limit of one request with all its retries, in seconds.
        retry_delays: Mean seconds before each retry.
        cache_namespace: Called before each attempt: engines share cached prefixes only among requests of one namespace
            (SGLang's ``extra_key``); ``None`` is a namespace, too.
        vocab_size: Of the model, where it is known: an answer with other token ids is refused.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int,
        timeout: float,
        retry_delays: Sequence[float] = RETRY_DELAYS,
        cache_namespace: Callable[[], str | None] = lambda: None,
        key: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._where = f"{self.url}/generate"
        self._cache_namespace = cache_namespace
        # A queue of free places: a semaphore takes longer the more requests wait for it.
        self._places: asyncio.Queue[None] = asyncio.Queue()
        for _ in range(concurrency):
            self._places.put_nowait(None)
        self._timeout = timeout
        self.key = key
        self._vocab_size = vocab_size
        self._retries = Retries(retry_delays)
        self._prefix = f"{uuid.uuid4().hex}-"
        self._numbers = itertools.count()
        self._in_flight: dict[str, _Request] = {}
        self._straight: Counter[str] = Counter()  # requests in flight that did not go through the router
        self._control: EngineControl | None = None
        self._may_send = asyncio.Event()
        self._may_send.set()

    @classmethod
    def of(cls, config: RolloutConfig, url: str, **more: Any) -> EngineClient:
        """The client of a run's settings, with ``more`` of the arguments above."""
        sampling, vocabulary = config.sampling, ModelLimits.of(config.data.hf_checkpoint).vocab_size
        concurrency, timeout = sampling.rollout_concurrency, sampling.rollout_request_timeout
        return cls(url, concurrency=concurrency, timeout=timeout, vocab_size=vocabulary, **more)

    @property
    def retries(self) -> int:
        """How many attempts were repeated, of all requests."""
        return self._retries.count

    async def __aenter__(self) -> EngineClient:
        self._control = EngineControl(make_session(key=self.key), self.url)
        return self

    async def __aexit__(self, *_: object) -> None:
        control = self._opened()
        try:
            for request in self._in_flight.values():  # of tasks that nobody awaited
                request.stop()
                request.leave()
            await _pending(list(self._in_flight.values()), lambda request: request.finished, _LEAVING_SECONDS)
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
        with_kept: bool = False,
        experts_from: int | None = None,
    ) -> Completion:
        """Sample one continuation.

        Args:
            sampling_params: SGLang's, such as :meth:`SamplingParams.to_request` gives.
            rid: Name of the request for :meth:`abort`, by default a new one. It must not be the beginning of another's:
                an engine aborts all requests that begin with it.
            session_id: Requests of one session go to the same engine, if the router's policy supports that.
            with_kept: Have the engine say which tokens top-p, top-k or min-p left each token to be sampled from.
            experts_from: Have the engine say which experts it chose, for the input tokens from this one on and all that
                it samples but the last.

        Returns:
            What was sampled; of an aborted request :meth:`Completion.certain` of the tokens so far.

        Raises:
            GenerationError: The engine refused, did not answer in time, or its answer is invalid; or ``rid`` is in
                flight already.
        """
        control, request = self._opened(), self._enter(rid, experts_from is not None)
        body = {"input_ids": list(input_ids), "sampling_params": sampling_params, "return_logprob": True}
        if with_kept:
            body["return_sampling_mask"] = True
        if experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        headers, done, part = _headers(session_id), Completion.nothing(), Completion.nothing()
        most = _most_bytes(len(input_ids), sampling_params, with_kept=with_kept, experts=experts_from is not None)
        try:
            async with request.scope, self._place(request):
                while not request.stopped:
                    if experts_from is not None:
                        await request.wait_for(self._may_send)
                    content, rows = self._next_attempt(request, body, done)
                    try:
                        session = session_id if request.tries == 1 else None  # whose engine may be the problem
                        straight = self._straight_to_engine(control, session)
                        routed = not with_kept and rows is None
                        async with request.asking(), contextlib.nullcontext(self._where) if routed else straight as to:
                            reply = await exchange(
                                control.session, "POST", to, content, headers=headers, strict=True, most=most
                            )
                        part = self._read(to, reply, _tokens_left(body, done), with_kept=with_kept, expert_rows=rows)
                        if not request.held or part.status is not Status.ABORTED or request.stopped:
                            break
                        done, part = done.followed_by(part.certain(sampling_params)), Completion.nothing()
                        request.tries = 0
                        continue
                    except FailedUpdateError as failed:
                        error = HttpError("POST", self._where, None, str(failed), taken=False)
                    except HttpError as failed:
                        error = failed
                    except TimeoutError:  # held, and the engine did not answer
                        control.abort_later(request.sent)
                        continue
                    await self._pause_after(error, control, request)
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
        return done.followed_by(part.certain(sampling_params) if part.status is Status.ABORTED else part)

    async def hold(self) -> None:
        """End every request that asks for experts, and send none until :meth:`release`; each goes on after that.

        Returns when no engine has one, after at most :data:`ABORT_SECONDS`: the tokens of an engine that does not
        answer are sampled again.
        """
        self._may_send.clear()
        if requests := [one for one in self._in_flight.values() if one.asks_experts and not one.answered.done()]:
            for request in requests:
                request.held = True
            for request in await self._abort_until(requests, lambda request: request.answered):
                request.give_up()

    def release(self) -> None:
        """Send what :meth:`hold` held back."""
        self._may_send.set()

    async def abort(self, rid: str) -> None:
        """Stop one request. Its :meth:`generate` returns the tokens so far.

        Returns when it has, after at most :data:`ABORT_SECONDS`: the tokens of an engine that does not answer are lost.
        For a request of another client: returns when the engines took the abort.
        """
        if (request := self._in_flight.get(rid)) is None:
            await self._opened().abort([rid])
        else:
            await self._stop([request])

    async def abort_all(self) -> None:
        """Stop all requests of this client, and no others, as :meth:`abort` does."""
        await self._stop(list(self._in_flight.values()))

    async def _stop(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            request.stop()
        if late := await self._abort_until(requests, lambda request: request.finished):
            for request in late:
                request.leave()
            await _pending(late, lambda request: request.finished, _LEAVING_SECONDS)

    async def _abort_until(
        self, requests: Sequence[_Request], future_of: Callable[[_Request], asyncio.Future[None]]
    ) -> Sequence[_Request]:
        """Abort requests at the engines until their futures are done; those that are not after `ABORT_SECONDS`."""
        control = self._opened()
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                for pause in (*_ABORT_AGAIN, ABORT_SECONDS):
                    await control.abort([request.sent for request in requests if request.sent])
                    if not (requests := await _pending(requests, future_of, pause)):
                        return ()
        except TimeoutError:
            logger.warning("%s: %d aborted requests gave no answer in %g s", self.url, len(requests), ABORT_SECONDS)
        return requests

    def _enter(self, rid: str | None, asks_experts: bool) -> _Request:
        # All of one length: an engine aborts every request whose name begins with the given one.
        request = _Request(f"{self._prefix}{next(self._numbers):012}" if rid is None else rid, asks_experts)
        if not request.rid or request.rid in self._in_flight:
            raise GenerationError(
                f"the request id {request.rid!r} is {'in flight already' if request.rid else 'empty'}; "
                "give every request its own, or none"
            )
        self._in_flight[request.rid] = request
        return request

    @contextlib.asynccontextmanager
    async def _straight_to_engine(self, control: EngineControl, session_id: str | None) -> AsyncIterator[str]:
        """The address of an engine: that of the session, or one with the fewest requests of this kind."""
        urls = sorted(await control.engine_urls())
        if not urls:
            raise HttpError("POST", self._where, None, "the router lists no engine", taken=False)
        url = min(urls, key=lambda one: self._straight[one])
        if session_id is not None:
            url = urls[zlib.crc32(session_id.encode()) % len(urls)]
        self._straight[url] += 1
        try:
            yield f"{url}/generate"
        finally:
            self._straight[url] -= 1

    @contextlib.asynccontextmanager
    async def _place(self, request: _Request) -> AsyncIterator[None]:
        """Wait for one of the places; then the time limit begins."""
        await self._places.get()
        try:
            request.begin(self._timeout)
            yield
        finally:
            self._places.put_nowait(None)

    def _next_attempt(self, request: _Request, body: dict[str, Any], done: Completion) -> tuple[bytes, int | None]:
        """The request for what comes after ``done``, and of how many input tokens it asks the experts."""
        request.attempts += 1
        request.tries += 1
        request.held = False
        request.sent = request.rid if request.attempts == 1 else f"{request.attempts}~{request.rid}"
        attempt = _continued(body, done) | {"rid": request.sent}
        start = attempt.get("routed_experts_start_len")
        if (namespace := self._cache_namespace()) is not None:
            attempt["extra_key"] = namespace
        try:
            return orjson.dumps(attempt), None if start is None else len(attempt["input_ids"]) - 1 - start
        except TypeError as error:  # orjson.JSONEncodeError is one
            raise GenerationError(
                f"a request cannot be written as JSON ({error}); give token ids and sampling_params as plain values"
            ) from error

    def _read(self, url: str, reply: bytes, most: int | None, **asked: Any) -> Completion:
        """As :meth:`Completion.from_json`; errors name the address that has answered."""
        try:
            return Completion.from_json(reply, most=most, vocab_size=self._vocab_size, **asked)
        except FailedUpdateError:
            raise
        except GenerationError as error:
            raise GenerationError(f"{url}: {error}") from error

    async def _pause_after(self, error: HttpError, control: EngineControl, request: _Request) -> None:
        """Wait until the next attempt. Raises GenerationError if there can be none."""
        request.problem = error.problem
        self._check_retriable(error)
        if error.may_run:
            control.abort_later(request.sent)
        if request.stopped:
            return
        try:
            wait = self._retries.wait_after(request.tries, error)
        except HttpError:
            raise GenerationError(
                f"{self._where} failed {request.tries} times, at last with: {error.problem}; "
                "see the logs of router and engines"
            ) from error
        if not await request.pause(wait):
            raise self._too_late(request)

    def _check_retriable(self, error: HttpError) -> None:
        """Raise GenerationError if another attempt would fail in the same way."""
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno == errno.EMFILE:
            raise GenerationError(
                f"{self._where}: this process may open no more files, and each of {len(self._in_flight)} requests is "
                "one; raise `ulimit -n` or lower --rollout-concurrency"
            ) from error
        if not isinstance(cause, TimeoutError | aiohttp.ClientConnectionError | aiohttp.ClientPayloadError | None):
            problem = f"{self._where} is not the address of a router or engine ({error.problem})"
            raise GenerationError(problem) from error
        if not error.may_pass:
            problem = f"{self._where} refused a request (HTTP {error.status}): {excerpt(error.body)}"
            raise GenerationError(problem) from error

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
    """One call of `EngineClient.generate`."""

    def __init__(self, rid: str, asks_experts: bool) -> None:
        self.rid = rid
        self.sent = ""  # the name of the latest attempt; no name is the beginning of another's
        self.attempts = 0
        self.tries = 0  # since it was sent or continued
        self.problem = ""  # of the latest attempt that failed
        self.asks_experts = asks_experts
        self.stopped = False
        self.held = False  # ended by `EngineClient.hold`, and to be continued
        self.scope = asyncio.timeout(None)  # ends at the deadline, or when the engine's answer is not waited for
        self._attempt = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self.answered: asyncio.Future[None] = self._loop.create_future()  # of the latest attempt
        self.answered.set_result(None)
        self._waits_here = True

    def begin(self, seconds: float) -> None:
        """Start the time limit."""
        self._waits_here = False
        if not self.stopped:
            self.scope.reschedule(self._loop.time() + seconds)

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """An attempt. Raises TimeoutError if :meth:`give_up` ends it."""
        self.answered = self._loop.create_future()
        try:
            async with asyncio.timeout(None) as self._attempt:
                yield
        finally:
            self.answered.set_result(None)

    def give_up(self) -> None:
        """End the attempt, if it has not been answered, without its answer."""
        if not (self.answered.done() or self._attempt.expired()):
            self._attempt.reschedule(self._loop.time())

    async def wait_for(self, event: asyncio.Event) -> None:
        """Wait before the first or the next attempt."""
        self._waits_here = True
        await event.wait()
        self._waits_here = False

    async def pause(self, seconds: float) -> bool:
        """Wait before the next attempt; ``False`` at once if the deadline comes before that."""
        if (end := self.scope.when()) is not None and self._loop.time() + seconds >= end:
            return False
        self._waits_here = True
        await asyncio.sleep(seconds)
        self._waits_here = False
        return True

    def stop(self) -> None:
        """Cancel: immediately if it is queued or pausing, otherwise when the engine replies."""
        self.stopped = True
        if self._waits_here:
            self.leave()

    def leave(self) -> None:
        """End now, without the engine's answer."""
        if not (self.finished.done() or self.scope.expired()):
            self.scope.reschedule(self._loop.time())


class EngineControl:
    """Sends aborts to the engines behind a router, which does not forward them. Errors are logged, not raised."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url
        self._known: tuple[str, ...] = ()
        self._known_until = 0.0
        self._later: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def abort(self, rids: Sequence[str]) -> None:
        """Have every engine abort the requests whose names begin with one of these, within `CONTROL_SECONDS`."""
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                urls = await self.engine_urls()
                if not await self._abort_at(urls, rids):
                    self._known_until = 0.0  # one may have been restarted elsewhere
                    await self._abort_at(sorted(set(await self.engine_urls()) - set(urls)), rids)
        except TimeoutError:
            logger.warning("the engines of %s took no abort within %g s", self.url, CONTROL_SECONDS)

    def abort_later(self, rid: str) -> None:
        """As :meth:`abort`, in the background; :meth:`close` waits for it."""
        if not rid:  # never sent, and for an engine every request
            return
        self._later.append(rid)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._abort_pending())

    async def close(self) -> None:
        """Finish what :meth:`abort_later` began, within `CONTROL_SECONDS`."""
        if self._task is None:
            return
        try:
            await asyncio.wait({self._task}, timeout=CONTROL_SECONDS)
        finally:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def engine_urls(self) -> tuple[str, ...]:
        """The router's engines, or the address itself if it is an engine; without an answer, the last known ones."""
        now = asyncio.get_running_loop().time()
        if now >= self._known_until:
            try:
                async with asyncio.timeout(_LIST_SECONDS):
                    self._known = await self._ask()
                self._known_until = now + _KNOWN_SECONDS
            except (HttpError, TimeoutError, ValueError, KeyError, TypeError) as error:
                logger.warning("%s/workers does not list the engines: %s", self.url, excerpt(repr(error)))
        return self._known

    async def _ask(self) -> tuple[str, ...]:
        try:
            content = await exchange(self.session, "GET", f"{self.url}/workers", strict=True)
        except HttpError as error:
            if error.status in (404, 405):  # an engine
                return (self.url,)
            raise
        return tuple(str(worker["url"]).rstrip("/") for worker in orjson.loads(content)["workers"])

    async def _abort_pending(self) -> None:
        while self._later:
            rids, self._later = self._later, []
            await self.abort(rids)

    async def _abort_at(self, urls: Sequence[str], rids: Sequence[str]) -> bool:
        """Whether all engines took all aborts."""
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


async def _pending(
    requests: Sequence[_Request], future_of: Callable[[_Request], asyncio.Future[None]], seconds: float
) -> list[_Request]:
    """The requests whose futures are not done after so many seconds."""
    if waiting := [future for request in requests if not (future := future_of(request)).done()]:
        await asyncio.wait(waiting, timeout=seconds)
    return [request for request in requests if not future_of(request).done()]


def _continued(body: dict[str, Any], done: Completion) -> dict[str, Any]:
    """The request for what comes after the tokens of ``done``, which were sampled before."""
    if not done.tokens:
        return body
    continued = body | {"input_ids": [*body["input_ids"], *done.tokens]}
    if (left := _tokens_left(body, done)) is not None:
        continued["sampling_params"] = body["sampling_params"] | {"max_new_tokens": left}
    if done.experts_TW is not None:
        continued["routed_experts_start_len"] = body["routed_experts_start_len"] + len(done.experts_TW)
    return continued


def _tokens_left(body: dict[str, Any], done: Completion) -> int | None:
    """Most tokens that may come after those of ``done``; ``None`` where the request names no limit."""
    longest = body["sampling_params"].get("max_new_tokens")
    return None if longest is None else longest - len(done.tokens)


def _most_bytes(input_tokens: int, sampling_params: dict[str, Any], *, with_kept: bool, experts: bool) -> int:
    """Size of the largest answer that can be right, by what is asked for."""
    new, top_k = sampling_params.get("max_new_tokens"), sampling_params.get("top_k")
    new_tokens = new if isinstance(new, int) else _MOST_TOKENS
    kept = top_k if isinstance(top_k, int) and top_k > 0 else _LARGEST_VOCABULARY
    tokens = (input_tokens + new_tokens) * (_TOKEN_BYTES + _EXPERTS_BYTES * experts)
    return _ANSWER_BYTES + tokens + new_tokens * kept * _KEPT_BYTES * with_kept


def _headers(session_id: str | None) -> dict[str, str] | None:
    if session_id is None:
        return None
    plain = session_id.isascii() and session_id.isprintable()
    return {ROUTING_KEY: session_id if plain else urllib.parse.quote(session_id, errors="replace")}
