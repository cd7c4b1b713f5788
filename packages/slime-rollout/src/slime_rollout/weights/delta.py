"""New weights as the bytes that changed, published in a directory and applied beside the engines."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

import torch

from slime_core.errors import IntegrityError
from slime_core.integrity import delta_info, encode_delta, verify_checksums
from slime_core.interfaces import NamedTensors
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights.channel import EngineChannel, check_alive
from slime_rollout.weights.checkpoint import version_name
from slime_rollout.weights.control import Engines
from slime_rollout.weights.disk import load_from_disk
from slime_rollout.weights.publication import DeltaPublication, FirstCheckpoint, published_versions

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class DeltaWeightChannel(EngineChannel):
    """Publishes ``weight_v000123/`` with the changed bytes; a receiver beside the engines applies them, engines load.

    SGLang itself knows no deltas: :class:`~slime_rollout.weights.receiver.DeltaReceiver` keeps a whole checkpoint on
    the engines' machine. Engines generate meanwhile, and pause to load it. What is verified: every delta's base and
    result, tensor by tensor, at the receiver, whose checksums :meth:`end` compares with the sender's and returns; with
    ``check`` also what engines hold.

    The version that all receivers confirmed last is kept in memory, which takes as much of it as the model; without
    it, as in a new process, deltas are made from ``hf_checkpoint``. So they are, too, once the chain of deltas has
    become larger than the model: then what was published before is removed, whichever process did it, and a receiver
    that begins anew has less to apply.

    Attributes:
        directory: Where versions are published; the receivers see it.
        receivers: For each engine the URL of the receiver beside it; one for all, if it is but one. A channel with no
            engines and no receivers only publishes, for those who follow (`slime_rollout.weights.follow`).
        keep_files: Keep all versions.
    """

    directory: str = ""
    receivers: tuple[str, ...] = ()
    keep_files: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.receivers) not in (1, len(self.engine_urls)):
            raise WeightSyncError(f"{len(self.receivers)} receivers for {len(self.engine_urls)} engines; give one each")

    def _forget(self) -> None:
        super()._forget()
        self._publication: DeltaPublication | None = None
        self._first: FirstCheckpoint | None = None
        self._start_anew()

    def _start_anew(self) -> None:
        self._version: int | None = None
        self._last: dict[str, torch.Tensor] = {}
        self._checksums: dict[str, str] = {}
        self._after: dict[str, str] = {}
        self._chain_bytes = self._total_bytes = 0

    def close(self) -> None:
        """Forget the last version, and remove what one that was not ended has written. What is published stays."""
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.discard()
        self._start_anew()

    def _begin(self, update: Engines) -> None:
        check_alive(update)
        if self._chain_bytes > self._total_bytes or (self._version is not None and update.version <= self._version):
            self._start_anew()
        self._first = FirstCheckpoint(Path(self.hf_checkpoint))
        self._publication = DeltaPublication(Path(self.directory).absolute(), update.version)

    def _send(self, update: Engines, bucket: NamedTensors) -> None:
        publication, first = self._publication, self._first
        if publication is None or first is None:
            return
        deltas: dict[str, bytes] = {}
        for name, tensor in bucket:
            new = tensor.detach().cpu()
            base = self._last.get(name)
            if base is None:
                base = first.base(name, new.dtype, tuple(new.shape))
            deltas[name] = encode_delta(base, new)
            self._keep(name, new)
        publication.add(deltas, {name: delta_info(delta).result for name, delta in deltas.items()})

    def _keep(self, name: str, new: torch.Tensor) -> None:
        """The next delta's base. After an error none of it is used."""
        if name in self._last:
            self._last[name].copy_(new)
        else:
            self._last[name] = new.clone(memory_format=torch.contiguous_format)

    def _end(self, update: Engines) -> dict[str, str]:
        publication = self._publication
        if publication is None or not publication.tensors:
            raise WeightSyncError(f"weight version {update.version}: no tensor was sent")
        self._after = publication.publish(base_version=self._version, before=self._checksums)
        paths = self._pull(update)
        self._pause(update)
        update.on_all(lambda url: load_from_disk(update, url, paths[url]))
        return dict(self._after)

    def _pull(self, update: Engines) -> dict[str, str]:
        """Have all receivers apply it; returns for each engine what to load."""
        receivers = self.receivers if len(self.receivers) > 1 else self.receivers * len(update.urls)
        urls = tuple(dict.fromkeys(receivers))
        pulls = dataclasses.replace(update, urls=urls)
        answers = dict(zip(urls, pulls.on_all(lambda url: self._pull_one(pulls, url)), strict=True))
        return {engine: answers[receiver] for engine, receiver in zip(update.urls, receivers, strict=True)}

    def _pull_one(self, pulls: Engines, url: str) -> str:
        answer = pulls.post(url, "/pull", {"version": pulls.version}, is_long=True)
        try:
            verify_checksums(answer["checksums"], self._after)
        except IntegrityError as error:
            raise WeightSyncError(f"weight version {pulls.version}: {url}: {error}", url=url) from error
        return str(answer["path"])

    def _confirmed(self) -> None:
        publication, update = self._publication, self._require_open()
        if publication is None:
            return
        self._total_bytes = sum(tensor.nbytes for tensor in self._last.values())
        logger.info("weight version %d: %d bytes of %d were sent", update.version, publication.bytes, self._total_bytes)
        began_anew = self._version is None
        self._chain_bytes = publication.bytes + (0 if began_anew else self._chain_bytes)
        self._version, self._checksums = update.version, self._after
        self._publication = None
        if began_anew and not self.keep_files:
            for path in published_versions(Path(self.directory).absolute()):
                if path.name != version_name(update.version):
                    shutil.rmtree(path, ignore_errors=True)

    def _give_up(self) -> None:
        """The next version is made from the first checkpoint: receivers may or may not have this one."""
        self.close()
