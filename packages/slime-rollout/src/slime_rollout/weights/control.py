"""What every weight update asks of the engines, over HTTP: pause, open and close an update, version, go on."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from slime_rollout.engine.config import REQUEST_TIMEOUT_SECONDS
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import HttpError, call
from slime_rollout.weight_version import INCOMPLETE

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 10.0
# An engine that is slow rather than gone takes the request, though nobody waits for its answer.
LAST_WORD_SECONDS = 1.0

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Engines:
    """The engines of one update.

    Attributes:
        urls: The engines themselves, not the router: it knows no control traffic.
        version: The version that they get.
        timeout: Time limit in seconds of a request that loads no files.
        load_timeout: The same of one that takes as long as reading all weights; not less than ``timeout``.
    """

    urls: tuple[str, ...]
    version: int
    timeout: float = REQUEST_TIMEOUT_SECONDS
    load_timeout: float = REQUEST_TIMEOUT_SECONDS

    def on_all(self, action: Callable[[str], Result]) -> list[Result]:
        """Do something on all engines at once, and wait for all.

        Raises:
            Exception: The first error; the others are logged. A `WeightSyncError` names all engines that were silent,
                which can then be replaced together.
        """
        with concurrent.futures.ThreadPoolExecutor(max(1, len(self.urls))) as pool:
            futures = [pool.submit(action, url) for url in self.urls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors[1:]:
            logger.error("%s", error)
        if errors and isinstance(errors[0], WeightSyncError):
            errors[0].silent = tuple(
                url for error in errors if isinstance(error, WeightSyncError) for url in error.silent
            )
        return [future.result() for future in futures]

    def post(self, url: str, path: str, payload: dict[str, Any], *, is_long: bool = False) -> Any:
        """Ask one engine for something.

        Args:
            url: The engine.
            path: What it is asked for.
            payload: The request's body.
            is_long: Whether that takes as long as reading all weights: it gets ``load_timeout`` then.

        Raises:
            WeightSyncError: It refused, or did not answer in time.
        """
        try:
            timeout = max(self.timeout, self.load_timeout) if is_long else self.timeout
            answer = call("POST", url + path, payload, timeout=timeout)
        except HttpError as error:
            text = f"weight version {self.version}: {error}"
            raise WeightSyncError(text, url=url, silent=(url,) if error.timed_out else ()) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise WeightSyncError(f"weight version {self.version}: {url}{path}: {answer.get('message')}", url=url)
        return answer

    def pause(self, mode: str) -> None:
        """Stop generating; requests in flight stay.

        Args:
            mode: ``retract`` or ``in_place``, see :class:`~slime_rollout.weights.channel.EngineChannel`.
        """
        self.on_all(lambda url: self.post(url, "/pause_generation", {"mode": mode}))

    def mark_incomplete(self) -> None:
        """Have paused engines name no version: nothing counts that is sampled before they are told the next."""
        self.on_all(lambda url: self._set_version(url, INCOMPLETE))

    def _set_version(self, url: str, version: str) -> None:
        self.post(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def open_update(self) -> None:
        """Let tensors be loaded; an update that a dead trainer left open is closed before."""
        self.on_all(self._open_update)

    def _open_update(self, url: str) -> None:
        try:
            self.post(url, "/begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            logger.warning("%s has an update open that nobody ended; closing it", url)
            self.post(url, "/end_weight_update", {})
            self.post(url, "/begin_weight_update", {})

    def close_update(self) -> None:
        """All tensors are loaded."""
        self.on_all(lambda url: self.post(url, "/end_weight_update", {}))

    def flush_cache(self, *, must: bool) -> None:
        """Forget what the old weights computed.

        Args:
            must: Whether it is an error that an engine keeps its cache because requests are running.
        """
        self.on_all(lambda url: self._flush_cache(url, must))

    def _flush_cache(self, url: str, must: bool) -> None:
        try:
            self.post(url, "/flush_cache", {})
        except WeightSyncError as error:
            refused = isinstance(error.__cause__, HttpError) and error.__cause__.status == 400
            if must or not refused:
                raise
            logger.info("%s has requests running and keeps its cache", url)

    def confirm_version(self) -> None:
        """Set the version and ask for it.

        Raises:
            WeightSyncError: An engine says that it has another.
        """
        self.on_all(self._confirm_version)

    def _confirm_version(self, url: str) -> None:
        version = str(self.version)
        self._set_version(url, version)
        confirmed = engine_weight_version(url)
        if confirmed != version:
            raise WeightSyncError(
                f"{url} says it has weight version {confirmed!r} after version {version!r} was sent", url=url
            )

    def resume(self) -> None:
        """Generate again."""
        self.on_all(lambda url: self.post(url, "/continue_generation", {}))

    def give_up(self) -> None:
        """After an error, leave no engine paused or with an open update, and none that claims good weights."""
        self.on_all(self._give_up)

    def _give_up(self, url: str) -> None:
        limit = min(GIVE_UP_SECONDS, self.timeout)
        for path, payload in (
            ("/end_weight_update", {}),
            ("/update_weight_version", {"new_version": INCOMPLETE, "abort_all_requests": False}),
        ):
            try:
                call("POST", url + path, payload, timeout=limit)
            except HttpError as error:
                if error.timed_out:  # it would not answer the next one either, and everybody waits
                    limit = min(LAST_WORD_SECONDS, self.timeout)
                    break
        with contextlib.suppress(HttpError):
            call("POST", f"{url}/continue_generation", {}, timeout=limit)


def engine_weight_version(url: str) -> str:
    """The weight version that an engine stamps on its samples.

    Raises:
        WeightSyncError: It does not answer, or it is no SGLang engine.
    """
    try:
        return str(call("GET", f"{url}/model_info", attempts=3)["weight_version"])
    except HttpError as error:
        silent = (url,) if error.timed_out else ()
        raise WeightSyncError(f"cannot ask for the weight version: {error}", url=url, silent=silent) from error
    except (KeyError, TypeError) as error:
        raise WeightSyncError(
            f"{url}/model_info names no weight version; give the address of an engine", url=url
        ) from error
