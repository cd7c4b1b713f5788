"""Requests a second of our client against a bare aiohttp + orjson loop and httpx, before a server that answers at once.

Replies have 2,000 tokens with log-probs (about 90 kB). The bare loop posts, reads and calls `orjson.loads`, and checks
nothing; httpx is `AsyncClient` with `response.json()`. All get the same number of requests from as many workers as are
concurrent, each in an event loop and with connections of its own, alternating. The server is another process and has
its answer ready. A rate is that of the median round; `CPU` is the time of this process for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import orjson
from _extra_packages import extra_packages
from _records import Record
from _servers import allow_many_connections, instant_server

from slime_rollout.generate import EngineClient, SamplingParams

TOKENS, PROMPT = 2000, list(range(1000, 1100))
CONCURRENCY = (64, 256, 1024)
GOAL = 0.8
TIMEOUT = 600.0

Ask = Callable[[], Awaitable[int]]
Side = Callable[[str, int], contextlib.AbstractAsyncContextManager[Ask]]


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all sides at each number of concurrent requests.

    Args:
        out: Not used.
        quick: One round of a tenth of the requests instead of five, and without the most at once.
    """
    sys.path.append(str(extra_packages("httpx")))
    allow_many_connections()
    rounds, requests = (1, 512) if quick else (5, 5120)
    records: list[Record] = []
    with instant_server(TOKENS) as url:
        for concurrent in CONCURRENCY[:-1] if quick else CONCURRENCY:
            records += summarize(concurrent, compare(url, concurrent, rounds, max(requests, 2 * concurrent)))
    return records


def compare(url: str, concurrent: int, rounds: int, requests: int) -> dict[str, tuple[float, float]]:
    """Requests a second and CPU seconds for a request, by side."""
    sides: dict[str, tuple[Side, int]] = {
        "ours": (ours, requests),
        "bare": (bare, requests),
        "httpx": (httpx, max(requests // 5, concurrent)),  # it is slow
    }
    done: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, (side, count) in sides.items():
            wall, cpu = asyncio.run(run(side, url, concurrent, count))
            done[name].append((count / wall, cpu / count))
            print(f"{concurrent} concurrent, round {number}: {name}: {count / wall:.0f} requests/s", flush=True)
    return {name: (median(rate for rate, _ in each), median(cpu for _, cpu in each)) for name, each in done.items()}


async def run(side: Side, url: str, concurrent: int, requests: int) -> tuple[float, float]:
    """Wall and CPU seconds of so many requests. Connections are opened before."""
    async with side(url, concurrent) as ask:
        await asyncio.gather(*(ask() for _ in range(concurrent)))
        left = iter(range(requests))

        async def work() -> None:
            for _ in left:
                if await ask() != TOKENS:
                    raise RuntimeError("a reply has another number of tokens")

        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(concurrent)))
        return time.perf_counter() - wall, time.process_time() - cpu


@contextlib.asynccontextmanager
async def ours(url: str, concurrent: int) -> AsyncIterator[Ask]:
    """`EngineClient.generate`."""
    params = SamplingParams(max_new_tokens=TOKENS).to_request(1)
    async with EngineClient(url, concurrency=concurrent, timeout=TIMEOUT) as client:

        async def ask() -> int:
            return len((await client.generate(PROMPT, params)).tokens)

        yield ask


@contextlib.asynccontextmanager
async def bare(url: str, concurrent: int) -> AsyncIterator[Ask]:
    """aiohttp and orjson, and nothing else."""
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=concurrent)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as session:

        async def ask() -> int:
            async with session.post(f"{url}/generate", data=orjson.dumps(request()), headers=headers) as answer:
                return len(orjson.loads(await answer.read())["output_ids"])

        yield ask


@contextlib.asynccontextmanager
async def httpx(url: str, concurrent: int) -> AsyncIterator[Ask]:
    """httpx as most write it."""
    module: Any = importlib.import_module("httpx")
    limits = module.Limits(max_connections=concurrent)
    async with module.AsyncClient(limits=limits, timeout=TIMEOUT) as client:

        async def ask() -> int:
            answer = await client.post(f"{url}/generate", json=request())
            return len(answer.json()["output_ids"])

        yield ask


def request() -> dict[str, Any]:
    """The request that all send; ours adds an id."""
    params = SamplingParams(max_new_tokens=TOKENS).to_request(1)
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}


def summarize(concurrent: int, figures: dict[str, tuple[float, float]]) -> list[Record]:
    """Rates and CPU times, and our rate over the others'."""
    case, (rate, _) = f"{concurrent} concurrent", figures["ours"]
    records = []
    for name, (requests, cpu) in figures.items():
        records.append(Record(f"{case}: {name}", "rate", requests, "requests/s", more_is_better=True))
        records.append(Record(f"{case}: {name}", "CPU", 1e3 * cpu, "ms", more_is_better=False))
    return [
        *records,
        Record(f"{case}: ours / bare", "rate", rate / figures["bare"][0], "x", more_is_better=True, goal=GOAL),
        Record(f"{case}: ours / httpx", "rate", rate / figures["httpx"][0], "x", more_is_better=True),
    ]
