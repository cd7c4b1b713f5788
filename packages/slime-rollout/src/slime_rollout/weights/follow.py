"""Engines that follow the weights which are published in a directory, without the publisher knowing of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType

from slime_core.errors import DamagedError, IntegrityError, SlimeError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine.config import REQUEST_TIMEOUT_SECONDS
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.channel import EngineChannel, check_alive
from slime_rollout.weights.control import Engines, engine_weight_version
from slime_rollout.weights.disk import load_from_disk
from slime_rollout.weights.local import LocalCheckpoint, LocalVersion
from slime_rollout.weights.publication import newest_version

logger = logging.getLogger(__name__)

# How long the others wait for an engine that is slower than they are.
LATE_SECONDS = 10.0
# Of the model, before one more is written.
MOST_COPIES = 2


@dataclasses.dataclass
class LoadChannel(EngineChannel):
    """Has engines load a checkpoint that is on their machine: ``begin``, ``end``.

    Attributes:
        path: The checkpoint.
    """

    path: str = ""

    def close(self) -> None:
        """Nothing is kept."""

    def _begin(self, update: Engines) -> None:
        check_alive(update)

    def _send(self, update: Engines, bucket: NamedTensors) -> None:
        raise WeightSyncError(f"weight version {update.version} is in {self.path}; nothing is sent")

    def _end(self, update: Engines) -> dict[str, str]:
        self._pause(update)
        update.on_all(lambda url: load_from_disk(update, url, self.path))
        return {}


class Follower:
    """Brings a checkpoint, and the engines that are to have it, to the version that was published last.

    Engines are served beside each other: one that hangs keeps no other from a newer version. The copy that it may still
    be reading stays until then, so that there may be three.

    Args:
        checkpoint: Of this machine.
        source: Where versions are published.
        engine_urls: Engines that see the checkpoint under its path; they may be none.
        pause_mode: ``retract`` or ``in_place``, see :class:`~slime_rollout.weights.channel.EngineChannel`.
        timeout: Time limit of one request to an engine, in seconds.
    """

    def __init__(
        self,
        checkpoint: LocalCheckpoint,
        source: Path,
        engine_urls: tuple[str, ...] = (),
        *,
        pause_mode: str = "retract",
        timeout: float = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        self._checkpoint, self._source = checkpoint, source
        self._urls = tuple(url.rstrip("/") for url in engine_urls)
        self._pause_mode, self._timeout = pause_mode, timeout
        self._loaded: dict[str, LocalVersion] = {}
        self._pool = ThreadPoolExecutor(max(1, len(self._urls)), thread_name_prefix="engine-follows")
        self._under_way: dict[str, tuple[LocalVersion, Future[bool]]] = {}
        self._failed: dict[str, BaseException] = {}

    @property
    def late(self) -> tuple[str, ...]:
        """Addresses of the engines that the last :meth:`step` did not wait for; the next one looks at them again."""
        return tuple(self._under_way)

    def step(self, *, wait_for_all: bool = False) -> LocalVersion | None:
        """Do what there is to do.

        Args:
            wait_for_all: Wait for all engines, and not only for a while once one of them is done.

        Returns:
            The version, if anything was done; ``None`` if there was nothing to do.

        Raises:
            SlimeError: A version is damaged, is missing, or was made from another base; or an engine refused it or is
                gone, which does not keep it from the others. Another call tries again, and an engine's error is raised
                until it has a version.
        """
        was_updated = wait_for_all and self._finished(wait_for_all=True)  # what was begun with an older version
        before = self._checkpoint.current
        local = self._pulled()
        if local.version is None:
            return None
        for url in self._urls:
            if url not in self._under_way:
                self._under_way[url] = (local, self._pool.submit(self._update, url, local))
        was_updated |= self._finished(wait_for_all=wait_for_all)
        for url in self._urls:
            if url in self._failed:
                raise self._failed[url].with_traceback(None)  # it is raised many times
        return local if was_updated or local != before else None

    def _finished(self, *, wait_for_all: bool) -> bool:
        """Wait for engines, and note what became of those that are done; returns whether one was updated."""
        futures = [future for _, future in self._under_way.values()]
        if wait_for_all:
            wait(futures)
        else:
            wait(futures, return_when=FIRST_COMPLETED)
            wait(futures, timeout=LATE_SECONDS)
        was_updated = False
        for url, (_, future) in list(self._under_way.items()):
            if not future.done():
                continue
            del self._under_way[url]
            if (error := future.exception()) is None:
                self._failed.pop(url, None)
                was_updated |= future.result()
            else:
                if self._failed and url not in self._failed:
                    logger.error("%s", error)  # only one of them is raised
                self._failed[url] = error
        return was_updated

    def _pulled(self) -> LocalVersion:
        if not self._source.is_dir():
            raise DamagedError(f"{self._source} is gone; have this machine see it again")
        held = {local.path for local, _ in self._under_way.values()}
        if len(held | {self._checkpoint.current.path}) > MOST_COPIES:
            return self._checkpoint.current  # engines hang with different versions: first one of them must end
        while (version := newest_version(self._source)) is not None:
            try:
                return self._checkpoint.pull(version, keep=held)
            except IntegrityError:
                if newest_version(self._source) == version:
                    raise  # and not only a version that went when the next one came
        return self._checkpoint.current

    def _update(self, url: str, local: LocalVersion) -> bool:
        """Have an engine load what it has not; returns whether it had not."""
        if self._loaded.get(url) == local and engine_weight_version(url) == str(local.version):
            return False
        self._loaded.pop(url, None)  # it was started anew, or was told by somebody else
        channel = LoadChannel(
            (url,),
            timeout=self._timeout,
            load_timeout=self._timeout,
            pause_mode=self._pause_mode,
            path=str(local.path),
        )
        channel.begin(int(local.version or 0))
        channel.end()
        self._loaded[url] = local
        return True


class Patience:
    """Goes on after errors, for as long as they may last.

    Args:
        seconds: From the first error to the last that is endured, if nothing goes well between them.
        tell: Called with each error's text when it is another than the one before.

    Attributes:
        failures: Errors since something went well.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds, self._tell = seconds, tell
        self._since: float | None = None
        self._told = ""
        self.failures = 0

    def __enter__(self) -> Patience:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            self._since, self._told, self.failures = None, "", 0
            return False
        if not isinstance(error, SlimeError | OSError):
            return False
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._seconds:
            return False
        self.failures += 1
        if str(error) != self._told:
            self._told = str(error)
            self._tell(self._told)
        return True
