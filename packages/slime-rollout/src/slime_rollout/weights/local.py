"""The receiving end of deltas: a whole checkpoint on the engines' machine, brought from version to version."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from slime_core.errors import DamagedError, IntegrityError, WrongBaseError
from slime_core.integrity import apply_delta, combined_checksum, delta_info, verify_checksums
from slime_rollout.weights.buckets import byte_size
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    read_about,
    reading,
    verify_checkpoint,
    version_name,
    written_versions,
)
from slime_rollout.weights.publication import Base, DeltaIndex, FirstCheckpoint, PublishedDeltas, read_index

logger = logging.getLogger(__name__)

FILE_BYTES = 2**29


@dataclasses.dataclass(frozen=True)
class LocalVersion:
    """A whole checkpoint on this machine.

    Attributes:
        path: What an engine loads.
        version: Its number; ``None`` for the checkpoint that everything began with.
        checksums: Of all tensors that were ever sent.
        kept: Of all others, as they were written here.
    """

    path: Path
    version: int | None
    checksums: Mapping[str, str]
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)


class LocalCheckpoint:
    """Applies deltas in order, to a copy that appears whole or not at all.

    A copy that another process made here is gone on with, if it was made from the same first checkpoint.

    Args:
        directory: Of this machine, for the copies, each as large as the model; two at a time for a short while, and
            those that :meth:`pull` is to keep.
        hf_checkpoint: What everything began with: the same as at the sender.
        source: Where versions are published.
    """

    def __init__(self, directory: Path, hf_checkpoint: Path, source: Path) -> None:
        self._directory, self._source = directory, source
        self._first = LocalVersion(hf_checkpoint.absolute(), None, {})
        self._unverified: LocalVersion | None = None
        self.current = self._found()
        self._remove_others()

    def pull(self, version: int, *, keep: Collection[Path] = ()) -> LocalVersion:
        """Bring the checkpoint to a published version, by all deltas that are missing, in their order.

        Where this has a version that the published one does not go back to, or one that was altered since, it begins
        anew with the first checkpoint.

        Args:
            version: Its number.
            keep: Older copies that are not removed yet.

        Raises:
            WrongBaseError: A delta was made from another version than there is.
            DamagedError: A version is missing or was altered.
            IntegrityError: A tensor is not what the sender had.
        """
        steps, start = self._steps(version, self.current)
        try:
            local = self._made(start, steps)
        except IntegrityError as error:
            if start.version is None:
                raise
            logger.warning("%s cannot be gone on with: %s; beginning anew from %s", start.path, error, self._first.path)
            steps, start = self._steps(version, self._first)
            local = self._made(start, steps)
        self._keep_only(local, keep)
        return local

    def _found(self) -> LocalVersion:
        """The newest copy that is here, or the first checkpoint."""
        found = [self._first]
        for path in written_versions(self._directory):
            try:
                about = read_about(path)
                with reading(path):
                    is_ours = about.get("first") == str(self._first.path)
                    sent = {name: about["checksums"][name] for name in about.get("sent", ())}
                    kept = {name: checksum for name, checksum in about["checksums"].items() if name not in sent}
                    version = int(about["version"])
            except DamagedError as error:
                logger.warning("%s; it is removed", error)
                continue
            if is_ours:
                found.append(LocalVersion(path, version, sent, kept))
        newest = max(found, key=lambda local: -1 if local.version is None else local.version)
        self._unverified = newest
        return newest

    def _steps(self, version: int, local: LocalVersion) -> tuple[list[DeltaIndex], LocalVersion]:
        """The deltas to apply, oldest first, and what to apply them to."""
        index = read_index(self._source, version)
        steps: list[DeltaIndex] = []
        while not _is(local, index.version, index.result):
            steps.insert(0, index)
            if index.base_version is None:
                return steps, self._first
            if _is(local, index.base_version, index.base):
                break
            index = self._before(index, index.base_version)
        return steps, local

    def _before(self, index: DeltaIndex, base_version: int) -> DeltaIndex:
        """The version that one was made from."""
        try:
            before = read_index(self._source, base_version)
        except DamagedError as error:
            raise DamagedError(
                f"version {index.version} was made from version {base_version}, and {error}; send the weights again"
            ) from error
        if before.result != index.base or before.version >= index.version:
            raise WrongBaseError(
                f"version {index.version} was made from another version {before.version} than the one that is in "
                f"{self._source}; send the weights again"
            )
        return before

    def _made(self, start: LocalVersion, steps: Sequence[DeltaIndex]) -> LocalVersion:
        if steps:
            return self._apply(start, [PublishedDeltas(self._source, index) for index in steps])
        if start is self._unverified and start.version is not None:
            verify_checkpoint(start.path)
            self._unverified = None
        return start

    def _apply(self, start: LocalVersion, steps: Sequence[PublishedDeltas]) -> LocalVersion:
        """Write the version after some steps. All are applied to one tensor after the other."""
        first, last = steps[0].index, steps[-1].index
        if combined_checksum(start.checksums) != first.base:
            raise WrongBaseError(f"version {first.version} was made from another version than {start.version}")
        sent = dict(start.checksums)
        for step in steps:
            sent |= step.index.tensors
        if combined_checksum(sent) != last.result:
            raise IntegrityError(f"version {last.version} is not what the sender had; send the weights again")
        writer = CheckpointWriter(self._directory / version_name(last.version), self._first.path, last.version)
        try:
            kept = self._write(writer, start, steps)
            found = {name: checksum for name, checksum in writer.checksums.items() if name not in kept}
            verify_checksums(found, sent)
            if start.kept:
                verify_checksums(kept, {name: start.kept[name] for name in start.kept if name not in sent})
            path = writer.finish({"first": str(self._first.path), "sent": sorted(sent)})
        except BaseException:
            writer.discard()
            raise
        return LocalVersion(path, last.version, sent, kept)

    def _write(self, writer: CheckpointWriter, start: LocalVersion, steps: Sequence[PublishedDeltas]) -> dict[str, str]:
        """Write all tensors; returns the checksums of those that were never sent."""
        reader, base = CheckpointReader(start.path), _base_of(start, FirstCheckpoint(self._first.path))
        changed = {name for step in steps for name in step.index.tensors}
        bucket: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name in sorted(reader.names | changed):
            if name in changed:
                deltas = [step.read(name) for step in steps if name in step.index.tensors]
                bucket.append((name, _applied(base, name, deltas)))
            else:
                bucket.append((name, reader.read(name)))
            size += byte_size(bucket[-1][1])
            if size > FILE_BYTES:
                writer.add(bucket)
                bucket, size = [], 0
        if bucket:
            writer.add(bucket)
        return {name: writer.checksums[name] for name in reader.names - changed - start.checksums.keys()}

    def _keep_only(self, local: LocalVersion, keep: Collection[Path]) -> None:
        self.current = local
        self._remove_others(keep)
        logger.info("weight version %s is in %s", local.version, local.path)

    def _remove_others(self, keep: Collection[Path] = ()) -> None:
        kept = {path.resolve() for path in (self.current.path, self._first.path, *keep)}
        for path in written_versions(self._directory):
            if path.resolve() not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _is(local: LocalVersion, version: int, checksum: str) -> bool:
    return local.version == version and combined_checksum(local.checksums) == checksum


def _base_of(start: LocalVersion, first: FirstCheckpoint) -> Base:
    """Tensors of a version: as they were sent last, or else as they were at first."""
    sent = CheckpointReader(start.path) if start.checksums else None

    def base(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if sent is not None and name in start.checksums:
            return sent.read(name)
        return first.base(name, dtype, shape)

    return base


def _applied(base: Base, name: str, deltas: Sequence[bytes]) -> torch.Tensor:
    """A tensor after one delta or several, oldest first."""
    try:
        info = delta_info(deltas[0])
        tensor = base(name, getattr(torch, info.dtype), info.shape)
        for delta in deltas:
            tensor = apply_delta(tensor, delta)
    except WrongBaseError as error:
        raise WrongBaseError(f"{name}: {error}") from error
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error}") from error
    return tensor
