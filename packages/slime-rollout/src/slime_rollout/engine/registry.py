"""Keeps the router's list of engines as it should be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slime_rollout.engine.errors import EngineError
from slime_rollout.engine.router import OFFER_SECONDS
from slime_rollout.engine.server import SGLangEngine
from slime_rollout.engine.slots import AnyRouterSlot, EngineSlot, Event, Occupant, Slot
from slime_rollout.http import HttpError

logger = logging.getLogger(__name__)

TRY_SECONDS = 0.5
LOOK_SECONDS = 5.0
# The router tries an engine that hangs for twice as long as one that refuses connections.
OFFER_AGAIN_SECONDS = 2.0 * OFFER_SECONDS
# A proxy before the router may answer for it while it restarts; the router itself refuses for good.
REFUSED_SECONDS = 30.0

Wanted = Mapping[str, Occupant[SGLangEngine]]
"""By address, the engines that should get requests."""


class Registry:
    """The router's list of engines. Used by the monitor's thread only, except :meth:`look_again`.

    Args:
        engines: All engines.
        router: The router.
        note: Logs an event.
    """

    def __init__(
        self, engines: Sequence[EngineSlot], router: AnyRouterSlot, note: Callable[[Slot[Any], Event, str], None]
    ) -> None:
        self._engines, self._router, self._note = list(engines), router, note
        self._next_look = self._next_try = 0.0
        self._offered: dict[str, float] = {}  # engines that the router does not list yet → when they were offered
        self._refused_since: float | None = None
        self._last_warning = ""

    def look_again(self) -> None:
        """Look as soon as possible: what is wanted has changed. Called from any thread, under the lock."""
        self._next_look = 0.0

    def forget_offers(self) -> None:
        """The router was replaced."""
        self._offered = {}

    def is_due(self, wanted: Wanted) -> bool:
        """Whether to look now: often while an engine is missing, else now and then. Called under the lock.

        A :meth:`look_again` from here on causes another look, also while this one is under way.
        """
        now = time.monotonic()
        if now < (self._next_look if all(occupant.in_router for occupant in wanted.values()) else self._next_try):
            return False
        self._next_try, self._next_look = now + TRY_SECONDS, now + LOOK_SECONDS
        return True

    def take_out(self, url: str) -> None:
        """Remove an engine from the router now, without waiting for the next look."""
        if self._router.now.up:
            try:
                self._router.process.remove_worker(url)
            except HttpError as error:
                logger.warning("the router may still send requests to %s: %s", url, error)

    def register(self, wanted: Wanted) -> None:
        """Remove all other engines from the router, offer it those that it does not know, and note who gets requests.

        Raises:
            EngineError: The router has refused that for :data:`REFUSED_SECONDS`, with an answer that will not change.
        """
        router = self._router.process
        try:
            known = router.workers()
            for url in known.keys() - wanted.keys():
                router.remove_worker(url)
            self._offer({url: occupant for url, occupant in wanted.items() if url not in known})
        except HttpError as error:
            self._failed(error)
            self._next_look = 0.0
            return
        self._refused_since, self._last_warning = None, ""
        for slot in self._engines:
            was, slot.now.in_router = slot.now.in_router, slot.now.in_router and slot.url in wanted
            if not was and slot.url in wanted and known.get(slot.url, ("", False))[1]:
                slot.now.in_router = True
                self._note(slot, Event.REGISTERED, f"with weights {slot.now.weights}")

    def _failed(self, error: HttpError) -> None:
        """Another look may succeed, unless the router refuses; each reason is logged once while it lasts."""
        now = time.monotonic()
        if error.may_pass:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        elif now - self._refused_since > REFUSED_SECONDS:
            raise EngineError(
                f"the router {self._router.url} refuses this run's engines: {error}; see that it is an sglang-router "
                "that accepts workers from this machine"
            ) from error
        if str(error) != self._last_warning:
            self._last_warning = str(error)
            logger.warning("the router's engines cannot be checked: %s", error)

    def _offer(self, missing: Mapping[str, Occupant[SGLangEngine]]) -> None:
        """Offer engines to the router, each only once while it may be trying: one of them may hang unnoticed."""
        now = time.monotonic()
        self._offered = {
            url: since for url, since in self._offered.items() if url in missing and now - since < OFFER_AGAIN_SECONDS
        }
        for url in missing.keys() - self._offered.keys():
            self._router.process.offer_worker(url, missing[url].process.spec.router_role)
            self._offered[url] = now
