"""Engines and router ask for an API key, which nothing of a run shows."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from ended import FOREVER, Ended, end_run, send, trained
from keys import SERVERS, KeySeen
from launching import Assets, train_command

OWN = "planted-0123456789"


@pytest.mark.real
@pytest.mark.timeout(1200)
def test_without_the_runs_key_nothing_is_answered_and_nothing_shows_it(
    undisturbed_story: tuple[Ended, KeySeen],
) -> None:
    ended, seen = undisturbed_story
    [key] = seen.keys
    assert re.fullmatch(r"[\w-]{43}", key)
    assert not seen.shown
    nobody_is_answered(ended, seen)


@pytest.mark.real
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_without_a_given_key_nothing_is_answered_and_only_what_was_typed_shows_it(
    llama: Assets, tmp_path: Path
) -> None:
    seen = KeySeen()
    command = train_command(llama, tmp_path, "--sglang-api-key", OWN, rollouts=FOREVER)
    ended = end_run(command, tmp_path, seen.then(send(signal.SIGINT)), ready=trained(tmp_path, 2))
    assert ended.code == 130, f"exit code {ended.code}\n{ended.text[-4000:]}"
    assert seen.keys == {OWN}
    # what the user has typed stands in the launcher's own lines
    assert all("slime-launch train" in line or "slime_launch.driver" in line for line in seen.shown)
    nobody_is_answered(ended, seen)


def nobody_is_answered(ended: Ended, seen: KeySeen) -> None:
    """Without the key, by the servers; and no file of the run holds it."""
    [key] = seen.keys
    # the router's port for Prometheus answers whatever it is asked with counts
    assert set(seen.answers) - {("sglang::router", 200, 200, 200)} == {(server, 401, 401, 200) for server in SERVERS}
    files = [path for path in ended.work.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [str(path) for path in files if key.encode() in path.read_bytes()] == []
