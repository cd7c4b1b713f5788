"""The receiving end of deltas, on the engines' machine: a checkpoint that is brought from version to version."""

from __future__ import annotations

import dataclasses
import http.server
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from slime_core.errors import DamagedError, IntegrityError, SlimeError, WrongBaseError
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    combined_checksum,
    read_about,
    reading,
    tensor_checksum,
    verify_checkpoint,
    verify_checksums,
    version_name,
    written_versions,
)
from slime_rollout.weights.disk import DeltaIndex, apply_delta, first_tensor, read_index

READ_SECONDS, MOST_BYTES = 30.0, 4096
FILE_BYTES = 2**29

logger = logging.getLogger(__name__)


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

    def is_version(self, version: int, checksum: str) -> bool:
        """Whether it is this version of the sender's, by number and contents."""
        return self.version == version and combined_checksum(self.checksums) == checksum


class LocalCheckpoint:
    """Applies deltas in order, to a copy that appears whole or not at all.

    A copy that another process made here is continued, if it was made from the same first checkpoint.

    Args:
        directory: On this machine, for copies of the model; two at a time while a delta is applied.
        hf_checkpoint: What everything began with: the same as at the sender.
        source: Where versions are published.
    """

    def __init__(self, directory: Path, hf_checkpoint: Path, source: Path) -> None:
        self._directory, self._source = directory, source
        self._first = LocalVersion(hf_checkpoint.absolute(), None, {})
        self.current = self._found()
        self._remove_others()

    def pull(self, version: int) -> LocalVersion:
        """Bring the checkpoint to a published version, by all deltas that are missing, in their order.

        It starts over from the first checkpoint if the published version was not made from the current one, or if the
        copy here was altered.

        Raises:
            WrongBaseError: A delta was made from another version than there is.
            DamagedError: A version is missing or was altered.
            FormatVersionError: A version was published in another format version.
            IntegrityError: A tensor is not what the sender had.
        """
        start, steps = self._steps(version, self.current)
        try:
            self.current = self._apply(start, steps)
        except IntegrityError as error:
            if start.version is None:
                raise
            logger.warning("%s cannot be continued: %s; starting over from %s", start.path, error, self._first.path)
            self.current = self._apply(*self._steps(version, self._first))
        self._remove_others()
        logger.info("weight version %s is in %s", version, self.current.path)
        return self.current

    def _found(self) -> LocalVersion:
        """The newest copy that is here, or the first checkpoint."""
        newest = self._first
        for path in written_versions(self._directory):
            try:
                about = read_about(path)
                with reading(path):
                    is_ours = about.get("first") == str(self._first.path)
                    sent = {name: about["checksums"][name] for name in about.get("sent", ())}
                    kept = {name: checksum for name, checksum in about["checksums"].items() if name not in sent}
                    version = int(about["version"])
            except IntegrityError as error:
                logger.warning("%s; it is removed", error)
                continue
            if is_ours and (newest.version is None or version > newest.version):
                newest = LocalVersion(path, version, sent, kept)
        return newest

    def _steps(self, version: int, local: LocalVersion) -> tuple[LocalVersion, list[DeltaIndex]]:
        """What to start from, and the deltas to apply to it, oldest first."""
        index = read_index(self._source, version)
        steps: list[DeltaIndex] = []
        while not local.is_version(index.version, index.result):
            steps.insert(0, index)
            if index.base_version is None:
                return self._first, steps
            if local.is_version(index.base_version, index.base):
                break
            index = self._before(index, index.base_version)
        return local, steps

    def _before(self, index: DeltaIndex, base_version: int) -> DeltaIndex:
        """The version that this one was made from."""
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

    def _apply(self, start: LocalVersion, steps: Sequence[DeltaIndex]) -> LocalVersion:
        """Write the version after some steps; without any, verify the one that is there."""
        if not steps:
            verify_checkpoint(start.path)
            return start
        version, sent = steps[-1].version, dict(start.checksums)
        for step in steps:
            sent |= {name: delta.result for name, delta in step.tensors.items()}
        if combined_checksum(sent) != steps[-1].result:
            raise IntegrityError(f"version {version} is not what the sender had; send the weights again")
        expected = {**start.kept, **sent}
        writer = CheckpointWriter(self._directory / version_name(version), self._first.path, version)
        try:
            for bucket in self._buckets(start, steps):
                writer.add(bucket)
            found = {name: checksum for name, checksum in writer.checksums.items() if name in expected}
            verify_checksums(found, expected)
            path = writer.finish({"first": str(self._first.path), "sent": sorted(sent)})
        except BaseException:
            writer.discard()
            raise
        kept = {name: checksum for name, checksum in writer.checksums.items() if name not in sent}
        return LocalVersion(path, version, sent, kept)

    def _buckets(self, start: LocalVersion, steps: Sequence[DeltaIndex]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """All tensors after the steps; each goes through all steps before the next is read."""
        reader, first = CheckpointReader(start.path), CheckpointReader(self._first.path)
        bucket: list[tuple[str, torch.Tensor]] = []
        for name in sorted(reader.names.union(*(step.tensors for step in steps))):
            changes = [step for step in steps if name in step.tensors]
            if not changes or name in start.checksums:
                tensor = reader.read(name)
            else:
                delta = changes[0].tensors[name]
                tensor = first_tensor(first, name, getattr(torch, delta.dtype), delta.shape)
            for step in changes:
                tensor = self._changed(name, tensor, step)
            bucket.append((name, tensor))
            if sum(tensor.nbytes for _, tensor in bucket) > FILE_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _changed(self, name: str, tensor: torch.Tensor, step: DeltaIndex) -> torch.Tensor:
        """A tensor after one step, verified before and after."""
        delta, found = step.tensors[name], tensor_checksum(tensor)
        if found == delta.result:
            return tensor
        if found != delta.base:
            raise WrongBaseError(
                f"{name}: the tensor has the checksum {found}, but version {step.version} leads from {delta.base} to "
                f"{delta.result}; send the weights again"
            )
        tensor = apply_delta(tensor, step.read(self._source, name))
        if (found := tensor_checksum(tensor)) != delta.result:
            raise IntegrityError(
                f"{name}: version {step.version} led to {found} instead of {delta.result}; send the weights again"
            )
        return tensor

    def _remove_others(self) -> None:
        kept = {path.resolve() for path in (self.current.path, self._first.path)}
        for path in written_versions(self._directory):
            if path.resolve() not in kept:
                shutil.rmtree(path, ignore_errors=True)


class DeltaReceiver:
    """A small HTTP service that brings the checkpoint of this machine up to date when the sender asks for it.

    ``POST /pull {"version": 7}`` returns ``path``, what engines load, and ``checksums``, name → checksum as found after
    the deltas were applied; or status 409 with ``error`` and ``message``.

    Args:
        directory: On this machine, for copies of the model. A copy that is there is continued.
        hf_checkpoint: What everything began with.
        source: Where the sender publishes versions.
        host: Address to listen on.
        port: 0 for a free one.
    """

    def __init__(
        self, *, directory: str, hf_checkpoint: str, source: str, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        checkpoint = LocalCheckpoint(Path(directory).absolute(), Path(hf_checkpoint), Path(source).absolute())
        self._server = _Server((host, port), _Handler)
        self._server.checkpoint, self._server.lock = checkpoint, threading.Lock()
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. The checkpoint stays on disk."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> DeltaReceiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    checkpoint: LocalCheckpoint
    lock: threading.Lock


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        """Respond to ``/pull``."""
        try:
            size = int(self.headers.get("Content-Length", 0))
            body = orjson.loads(self.rfile.read(size if 0 <= size <= MOST_BYTES else 0))
            version = int(body["version"])
        except (ValueError, KeyError, TypeError):
            self._answer(400, {"error": "BadRequest", "message": 'POST /pull {"version": 7}'})
            return
        if self.path != "/pull":
            self._answer(404, {"error": "NotFound", "message": "only POST /pull is known"})
            return
        try:
            with self.server.lock:
                local = self.server.checkpoint.pull(version)
        except (SlimeError, OSError) as error:
            logger.error("cannot pull weight version %d: %s", version, error)
            self._answer(409, {"error": type(error).__name__, "message": str(error)})
            return
        self._answer(200, {"path": str(local.path), "checksums": local.checksums})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = orjson.dumps(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Do not log requests that succeeded."""
