"""Engines that follow the weights which are published in a directory, without the publisher knowing of them."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from slime_core.errors import DamagedError, IntegrityError, SlimeError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.engine.weight_sync import REQUEST_TIMEOUT_SECONDS
from slime_rollout.weights.channel import EngineChannel, check_alive
from slime_rollout.weights.control import Engines, engine_weight_version
from slime_rollout.weights.disk import load_from_disk
from slime_rollout.weights.local import LocalCheckpoint, LocalVersion
from slime_rollout.weights.publication import newest_version

logger = logging.getLogger(__name__)


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

    def step(self) -> LocalVersion | None:
        """Do what there is to do.

        Returns:
            The version, if anything was done; ``None`` if there was nothing to do.

        Raises:
            SlimeError: A version is damaged, is missing, or was made from another base; or an engine refused it or is
                gone, which does not keep it from the others. Another call tries again.
        """
        before = self._checkpoint.current
        local = self._pulled()
        if local.version is None:
            return None
        updates = Engines(self._urls, local.version).on_all(lambda url: self._update(url, local))
        return local if any(updates) or local != before else None

    def _pulled(self) -> LocalVersion:
        if not self._source.is_dir():
            raise DamagedError(f"{self._source} is gone; have this machine see it again")
        while (version := newest_version(self._source)) is not None:
            try:
                return self._checkpoint.pull(version)
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
