"""The page of a run that goes on, on the loopback address: the browser asks for new data every few seconds.

Every user of the machine can connect to that address, so whoever asks gives a token, which is printed with it.
"""

from __future__ import annotations

import gzip
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from slime_launch.report.collect import report_data
from slime_launch.report.page import page, to_json
from slime_launch.tracking import METRICS_FILE

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""Names of this server for a browser: a page of another site that has its own name lead here would read the samples."""
NO_TOKEN = b"403: give the whole address that slime-launch report --serve has printed, with its ?token=...\n"
RATIO = 200.0
"""Collecting takes at most one part in so many of a core's time."""


class LiveData:
    """The page's data, collected again when somebody asks and the metrics have changed, but not all the time."""

    def __init__(self, directories: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._directories, self._clock = directories, clock
        self._lock = threading.Lock()
        self._seen: object = None
        self._next = 0.0
        self._body = b""

    def body(self) -> tuple[bytes, str]:
        """JSON, compressed by gzip, and a tag that changes with it."""
        with self._lock:
            changed = [_changed(directory / METRICS_FILE) for directory in self._directories]
            now = self._clock()
            if changed != self._seen and now >= self._next:
                data = report_data(self._directories, live=True)
                self._body = gzip.compress(to_json(data), compresslevel=1)
                self._seen = changed
                self._next = now + RATIO * (self._clock() - now)
            return self._body, f'"{hash(str(self._seen)):x}"'


def _changed(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def make_server(directories: Sequence[Path], port: int, token: str) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one. ``serve_forever`` serves.

    It answers addresses that end with ``?token=`` and the token. The page takes it from its own address, not from a
    cookie: browsers send cookies of one port to every other one of this address, whoever listens there.

    Raises:
        OSError: The port is taken.
    """
    live = LiveData(directories)
    live.body()  # an error comes before anybody asks
    html = page(report_data(directories, live=True)).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                asked = urlsplit(self.path)
            except ValueError:  # such as an IPv6 address that is none
                self._answer(b"", "text/plain", status=400)
                return
            [given] = parse_qs(asked.query, errors="replace").get("token", [""])[:1]
            if self.headers.get("Host", "").rpartition(":")[0] not in HOSTS:
                self._answer(b"", "text/plain", status=403)
            elif not secrets.compare_digest(given.encode(), token.encode()):
                self._answer(NO_TOKEN, "text/plain", status=403)
            elif asked.path == "/":
                self._answer(html, "text/html; charset=utf-8")
            elif asked.path == "/data.json":
                body, tag = live.body()
                if self.headers.get("If-None-Match") == tag:
                    self._answer(b"", "application/json", status=304)
                else:
                    self._answer(body, "application/json", {"Content-Encoding": "gzip", "ETag": tag})
            else:
                self._answer(b"", "text/plain", status=404)

        def _answer(self, body: bytes, kind: str, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.send_header("Cache-Control", "no-cache")
            self.send_header("Referrer-Policy", "no-referrer")  # the address has the token in it
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None:
            """Nobody reads who asked."""

    return ThreadingHTTPServer((ADDRESS, port), Handler)
