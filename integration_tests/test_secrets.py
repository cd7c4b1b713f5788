"""Forty made-up secrets in a run's environment, addresses, headers and errors: none is in anything that it leaves."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from launching import Assets, started, train_command, tree, watch_to_the_end

from support.planted import made_up, planted

PLANTED = planted()
IN_ADDRESS, KEY, SIGNATURE = made_up(101, 14), made_up(102, 20), made_up(103, 30)
BY_NAME = made_up(104, 24)
SECRETS = {part for _, secret in PLANTED.values() for part in secret.split("\n")}
GOOD = 40
"""Requests that are answered well, but for every eighth, before all are refused."""


class Rewards(BaseHTTPRequestHandler):
    """A reward service that repeats what it knows, as some do."""

    counter = itertools.count()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        number = next(self.counter)
        status = 400 if number > GOOD else 500 if number % 8 == 0 else 200
        text = list(PLANTED.values())[number % len(PLANTED)][0]
        shown = f"{self.path} refused: {text} and {self.headers.get('Authorization')}"
        body = json.dumps(1.0 if status == 200 else {"error": shown}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def reward_service() -> Iterator[str]:
    """Its address, with a user, a password and a key."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Rewards) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        yield f"http://me:{IN_ADDRESS}@127.0.0.1:{port}/score?key={KEY}&X-Amz-Signature={SIGNATURE}"
        server.shutdown()


def contents(path: Path) -> Iterator[bytes]:
    """Of a file; of a packed one, what is in it."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())


@pytest.mark.real
@pytest.mark.timeout(900)
def test_none_is_in_anything_that_a_run_leaves_or_shows(
    qwen3: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (text, _) in enumerate(PLANTED.values()):
        monkeypatch.setenv(f"PLANTED_{number}", text)
    monkeypatch.setenv("SOME_SERVICE_KEY", BY_NAME)
    work, log = tmp_path / "work", tmp_path / "work" / "log.txt"
    commands = set[str]()
    with reward_service() as url:
        config = tmp_path / "private.yaml"
        variables = json.dumps({f"PLANTED_{number}": text for number, (text, _) in enumerate(PLANTED.values())})
        config.write_text(json.dumps({"rm_type": "remote_rm", "rm_url": url, "train_env_vars": variables}))
        command = train_command(qwen3, work, "--keep-rollouts", "--config", str(config), rollouts=3)
        place = command.index("--custom-rm-path")
        del command[place : place + 2]
        with started(command, log) as process:

            def look() -> None:
                for each in tree(process):
                    with contextlib.suppress(psutil.Error):
                        commands.add(" ".join(each.cmdline()))

            code, _ = watch_to_the_end(process, log, 600, look)
    text = log.read_text()
    assert code != 0 and "HTTP 400" in text and "[removed]" in text, text[-3000:]
    report = Path(sys.executable).with_name("slime-launch")
    subprocess.run([str(report), "report", str(work / "out")], check=True, timeout=240, capture_output=True)
    files = [path for path in work.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"settings.json", "metrics.jsonl", "report.html", "log.txt"} <= names, names
    hidden = {*SECRETS, IN_ADDRESS, KEY, SIGNATURE, BY_NAME}
    found = [
        (path.name, secret, data[max(0, data.find(secret.encode()) - 60) :][:60])
        for path in files
        for data in contents(path)
        for secret in hidden
        if secret.encode() in data or json.dumps(secret)[1:-1].encode() in data
    ]
    assert found == []
    assert [line for line in commands for secret in hidden if secret in line] == []
    assert os.environ["SOME_SERVICE_KEY"] == BY_NAME
