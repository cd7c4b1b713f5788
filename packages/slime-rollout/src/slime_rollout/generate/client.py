"""The HTTP client of `/generate`: bounded concurrency, a time limit, a few logged retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from slime_rollout.errors import GenerationError
from slime_rollout.generate.completion import Completion

logger = logging.getLogger(__name__)

RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each retry: long enough for sglang-router to find a restarted engine."""


class EngineClient:
    """Sends generation requests to a router, or straight to an engine. An asynchronous context manager.

    A refused or broken connection and an answer of 500 or above are tried again: the seed makes a repeated request give
    the same tokens as long as the weights are the same, and the answer says which weights gave it. Everything else is
    an error at once: a 4xx would be refused again, and a request that took too long would take as long again.

    Args:
        url: Address of the router or engine, such as ``http://127.0.0.1:30000``.
        concurrency: Most requests in flight at once; the others wait here, and their time limit has not begun.
        timeout: Time limit of one request, in seconds.
        retry_delays: Seconds before each retry.
    """

    def __init__(
        self, url: str, *, concurrency: int, timeout: float, retry_delays: Sequence[float] = RETRY_DELAYS
    ) -> None:
        self._url = url.rstrip("/")
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._retry_delays = tuple(retry_delays)
        self._session: aiohttp.ClientSession | None = None
        self.retries = 0

    async def __aenter__(self) -> EngineClient:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, input_ids: Sequence[int], sampling_params: dict[str, Any]) -> Completion:
        """Sample one continuation.

        Args:
            input_ids: Token ids to continue.
            sampling_params: SGLang's, such as :meth:`SamplingParams.to_request` gives.

        Raises:
            GenerationError: The engine refused, did not answer in time or not at all, or answered something else.
        """
        body = {"input_ids": list(input_ids), "sampling_params": sampling_params, "return_logprob": True}
        async with self._slots:
            return Completion.from_reply(await self._post("/generate", orjson.dumps(body)))

    async def _post(self, path: str, body: bytes) -> Any:
        for delay in (*self._retry_delays, None):
            problem = await self._attempt(path, body)
            if isinstance(problem, bytes):
                return _parse(problem)
            if delay is None:
                raise GenerationError(
                    f"{self._url}{path} failed {len(self._retry_delays) + 1} times, at last with: {problem}; "
                    "see the logs of router and engines"
                )
            self.retries += 1
            logger.warning("%s%s: %s; trying again in %g s", self._url, path, problem, delay)
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _attempt(self, path: str, body: bytes) -> bytes | str:
        """One request: the body of a good answer, or what went wrong if that is worth another try."""
        if self._session is None:
            raise RuntimeError("EngineClient is used outside `async with`")
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(self._url + path, data=body, headers=headers) as answer:
                content = await answer.read()
        except TimeoutError:
            raise GenerationError(
                f"{self._url}{path} gave no answer within {self._timeout:g} s; shorten --rollout-max-response-len, "
                "lower --rollout-concurrency or raise --rollout-request-timeout"
            ) from None
        except aiohttp.ClientConnectionError as error:
            return f"no connection ({error})"
        except aiohttp.ClientPayloadError as error:
            return f"the connection broke ({error})"
        except aiohttp.ClientError as error:
            raise GenerationError(f"{self._url}{path} is no address of a router or engine ({error})") from error
        if answer.status >= 500:
            return f"HTTP {answer.status}: {_excerpt(content)}"
        if answer.status != 200:
            raise GenerationError(f"{self._url}{path} refused a request (HTTP {answer.status}): {_excerpt(content)}")
        return content


def _parse(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise GenerationError(f"an engine's reply is no JSON ({error.msg}): {_excerpt(content)}") from error


def _excerpt(content: bytes) -> str:
    """An error body on one line, shortened."""
    text = " ".join(content.decode(errors="replace").split())
    return text if len(text) <= 500 else text[:500] + " …"
