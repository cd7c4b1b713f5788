"""Engines' memory by request: what SGLang gives back, and takes again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from slime_core.memory import Held
from slime_rollout.http import HttpError, call

logger = logging.getLogger(__name__)

IDLE_SECONDS = 30.0  # until an engine has ended what was aborted
POLL_SECONDS = 0.2
TAGS = {Held.WEIGHTS: ("weights",), Held.EVERYTHING: ("kv_cache", "cuda_graph")}
"""SGLang's names of what an engine holds at each state, and not at the one before it."""


class EngineMemory:
    """Knows what each engine has given back: SGLang ends one that is asked for more, or to take what it has.

    An address means one process, so an engine that replaces another has everything. On a CPU engines take part in the
    order, and keep their memory: SGLang's memory saver needs a GPU. (Not run on CUDA.) ``key`` is the engines' API key.
    """

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._released: dict[str, set[str]] = {}

    def release(self, urls: Sequence[str], down_to: Held) -> list[str]:
        """Have idle engines hold no more than ``down_to``; returns those that failed or stay busy."""
        return self._on_each(urls, lambda url: self._release(url, down_to))

    def resume(self, urls: Sequence[str], up_to: Held) -> list[str]:
        """Have engines hold ``up_to`` again; returns those that failed. Weights that were released are undefined."""
        return self._on_each(urls, lambda url: self._resume(url, up_to))

    def _on_each(self, urls: Sequence[str], ask: Callable[[str], None]) -> list[str]:
        failed = []
        for url in urls:
            try:
                ask(url)
            except HttpError as error:
                logger.warning("%s does not hand its memory over: %s", url, error)
                failed.append(url)
        return failed

    def _release(self, url: str, down_to: Held) -> None:
        if url not in self._released:
            found = call("GET", f"{url}/server_info", key=self._key)
            if not isinstance(found, dict):
                raise HttpError("GET", f"{url}/server_info", 200, f"not about an engine: {str(found)[:200]}")
            if not found.get("enable_memory_saver"):
                level = logging.INFO if found.get("device") == "cpu" else logging.WARNING
                logger.log(level, "%s runs without --enable-memory-saver: it keeps its memory while it sleeps", url)
        released = self._released.setdefault(url, set())
        tags = [tag for state, names in TAGS.items() for tag in names if state > down_to and tag not in released]
        if tags:
            _wait_until_idle(url, self._key)
            call("POST", f"{url}/release_memory_occupation", {"tags": tags}, key=self._key)
            released.update(tags)

    def _resume(self, url: str, up_to: Held) -> None:
        released = self._released.get(url, set())
        tags = [tag for state, names in TAGS.items() for tag in names if state <= up_to and tag in released]
        if tags:
            call("POST", f"{url}/resume_memory_occupation", {"tags": tags}, key=self._key)
            released.difference_update(tags)


def _wait_until_idle(url: str, key: str | None) -> None:
    """Wait until an engine has ended what was aborted: one that is asked for its memory before that ends itself.

    One that gives no answer at all is not busy: it has died, or hangs, and is not waited for.
    """
    end = time.monotonic() + IDLE_SECONDS
    while True:
        try:
            call("POST", f"{url}/flush_cache", key=key)  # refused while requests are running
        except HttpError as error:
            if error.status is None or time.monotonic() > end:
                raise
            time.sleep(POLL_SECONDS)
        else:
            return
