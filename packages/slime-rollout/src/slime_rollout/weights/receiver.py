"""A small HTTP service beside engines that brings their checkpoint up to date when the sender says so."""

from __future__ import annotations

import http.server
import logging
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from slime_core.errors import SlimeError
from slime_rollout.weights.local import LocalCheckpoint

READ_SECONDS, MOST_BYTES = 30.0, 4096

logger = logging.getLogger(__name__)


class DeltaReceiver:
    """Serves one :class:`~slime_rollout.weights.local.LocalCheckpoint` to the engines of this machine.

    ``POST /pull {"version": 7}`` answers with ``path``, what engines load, and ``checksums``, name → checksum as they
    were found after the deltas were applied; or with status 409 and ``error`` and ``message``.

    Args:
        checkpoint: What it serves.
        host: Address that it listens on.
        port: A free one if 0.
    """

    def __init__(self, checkpoint: LocalCheckpoint, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = _Server((host, port), _Handler)
        self._server.checkpoint = checkpoint
        self.url = f"http://{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls, *, directory: str, hf_checkpoint: str, source: str, host: str = "127.0.0.1", port: int = 0
    ) -> DeltaReceiver:
        """Start with the copy that is there, or else with the first checkpoint.

        Args:
            directory: Of this machine, for copies of the model.
            hf_checkpoint: What everything began with.
            source: Where the sender publishes versions.
            host: Address to listen on.
            port: A free one if 0.
        """
        checkpoint = LocalCheckpoint(Path(directory).absolute(), Path(hf_checkpoint), Path(source).absolute())
        return cls(checkpoint, host, port)

    def stop(self) -> None:
        """Stop serving. The checkpoint stays on disk."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> DeltaReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    checkpoint: LocalCheckpoint

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = READ_SECONDS

    def do_POST(self) -> None:
        """Answer ``/pull``."""
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
        """Say nothing of requests that went well."""
