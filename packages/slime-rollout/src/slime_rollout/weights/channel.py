"""What all weight channels have in common: one update after the other, each complete or not applied at all."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from slime_core.interfaces import NamedTensors
from slime_core.types import WeightUpdate
from slime_rollout.engine.config import REQUEST_TIMEOUT_SECONDS
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.checkpoint import CheckpointReader, is_safetensors
from slime_rollout.weights.engines import EngineUpdate, SentDigests, check_engines


@dataclasses.dataclass
class EngineChannel(abc.ABC):
    """The sending end of a weight sync: ``begin``, ``send`` for each bucket, ``end``.

    Picklable while no update is open; what is kept between updates stays behind. One update at a time.

    While weights change, engines do not generate, and requests in flight stay where they are. With the pause mode
    ``retract`` their KV cache is dropped; they continue from their tokens so far, which the new weights
    recompute, and the cache of prefixes is flushed. With ``in_place`` they keep the keys and values that the old
    weights computed, which costs nothing. SGLang then refuses to flush the cache of prefixes as long as requests are
    running. So a new request that shares a prefix with an earlier one would meet old keys and values, unless it has
    another ``extra_key``: see :class:`~slime_rollout.generation_service.CacheNamespace`.

    Attributes:
        engine_urls: The engines themselves, not the router: it forwards no control requests.
        tp_size: Tensor parallel size of one engine.
        timeout: Time limit in seconds of a request that loads no files.
        load_timeout: Time limit of a request that may read all weights, at an engine or a receiver.
        pause_mode: ``retract`` or ``in_place``.
        check: Compare checksums of what the engines hold, see :func:`slime_rollout.weights.engines.check_engines`.
        hf_checkpoint: What the engines were started with. If it is in safetensors, a tensor of another shape is refused
            before any engine gets it, since not every engine would survive it.
    """

    engine_urls: tuple[str, ...]
    tp_size: int = 1
    timeout: float = REQUEST_TIMEOUT_SECONDS
    load_timeout: float = REQUEST_TIMEOUT_SECONDS
    pause_mode: str = "retract"
    check: bool = False
    hf_checkpoint: str = ""

    def __post_init__(self) -> None:
        self.engine_urls = tuple(url.rstrip("/") for url in self.engine_urls)
        self._forget()

    def _forget(self) -> None:
        """Set what is not pickled."""
        self._update: EngineUpdate | None = None
        self._touched = False
        self._digests: SentDigests | None = None
        self._shapes: CheckpointReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def begin(self, update: WeightUpdate) -> None:
        """Open the update on every engine. Requests in flight continue after :meth:`end`.

        Raises:
            WeightSyncError: An engine refused or is gone, an update is already open on this channel, or files cannot be
                written.
        """
        if self._update is not None:
            raise WeightSyncError(
                f"the update to version {self._update.version} is still open; end it before version {update.version}"
            )
        self._update = EngineUpdate(self.engine_urls, update.version, self.timeout, self.load_timeout)
        self._touched = False
        self._digests = SentDigests() if self.check else None
        with self._giving_up_on_error():
            if self._shapes is None and is_safetensors(self.hf_checkpoint):
                self._shapes = CheckpointReader(Path(self.hf_checkpoint))
            self._begin(self._update)

    def send(self, bucket: NamedTensors) -> None:
        """Send some tensors.

        Args:
            bucket: Hugging Face names with tensors on any device. They may be changed afterwards.

        Raises:
            WeightSyncError: An engine refused or is gone, or :meth:`begin` was not called.
            DataError: A tensor has another shape than in ``hf_checkpoint``.
        """
        update = self._require_open()
        if not bucket:
            return
        with self._giving_up_on_error():
            if self._shapes is not None:
                self._shapes.check_shapes(bucket)
            self._send(update, bucket)
            if self._digests is not None:
                self._digests.add(bucket)

    def end(self) -> dict[str, str]:
        """Close the update; return when every engine has confirmed the version and generates again.

        Returns:
            The tensors' checksums at the receiving end, by name; empty if the transport has none.

        Raises:
            WeightSyncError: An engine refused or is gone, reports another version, or holds other weights.
        """
        update = self._require_open()
        with self._giving_up_on_error():
            checksums = self._end(update)
            update.flush_cache(must=self.pause_mode == "retract")
            if self._digests is not None:
                check_engines(update, self._digests, tp_size=self.tp_size)
            update.confirm_version()
            update.resume()
            self._confirmed()
        self._update = self._digests = None
        return checksums

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is kept between updates."""

    @abc.abstractmethod
    def _begin(self, update: EngineUpdate) -> None: ...

    @abc.abstractmethod
    def _send(self, update: EngineUpdate, bucket: NamedTensors) -> None: ...

    @abc.abstractmethod
    def _end(self, update: EngineUpdate) -> dict[str, str]:
        """Have all weights loaded, and generation paused."""

    def _confirmed(self) -> None:  # noqa: B027 - most transports keep nothing
        """Drop what only the previous version needed: every engine has the new one."""

    def _give_up(self) -> None:  # noqa: B027
        """Drop what this transport has begun. Called before the engines are released."""

    def _pause(self, update: EngineUpdate) -> None:
        self._touched = True
        update.pause(self.pause_mode)

    def _require_open(self) -> EngineUpdate:
        if self._update is None:
            raise WeightSyncError("no update is open; call begin(update) first")
        return self._update

    @contextlib.contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        update = self._update
        try:
            yield
        except BaseException as error:
            self._update = self._digests = None
            try:
                self._give_up()
            finally:
                if self._touched and update is not None:
                    update.give_up()
            if isinstance(error, OSError):  # a full disk, a missing directory
                version = "" if update is None else f"weight version {update.version}: "
                raise WeightSyncError(f"{version}{error}") from error
            raise


def copy_into(buffer: torch.Tensor, tensor: torch.Tensor, start: int) -> None:
    """Copy a tensor into a flat buffer of uint8, from any device and layout, at a multiple of its element size."""
    buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
