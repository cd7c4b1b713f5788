"""The base of all weight channels: one update after the other, each complete or not applied at all."""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slime_core.interfaces import NamedTensors
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import REQUEST_TIMEOUT_SECONDS, WeightSyncConfig
from slime_rollout.http import INCOMPLETE, HttpError, call
from slime_rollout.weights.checkpoint import CheckpointReader, is_safetensors
from slime_rollout.weights.inspector import Gathered, check_engines, engine_checksums

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 10.0
# A slow engine still processes the request after we stop waiting for the response.
LAST_WORD_SECONDS = 1.0
Result = TypeVar("Result")


class EngineChannel(abc.ABC):
    """The sending end of a weight sync: ``begin``, ``send`` for each bucket, ``end``.

    Made of a :class:`~slime_rollout.engine.channels.ChannelSpec`, which is all that is left of it when it is pickled;
    no update may be open then. One update at a time. Each of the three raises `WeightSyncError` if an engine refuses or
    is gone, files cannot be written, or they are out of order.

    While weights change, engines do not generate, and requests in flight stay where they are. With the pause mode
    ``retract`` the new weights recompute their KV cache; with ``in_place`` they keep the old one, and the cache of
    prefixes stays, too: see :class:`~slime_rollout.serving_engines.CacheNamespace`.

    A request that may read all weights, at an engine or a receiver, has ``update_weight_timeout`` seconds, any other
    ``update_request_timeout``. With ``check_weight_update_equal`` what engines hold is compared
    (:func:`~slime_rollout.weights.inspector.check_engines`).
    """

    def __init__(self, spec: ChannelSpec | Sequence[str] = (), *former: Any, **named: Any) -> None:
        if not isinstance(spec, ChannelSpec):
            spec = former_spec(spec, *former, **named)
        elif former or named:
            raise TypeError(f"a weight channel takes a ChannelSpec alone, which has {', '.join(named) or 'the rest'}")
        self.spec, self._sync = spec, spec.sync
        self._update: WeightUpdate | None = None
        self._paused = False
        self._sent: Gathered | None = None
        self._shapes: CheckpointReader | None = None
        self._prepare()

    def _prepare(self) -> None:  # noqa: B027 - most transports need nothing
        """Check the spec, and begin with nothing kept."""

    def __reduce__(self) -> tuple[type[EngineChannel], tuple[ChannelSpec]]:
        return type(self), (self.spec,)

    def begin(self, update: WeightUpdate) -> None:
        """Open the update on every engine. Requests in flight continue after :meth:`end`."""
        if self._update is not None:
            raise WeightSyncError(
                f"the update to version {self._version} is still open; end it before version {update.version}"
            )
        self._update, self._paused = update, False
        with self._giving_up_on_error():
            spec, self._sent = self.spec, None
            if self._sync.check_weight_update_equal:
                self._sent = Gathered.for_engines(spec.engine_urls, spec.tp_size, key=spec.key)
            if self._shapes is None and is_safetensors(spec.hf_checkpoint):
                self._shapes = CheckpointReader(Path(spec.hf_checkpoint))
            self._begin()

    def send(self, bucket: NamedTensors) -> int:
        """Send tensors on any device, by their Hugging Face names. They may be changed afterwards.

        Returns the bytes that were sent or written: those of the tensors, or of what changed in them. Raises
        `DataError` if a tensor has another shape than in ``hf_checkpoint``.
        """
        with self._giving_up_on_error():
            if self._shapes is not None:
                self._shapes.check_shapes(bucket)
            sent = self._send(bucket) if bucket else 0
            if self._sent is not None:
                self._sent.add(bucket)
        return sent

    def end(self) -> dict[str, str]:
        """Close the update; return when every engine has confirmed the version and generates again.

        Returns the tensors' checksums at the receiving end, by name; empty if the transport has none. Raises
        `WeightSyncError` also if an engine reports another version, or holds other weights.
        """
        with self._giving_up_on_error():
            checksums = self._end()
            self._on_all(self._flush_cache)
            if self._sent is not None:
                held = dict(zip(self.spec.engine_urls, self._on_all(self._checksums), strict=True))
                check_engines(self._version, held, self._sent)
            self._on_all(self._confirm_version)
            self._on_all(lambda url: self._post(url, "/continue_generation", {}))
            self._confirmed()
        self._update = self._sent = None
        return checksums

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is kept between updates, and drop what an update has begun."""

    def _begin(self) -> None:
        """Prepare for tensors. By default engines take them one bucket after the other, and pause now."""
        self._pause()
        self._on_all(self._open_update)

    @abc.abstractmethod
    def _send(self, bucket: NamedTensors) -> int: ...

    def _end(self) -> dict[str, str]:
        """Have all weights loaded, and generation paused; returns checksums as :meth:`end`."""
        self._on_all(lambda url: self._post(url, "/end_weight_update", {}))
        return {}

    def _confirmed(self) -> None:  # noqa: B027 - most transports keep nothing
        """Drop what only the previous version needed: every engine has the new one."""

    @contextlib.contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        version = self._version
        try:
            yield
        except BaseException as error:
            self._update = self._sent = None
            try:
                self.close()
            finally:
                if self._paused:
                    self._on_all(self._release)
            if isinstance(error, OSError):  # a full disk, a missing directory
                raise WeightSyncError(f"weight version {version}: {error}") from error
            raise

    @property
    def _version(self) -> int:
        if self._update is None:
            raise WeightSyncError("no update is open; call begin(update) first")
        return self._update.version

    def _error(self, text: str, url: str | None = None, silent: Collection[str] = ()) -> WeightSyncError:
        return WeightSyncError(f"weight version {self._version}: {text}", url=url, silent=silent)

    def _on_all(self, action: Callable[[str], Result], urls: Sequence[str] | None = None) -> list[Result]:
        """Run an action on all engines (or other addresses) in parallel, and wait for all.

        The first error is raised, the others are logged. A `WeightSyncError` names all engines that did not respond:
        they can then be replaced together.
        """
        urls = self.spec.engine_urls if urls is None else urls
        with concurrent.futures.ThreadPoolExecutor(max(1, len(urls))) as pool:
            futures = [pool.submit(action, url) for url in urls]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors[1:]:
            logger.error("%s", error)
        if errors and isinstance(errors[0], WeightSyncError):
            errors[0].silent = tuple(
                url for error in errors if isinstance(error, WeightSyncError) for url in error.silent
            )
        return [future.result() for future in futures]

    def _post(self, url: str, path: str, payload: dict[str, Any], *, is_long: bool = False) -> Any:
        """Send one request to one engine; ``is_long`` if it may take as long as reading all weights."""
        try:
            timeout = self._sync.update_weight_timeout if is_long else self._sync.update_request_timeout
            answer = call("POST", url + path, payload, key=self.spec.key, timeout=timeout)
        except HttpError as error:
            raise self._error(str(error), url, (url,) if error.timed_out else ()) from error
        if isinstance(answer, dict) and answer.get("success") is False:
            raise self._error(f"{url}{path}: {answer.get('message')}", url)
        return answer

    def _pause(self) -> None:
        """Stop generating; requests in flight stay. If this process is killed, no engine reports a version."""
        self._paused = True
        self._on_all(lambda url: self._post(url, "/pause_generation", {"mode": self._sync.update_weight_pause_mode}))
        self._on_all(lambda url: self._set_version(url, INCOMPLETE))

    def _set_version(self, url: str, version: str) -> None:
        self._post(url, "/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _open_update(self, url: str) -> None:
        """Let tensors be loaded. An update that a killed trainer left open is closed first."""
        try:
            self._post(url, "/begin_weight_update", {})
        except WeightSyncError as error:
            if "already open" not in str(error):
                raise
            logger.warning("%s still has an earlier update open; closing it", url)
            self._post(url, "/end_weight_update", {})
            self._post(url, "/begin_weight_update", {})

    def _flush_cache(self, url: str) -> None:
        """Drop the cache of prefixes. With ``in_place`` an engine may refuse, because requests are running."""
        try:
            self._post(url, "/flush_cache", {})
        except WeightSyncError as error:
            refused = isinstance(error.__cause__, HttpError) and error.__cause__.status == 400
            if self._sync.update_weight_pause_mode == "retract" or not refused:
                raise
            logger.info("%s has requests running and keeps its cache", url)

    def _checksums(self, url: str) -> list[dict[str, str]]:
        return engine_checksums(url, timeout=self._sync.update_weight_timeout, key=self.spec.key)

    def _confirm_version(self, url: str) -> None:
        """Set the version and read it back."""
        version = str(self._version)
        self._set_version(url, version)
        if (confirmed := engine_weight_version(url, self.spec.key)) != version:
            raise self._error(f"{url} says it has weight version {confirmed!r} after version {version!r} was sent", url)

    def _release(self, url: str) -> None:
        """After an error, leave the engine neither paused nor with an open update or a valid version."""
        limit = min(GIVE_UP_SECONDS, self._sync.update_request_timeout)
        incomplete = {"new_version": INCOMPLETE, "abort_all_requests": False}
        for path, payload in (("/end_weight_update", {}), ("/update_weight_version", incomplete)):
            try:
                call("POST", url + path, payload, key=self.spec.key, timeout=limit)
            except HttpError as error:
                if error.timed_out:  # the next request would time out as well, and everybody waits
                    limit = min(LAST_WORD_SECONDS, self._sync.update_request_timeout)
                    break
        with contextlib.suppress(HttpError):
            call("POST", f"{url}/continue_generation", {}, key=self.spec.key, timeout=limit)


FORMER_ARGUMENTS = {
    "pause_mode": "update_weight_pause_mode",
    "check": "check_weight_update_equal",
    "directory": "update_weight_disk_dir",
    "keep_files": "update_weight_disk_keep_files",
    "backend": "update_weight_transport",
}


def former_spec(urls: Any, /, tp_size: int = 1, *more: Any, **given: Any) -> ChannelSpec:
    """The spec of a channel that is made as in earlier versions; it goes with the next release."""
    text = "a weight channel now takes a ChannelSpec; its former arguments go with the next release"
    if more:
        raise TypeError(f"{text}; name those after tp_size")
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    # One limit now stands for both, where the longer one held for all that takes long.
    limit = max(given.pop(name, REQUEST_TIMEOUT_SECONDS) for name in ("timeout", "load_timeout"))
    sync = {now: given.pop(name) for name, now in FORMER_ARGUMENTS.items() if name in given}
    given = {"engine_urls": urls, "colocate": given.pop("cuda_ipc", False), **given}
    return ChannelSpec(sync=WeightSyncConfig(update_weight_timeout=limit, **sync), tp_size=tp_size, **given)


def engine_weight_version(url: str, key: str | None = None) -> str:
    """The weight version that an engine stamps on its samples."""
    try:
        return str(call("GET", f"{url}/model_info", key=key, attempts=3)["weight_version"])
    except HttpError as error:
        silent = (url,) if error.timed_out else ()
        raise WeightSyncError(f"cannot ask for the weight version: {error}", url=url, silent=silent) from error
    except (KeyError, TypeError) as error:
        text = f"{url}/model_info names no weight version; give the address of an engine"
        raise WeightSyncError(text, url=url) from error
