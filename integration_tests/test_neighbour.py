"""Another user of the machine, uid 65534, against a run with a umask that forbids nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch.distributed as dist
from ended import Ended
from visiting import VISIT, done_by_nobody

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

# What docs/explanation/security.md lists as open: the router's counters, the model's name and the number of engines.
OPEN = (
    r"(GET|POST) \S+ at \d+: 200 b'# (TYPE|HELP) smg_",
    r"GET /v1/models at \d+: 200 ",
    r"GET /get_server_info at \d+: 200 b'\{\"router_manager\":true",
    r"GET /engine_metrics at \d+: 500 b'All backend requests failed'",
)


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_nobody_gets_into_a_run(learned_run: Ended) -> None:
    """It was visited while it trained, and trained on."""
    visit = json.loads((learned_run.work / VISIT).read_text())
    given = visit["given"]
    assert all(given[kind] for kind in ("processes", "folders", "files", "sockets", "tcp", "ray")), given
    done = [line for line in visit["by nobody"] if not any(re.match(form, line) for form in OPEN)]
    assert done == []


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_what_its_user_can_do_is_seen(learned_run: Ended) -> None:
    """Of what only the run's user may do."""
    done = " ".join(json.loads((learned_run.work / VISIT).read_text())["by its user"])
    for what in (r"open /proc/\d+/mem", r"list /proc/\d+/fd", r"signal \d+", r"trace \d+", r"ask Ray at \d+"):
        assert re.search(what, done), done


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That everybody may write to."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(f"{folder}-of-nobody", ignore_errors=True)


class Open(BaseHTTPRequestHandler):
    """Answers one path without asking who it is."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.timeout(300)
def test_what_is_open_is_found(open_folder: Path) -> None:
    file, path = open_folder / "file", open_folder / "socket"
    file.touch()
    file.chmod(0o666)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with socket.socket(socket.AF_UNIX) as server, ThreadingHTTPServer(("127.0.0.1", 0), Open) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        server.bind(str(path))
        server.listen()
        path.chmod(0o666)
        port = web.server_address[1]
        done = done_by_nobody(
            {
                "processes": [],
                "folders": [str(open_folder)],
                "files": [str(file)],
                "sockets": [str(path)],
                "tcp": [("127.0.0.1", port), ("127.0.0.1", store.port)],
                "ray": [],
            }
        )
        web.shutdown()
    forms = [f"list {open_folder}", f"make a file in {open_folder}", f"read {file}", f"write {file}", f"rename {file}"]
    forms += [f"connect to {path}", f"GET /v1/models at {port}: 200", f"set a key of the store at {store.port}"]
    assert [form for form in forms if not any(line.startswith(form) for line in done)] == [], done
    assert store.get("a key") == b"of nobody"
