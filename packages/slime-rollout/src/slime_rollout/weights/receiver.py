"""The receiving end of deltas, on the engines' machine: a checkpoint that is brought from version to version."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hmac
import http.server
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from slime_core.errors import ConfigError, DamagedError, IntegrityError, SlimeError, WrongBaseError
from slime_rollout.engine.addresses import LOOPBACK, address
from slime_rollout.engine.with_key import KEY as API_KEY
from slime_rollout.weights.checkpoint import (
    CheckpointReader,
    CheckpointWriter,
    combined_checksum,
    read_info,
    remove_others,
    tensor_checksum,
    verify_checkpoint,
    verify_checksums,
    version_name,
    written_versions,
)
from slime_rollout.weights.disk import KEY_FILE, DeltaIndex, apply_delta, first_tensor, is_published_key, read_index

READ_SECONDS = 30.0
FILE_BYTES = 2**29
HIGHEST_PORT = 65535
MOST_BYTES = 1000  # of a request

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LocalVersion:
    """A whole checkpoint on this machine."""

    path: Path
    version: int | None  # `None` for the checkpoint that everything began with
    checksums: Mapping[str, str]  # of all tensors that were ever sent

    def is_version(self, version: int, checksum: str) -> bool:
        """Whether it is this version of the sender's, by number and contents."""
        return self.version == version and combined_checksum(self.checksums) == checksum


class LocalCheckpoint:
    """Applies deltas in order, to a copy in ``directory`` that appears whole or not at all.

    A copy that another process made here is continued, if it was made from the same first checkpoint. There are two
    while a delta is applied.
    """

    def __init__(self, directory: Path, hf_checkpoint: Path, source: Path) -> None:
        self._directory, self._source = directory, source
        self._first = LocalVersion(hf_checkpoint.absolute(), None, {})
        self._lock = threading.Lock()
        self.current = self._found()
        self._remove_others()

    def pull(self, version: int) -> LocalVersion:
        """Bring the checkpoint to a published version, by all deltas that are missing, in their order.

        It starts over from the first checkpoint if the published version was not made from the current one, or if the
        copy here was altered. An `IntegrityError` says why a published version cannot be used.
        """
        with self._lock:
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
        found = [self._first]
        for path in written_versions(self._directory):
            try:
                info = read_info(path)
            except IntegrityError as error:
                logger.warning("%s; it is removed", error)
                continue
            if info.first == str(self._first.path):
                found.append(LocalVersion(path, info.version, {name: info.checksums[name] for name in info.sent}))
        return max(found, key=lambda local: -1 if local.version is None else local.version)

    def _steps(self, version: int, local: LocalVersion) -> tuple[LocalVersion, list[DeltaIndex]]:
        """The version to start from, and the deltas to apply to it, oldest first."""
        steps = [read_index(self._source, version)]
        if local.is_version(version, steps[0].result):
            return local, []
        while (base := steps[0].base_version) is not None and not local.is_version(base, steps[0].base):
            steps.insert(0, self._before(steps[0], base))
        return self._first if base is None else local, steps

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
        expected = sent if start.version is None else read_info(start.path).checksums | sent
        writer = CheckpointWriter(self._directory / version_name(version), self._first.path, version)
        try:
            for bucket in self._buckets(start, steps):
                writer.add(bucket)
            found = {name: checksum for name, checksum in writer.checksums.items() if name in expected}
            verify_checksums(found, expected)
            path = writer.finish(first=str(self._first.path), sent=sent)
        except BaseException:
            writer.discard()
            raise
        return LocalVersion(path, version, sent)

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
                if (found := tensor_checksum(tensor)) != (delta := step.tensors[name]).base:
                    raise WrongBaseError(
                        f"{name}: the tensor has the checksum {found}, but version {step.version} leads from "
                        f"{delta.base} to {delta.result}; send the weights again"
                    )
                tensor = apply_delta(tensor, step.read(self._source, name))  # verified once it is written
            bucket.append((name, tensor))
            if sum(tensor.nbytes for _, tensor in bucket) > FILE_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _remove_others(self) -> None:
        remove_others(written_versions(self._directory), self.current.path, self._first.path)


class DeltaReceiver(contextlib.AbstractContextManager["DeltaReceiver"]):
    """A small HTTP service that brings the checkpoint of this machine up to date when the sender asks for it.

    ``POST /pull {"version": 7}`` returns ``path``, what engines load, and ``checksums``, name → checksum as found after
    the deltas were applied; or status 409 with ``error`` and ``message``. Requests carry a key as those of engines do
    (``Authorization: Bearer``); others get status 401. It is ``key``, or by default that of the run that publishes in
    ``source``; with ``""`` none is asked for.

    ``directory`` is for copies of the model; one that is there is continued. ``hf_checkpoint`` must be the same as at
    the sender, which publishes versions in ``source``. The port 0 is a free one.
    """

    def __init__(
        self,
        *,
        directory: str,
        hf_checkpoint: str,
        source: str,
        host: str = LOOPBACK,
        port: int = 0,
        key: str | None = None,
    ) -> None:
        checkpoint = LocalCheckpoint(Path(directory).absolute(), Path(hf_checkpoint), Path(source).absolute())
        self._server = _Server(host, port, functools.partial(_Handler, checkpoint, key, Path(source).absolute()))
        self.url = address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving. The checkpoint stays on disk."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __exit__(self, *error: object) -> None:
        self.stop()


class _Server(http.server.ThreadingHTTPServer):
    def __init__(self, host: str, port: int, handler: Callable[..., http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(where, handler)  # type: ignore[arg-type]  # four numbers and names with IPv6


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = READ_SECONDS

    def __init__(self, checkpoint: LocalCheckpoint, key: str | None, source: Path, *args: Any) -> None:
        self._checkpoint, self._key, self._source = checkpoint, key, source
        super().__init__(*args)

    def _is_allowed(self) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if self._key is None:
            return kind == "Bearer" and is_published_key(self._source, given)
        return not self._key or (kind == "Bearer" and hmac.compare_digest(given.encode(), self._key.encode()))

    def do_POST(self) -> None:
        if not self._is_allowed():
            message = f"give the run the key that the receiver has as {API_KEY}, as --sglang-api-key"
            if self._key is None:
                message = (
                    f"this is not the key of the run that publishes in the receiver's --from ({KEY_FILE} there); a run "
                    f'with --sglang-api-key "" has none: start the receiver with {API_KEY}= to ask for none'
                )
            self._answer(401, {"error": "Unauthorized", "message": message})
            return
        if (origin := self.headers.get("Origin")) is not None:
            message = f"a page of {origin[:MOST_BYTES]} asks, and none may"  # in a browser of this machine
            self._answer(403, {"error": "Forbidden", "message": message})
            return
        try:
            if not (length := self.headers["Content-Length"]).isdecimal() or (size := int(length)) > MOST_BYTES:
                raise ValueError
            version = int(orjson.loads(self.rfile.read(size))["version"] if self.path == "/pull" else "")
        except (ValueError, KeyError, TypeError, AttributeError):
            self._answer(400, {"error": "BadRequest", "message": 'POST /pull {"version": 7}'})
            return
        try:
            local = self._checkpoint.pull(version)
        except (SlimeError, OSError) as error:
            logger.error("cannot pull weight version %d: %s", version, error)
            self._answer(409, {"error": type(error).__name__, "message": str(error)})
        else:
            self._answer(200, {"path": str(local.path), "checksums": local.checksums})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = orjson.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Do not log requests that succeeded."""


def serve(source: str, directory: str, hf_checkpoint: str, listen: str) -> None:
    """Apply deltas until the process is ended; a `ConfigError` if a directory or the address cannot be used.

    Requests carry the key of the run that publishes in ``source``, or that of the environment's ``SLIME_API_KEY``; none
    if that is empty.
    """
    published, local = Path(source).absolute(), Path(directory).absolute()
    if published.resolve() == local.resolve():
        raise ConfigError(f"--to must be another directory than --from {published}: versions there have the same names")
    if not published.is_dir():
        raise ConfigError(f"--from {published} is not a directory that this machine sees")
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > HIGHEST_PORT:
        raise ConfigError(f"--listen {listen} is not an address; give HOST:PORT, such as 0.0.0.0:9000")
    CheckpointReader(Path(hf_checkpoint))  # fails now where it holds no weights, and not at the first update
    _lock(local)
    key = os.environ.get(API_KEY)
    if key == "":
        logger.warning("%s is empty: whoever reaches --listen %s can ask for versions", API_KEY, listen)
    try:
        receiver = DeltaReceiver(
            directory=directory, hf_checkpoint=hf_checkpoint, source=source, host=host, port=int(port), key=key
        )
    except OSError as error:
        raise ConfigError(f"--listen {listen} cannot be used: {error}") from error
    with receiver:
        print(f"listening on {receiver.url}", flush=True)
        threading.Event().wait()


def _lock(directory: Path) -> None:
    """Lock the directory against other receivers until this process ends, however that ends."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"--to {directory} cannot be used: {error}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"another receiver writes to {directory}; end it, or give another --to") from error
    except OSError as error:
        raise ConfigError(f"--to {directory} cannot be locked ({error}); give a directory of this machine") from error
