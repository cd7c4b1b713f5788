"""Engines that others run: asked what they are, checked against the run, and left running at its end."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError, ExternalEngineError
from slime_rollout.engine.external_probe import ExternalEngine, Wanted, mismatches
from slime_rollout.engine.fleet import Progress
from slime_rollout.engine.given_router import AnyRouter, open_router
from slime_rollout.engine.server import HEALTH_TIMEOUT_SECONDS, POLL_SECONDS
from slime_rollout.http import HttpError, call
from slime_rollout.weight_version import INCOMPLETE

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_SECONDS = 5.0
CHECK_SECONDS = 5.0
WARN_AFTER_SECONDS = 10.0
MOST_THREADS = 32
HEALTH_PATH = "/health"
# Paused for new weights, an engine that was started without our environment answers `/health` no more.
PAUSED_HEALTH_PATH = "/model_info"

T = TypeVar("T")


class ExternalFleet:
    """Engines that others run, behind a router. Made by :meth:`attach`; a context manager that detaches on exit.

    Attributes:
        router_url: Where requests go.
        engine_urls: Where control traffic goes: weights, cache, health.
        tp_size: Tensor parallel size of one engine.
        engines: What each of them is.
        startup_seconds: How long it took until the first request could be sent.
    """

    def __init__(self, engines: Sequence[ExternalEngine], router: AnyRouter) -> None:
        self.engines = tuple(engines)
        self._router = router
        self.router_url = router.url
        self.engine_urls = [engine.url for engine in engines]
        self.tp_size = engines[0].tp_size
        self.startup_seconds = 0.0
        self._next_check = 0.0
        self._attached = True
        self._updating = False

    @classmethod
    def attach(
        cls,
        config: EngineConfig,
        *,
        model_path: str,
        dtype: str,
        context_length: int | None,
        log_dir: Path,
        weights_follow: bool = False,
        on_progress: Progress | None = None,
    ) -> ExternalFleet:
        """Find the engines of ``rollout_external_engine_addrs``; return when a router sends them requests.

        Engines that a run which was killed amid an update of the weights has left paused generate again.

        Args:
            config: Where they are, and how the router is started or where it is.
            model_path: Hugging Face directory of the run's model.
            dtype: ``float32``, ``bfloat16`` …
            context_length: Longest prompt plus response in tokens that must fit; not looked at if ``None``.
            log_dir: Directory for ``router.log``; made if missing.
            weights_follow: Whether new weights are sent before the first request, so that it does not matter which
                they have now.
            on_progress: Told how far it is.

        Raises:
            EngineStartError: An engine or the router does not answer within ``engine_startup_timeout``.
            ExternalEngineError: An engine does not fit the run; one line for each thing that does not.
            PortInUseError: The router's port is taken.
        """
        started = time.monotonic()
        urls = config.external_urls
        wait_for_answers(urls, config.engine_startup_timeout, on_progress, before=_go_on)
        engines = _on_all(urls, ExternalEngine.probe)
        wanted = Wanted(
            model_path=model_path,
            dtype=dtype,
            context_length=context_length,
            tp_size=config.rollout_num_gpus_per_engine if config.rollout_num_gpus_per_engine > 1 else None,
            weights_follow=weights_follow,
        )
        if problems := mismatches(engines, wanted):
            raise ExternalEngineError(
                "engines of --rollout-external-engine-addrs do not fit this run:\n  " + "\n  ".join(problems)
            )
        log_dir.mkdir(parents=True, exist_ok=True)
        router = open_router(config, urls, log_path=log_dir / "router.log")
        fleet = cls(engines, router)
        try:
            fleet._use_router(started, config.engine_startup_timeout)
        except BaseException:
            router.stop()
            raise
        fleet.startup_seconds = time.monotonic() - started
        return fleet

    def _use_router(self, started: float, timeout: float) -> None:
        while not self._router.is_ready():
            if time.monotonic() - started > timeout:
                raise EngineStartError(f"{self.router_url} does not answer; see {self._router.log_excerpt()}")
            time.sleep(POLL_SECONDS)
        self._router.add_workers(self.engine_urls)

    @property
    def model_urls(self) -> dict[str, str]:
        """The one model that there is, and where requests for it go."""
        return {"default": self.router_url}

    def check(self) -> None:
        """Raise if the router or an engine is gone. Engines are asked every five seconds at most.

        Raises:
            EngineDiedError: The router has ended, or the router uses an engine no more and it does not answer.
        """
        self._router.check()
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + CHECK_SECONDS
        try:
            used = {url for url, (_, healthy) in self._router.workers().items() if healthy}
        except HttpError:
            return  # the next `check` of the router says what is wrong with it
        unused = [url for url in self.engine_urls if url not in used]
        ask = functools.partial(_answers, path=PAUSED_HEALTH_PATH if self._updating else HEALTH_PATH)
        if silent := [url for url, answers in zip(unused, _on_all(unused, ask), strict=True) if not answers]:
            raise EngineDiedError(f"the engine {silent[0]}, which others run, does not answer; start it again")

    def not_serving(self) -> list[str]:
        """Nothing: nobody here replaces engines that others run."""
        return []

    def engines_behind(self) -> list[str]:
        """None, for the same reason."""
        return []

    def begin_update(self, *, only_behind: bool = False) -> list[str]:
        """Where to send weights now.

        Args:
            only_behind: Only to engines that were replaced: to none.

        Raises:
            EngineDiedError: As :meth:`check`.
        """
        self.check()
        if only_behind:
            return []
        self._updating = True
        return list(self.engine_urls)

    def confirm_update(self, version: int) -> None:
        """Every engine has confirmed ``version``."""
        self._updating = False

    def fail_update(self, silent: Collection[str] = ()) -> bool:
        """The update failed. It is not tried again, for no engine is replaced: always ``False``.

        Args:
            silent: Addresses of the engines that did not answer; left as they are.

        Raises:
            EngineDiedError: As :meth:`check`.
        """
        self._updating = False
        self.check()
        return False

    def stop(self) -> None:
        """Leave the engines: end our router, or take them out of a given one. Does nothing the second time.

        An update of the weights that was cut off is closed, so that the engines generate again; their weight version is
        then ``incomplete``.
        """
        if not self._attached:
            return
        self._attached = False
        self._router.request_stop()
        _on_all(self.engine_urls, release)
        self._router.stop()

    def __enter__(self) -> ExternalFleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def wait_for_answers(
    urls: Sequence[str],
    timeout: float,
    on_progress: Progress | None = None,
    *,
    before: Callable[[str], None] = lambda url: None,
) -> None:
    """Return when all engines answer.

    Args:
        urls: Their addresses.
        timeout: Longest wait in seconds.
        on_progress: Told how far it is.
        before: Done to an engine before each question, until it answers; may raise `HttpError`.

    Raises:
        EngineStartError: One does not.
    """
    started = time.monotonic()
    waiting, warned = list(urls), False

    def answers(url: str, timeout: float) -> bool:
        with contextlib.suppress(HttpError):
            before(url)
        return _answers(url, timeout=timeout)

    while True:
        left = max(timeout - (time.monotonic() - started), POLL_SECONDS)
        answered = _on_all(waiting, functools.partial(answers, timeout=min(left, HEALTH_TIMEOUT_SECONDS)))
        waiting = [url for url, is_up in zip(waiting, answered, strict=True) if not is_up]
        seconds = time.monotonic() - started
        if on_progress is not None:
            on_progress(len(urls) - len(waiting), len(urls), seconds)
        if not waiting:
            return
        if seconds > timeout:
            raise EngineStartError(
                f"the engine {waiting[0]} of --rollout-external-engine-addrs does not answer after {timeout:g} s; "
                "start it, or raise --engine-startup-timeout"
            )
        if seconds > WARN_AFTER_SECONDS and not warned:
            logger.warning("still waiting for engines that others run: %s", ", ".join(waiting))
            warned = True
        time.sleep(POLL_SECONDS)


def release(url: str) -> None:
    """Have an engine generate again that a weight update which was cut off has paused."""
    with contextlib.suppress(HttpError):
        call("POST", f"{url}/end_weight_update", {}, timeout=RELEASE_TIMEOUT_SECONDS)  # refused where none is open
        version = {"new_version": INCOMPLETE, "abort_all_requests": False}
        call("POST", f"{url}/update_weight_version", version, timeout=RELEASE_TIMEOUT_SECONDS)
    with contextlib.suppress(HttpError):
        call("POST", f"{url}/continue_generation", {}, timeout=RELEASE_TIMEOUT_SECONDS)


def _go_on(url: str) -> None:
    """Have an engine generate again that a run which was killed amid a weight update has left paused.

    That update may still be open, and the next one closes it. It is not closed here, as SGLang then waits for all
    requests of an engine that is not paused. Its weights say version ``incomplete`` if they were touched.
    """
    call("POST", f"{url}/continue_generation", {}, timeout=RELEASE_TIMEOUT_SECONDS)


def _answers(url: str, *, path: str = HEALTH_PATH, timeout: float = HEALTH_TIMEOUT_SECONDS) -> bool:
    try:
        call("GET", url + path, timeout=timeout)
    except HttpError:
        return False
    return True


def _on_all(urls: Sequence[str], action: Callable[[str], T]) -> list[T]:
    """Do something with all engines at once; the results in their order."""
    if not urls:
        return []
    with ThreadPoolExecutor(min(len(urls), MOST_THREADS)) as pool:
        return list(pool.map(action, urls))
