"""New weights through files, as whole checkpoints or as deltas."""

from __future__ import annotations

import abc
import dataclasses
import itertools
import logging
from pathlib import Path

import torch

from slime_core.errors import IntegrityError
from slime_core.interfaces import NamedTensors
from slime_rollout.engine import WeightSyncError
from slime_rollout.weights.channel import EngineChannel, engine_weight_version
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    NewDirectory,
    check_new,
    remove_others,
    verify_checkpoint,
    verify_checksums,
    version_name,
    written_versions,
)
from slime_rollout.weights.deltas import DeltaWriter, first_tensor, published_versions

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _FileChannel(EngineChannel):
    """Writes a directory while engines generate, and pauses them to load it."""

    directory: str = ""
    keep_files: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._new: NewDirectory | None = None

    def close(self) -> None:
        """Remove what an unfinished version has written. Confirmed versions stay."""
        if self._new is not None:
            self._new.discard()
        self._new = None

    def _begin(self) -> None:
        self._on_all(engine_weight_version)  # an engine that is gone is noticed now
        self._new = self._start(Path(self.directory).absolute() / version_name(self._version))

    def _end(self) -> dict[str, str]:
        if self._new is None or not any(self._new.path.iterdir()):
            raise self._error("no tensor was sent")
        paths, checksums = self._publish()
        self._pause()
        self._on_all(
            lambda url: self._post(
                url, "/update_weights_from_disk", {"model_path": paths[url], "flush_cache": False}, is_long=True
            )
        )
        return checksums

    def _confirmed(self) -> None:
        self._new = None

    @abc.abstractmethod
    def _start(self, path: Path) -> NewDirectory:
        """Make the new version's directory."""

    @abc.abstractmethod
    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        """Publish the version; returns what each engine loads, and checksums as :meth:`end`."""


@dataclasses.dataclass
class DiskWeightChannel(_FileChannel):
    """Writes ``weight_v000123/`` and has the engines load it (SGLang's ``update_weights_from_disk``).

    When all engines have confirmed it, earlier versions are removed, whichever process wrote them. With ``check``, the
    files are read back before engines load them.

    Attributes:
        directory: Where versions are written; trainer and engines see it under the same path.
        keep_files: Keep all versions.
    """

    def _start(self, path: Path) -> NewDirectory:
        self._writer = CheckpointWriter(path, Path(self.hf_checkpoint), self._version)
        return self._writer

    def _send(self, bucket: NamedTensors) -> None:
        self._writer.add(bucket)

    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        path = self._writer.finish()
        if self.check:
            verify_checkpoint(path)
        return dict.fromkeys(self.engine_urls, str(path)), {}

    def _confirmed(self) -> None:
        super()._confirmed()
        path = self._writer.path
        if not self.keep_files:  # the first checkpoint may be a version that another run left here
            remove_others(written_versions(path.parent), path, Path(self.hf_checkpoint))


@dataclasses.dataclass
class DeltaWeightChannel(_FileChannel):
    """Publishes ``weight_v000123/`` with what changed; receivers on the engines' machines apply it, and engines load.

    SGLang does not read deltas: a :class:`~slime_rollout.weights.receiver.DeltaReceiver` keeps a whole checkpoint on
    the engines' machine, and verifies every tensor.

    The last confirmed version is kept in memory. Without it, as in a new process or after an error, deltas are made
    from ``hf_checkpoint``; also once the chain of deltas is larger than the model, so that a new receiver has less to
    apply. Versions published before that are removed, whichever process wrote them.

    Attributes:
        directory: Where versions are published; the receivers see it.
        receivers: URL of the receiver for each engine, or of one for all.
        keep_files: Keep all versions.
    """

    receivers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.receivers) not in (1, len(self.engine_urls)):
            raise WeightSyncError(f"{len(self.receivers)} receivers for {len(self.engine_urls)} engines; give one each")
        self._start_over()

    def _start_over(self) -> None:
        self._last_version: int | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._before: dict[str, str] = {}
        self._chain_bytes = 0

    def close(self) -> None:
        """Forget the last version, and remove what an unfinished one has written. Confirmed versions stay."""
        super().close()
        self._start_over()

    def _start(self, path: Path) -> NewDirectory:
        is_later = self._last_version is None or self._version > self._last_version
        if not is_later or self._chain_bytes > self._model_bytes():
            self._start_over()
        self._first = CheckpointReader(Path(self.hf_checkpoint))
        self._writer = DeltaWriter(path)
        return self._writer

    def _model_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._last.values())

    def _send(self, bucket: NamedTensors) -> None:
        check_new(bucket, self._writer.deltas)
        for name, tensor in bucket:
            new, last = tensor.detach().cpu(), self._last.get(name)
            if last is None:
                self._writer.add(name, first_tensor(self._first, name, new.dtype, new.shape), new)
                self._last[name] = new.clone(memory_format=torch.contiguous_format)
            else:
                self._writer.add(name, last, new)
                last.copy_(new)

    def _publish(self) -> tuple[dict[str, str], dict[str, str]]:
        self._after = self._before | {name: delta.result for name, delta in self._writer.deltas.items()}
        self._writer.finish(self._version, self._last_version, self._before, self._after)
        receivers = tuple(dict.fromkeys(self.receivers))
        paths = dict(zip(receivers, self._on_all(self._pull, receivers), strict=True))
        pairs = zip(self.engine_urls, itertools.cycle(self.receivers), strict=False)
        return {engine: paths[receiver] for engine, receiver in pairs}, dict(self._after)

    def _pull(self, receiver: str) -> str:
        """Have a receiver apply the version; returns what engines load."""
        answer = self._post(receiver, "/pull", {"version": self._version}, is_long=True)
        try:
            verify_checksums(answer["checksums"], self._after)
        except IntegrityError as error:
            raise self._error(f"{receiver}: {error}", receiver) from error
        return str(answer["path"])

    def _confirmed(self) -> None:
        super()._confirmed()
        sent = sum(delta.size for delta in self._writer.deltas.values())
        logger.info("weight version %d: %d bytes of %d were sent", self._version, sent, self._model_bytes())
        if self._last_version is None and not self.keep_files:
            remove_others(published_versions(self._writer.path.parent), self._writer.path)
        self._chain_bytes += sent
        self._last_version, self._before = self._version, self._after
