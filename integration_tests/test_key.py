"""Engines and router ask for an API key, which nothing of a run shows."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from ended import FOREVER, end_run, trained
from launching import Assets, listening, train_command

OWN = "planted-0123456789"
SERVERS = {"sglang.launch_server": "/model_info", "sglang::router": "/workers"}


def status(url: str, key: str | None) -> int:
    """The HTTP status of a GET with a key, or without one."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize("given", [None, pytest.param(OWN, marks=pytest.mark.full)])
def test_without_the_runs_key_nothing_is_answered_and_nothing_shows_it(
    llama: Assets, tmp_path: Path, given: str | None
) -> None:
    keys: set[str] = set()
    answers: list[tuple[str, int, int, int]] = []
    shown: list[str] = []

    def look(family: list[psutil.Process]) -> None:
        for process in family:
            values = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
            keys.update(value.partition("=")[2] for value in values if value.startswith("SLIME_API_KEY="))
        [key] = keys
        lines = {process: " ".join(process.cmdline()) for process in family}
        for server, path in SERVERS.items():
            for _, host, port in listening([one for one, line in lines.items() if server in line]):
                tries = (status(f"http://{host}:{port}{path}", one) for one in (None, "wrong", key))
                answers.append((server, *tries))
        shown.extend(line for line in lines.values() if key in line)
        family[0].send_signal(signal.SIGINT)

    extra = ["--check-weight-update-equal", *(["--sglang-api-key", given] if given else [])]
    command = train_command(llama, tmp_path, *extra, rollouts=FOREVER)
    ended = end_run(command, tmp_path, look, ready=trained(tmp_path, 2))
    assert ended.code == 130, f"exit code {ended.code}\n{ended.text[-4000:]}"
    [key] = keys
    assert key == given if given else re.fullmatch(r"[\w-]{43}", key)
    # the router's port for Prometheus answers whatever it is asked with counts
    assert set(answers) - {("sglang::router", 200, 200, 200)} == {(server, 401, 401, 200) for server in SERVERS}
    # what the user has typed stands in the launcher's own lines
    assert all("slime-launch train" in line or "slime_launch.driver" in line for line in shown) if given else not shown
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [str(path) for path in files if key.encode() in path.read_bytes()] == []
