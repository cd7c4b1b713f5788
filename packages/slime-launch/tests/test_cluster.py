"""What a cluster is asked before a run joins it, by Ray's own head service, with a token and without."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from slime_launch import cluster
from slime_launch.cluster import asks_for_token, check_own_token, check_token, cluster_notices, has_token, knock
from slime_launch.doctor import NOTE, check_machine
from slime_launch.errors import PlacementError
from slime_launch.plain_text import BETWEEN_NODES

pytestmark = pytest.mark.real
# Not by importing Ray, which reads once, for all tests of this process, whether it asks for a token.
HEAD = Path(importlib.util.find_spec("ray").origin).parent / "core/src/ray/gcs/gcs_server"
TOKEN = "5e" * 32


@contextlib.contextmanager
def head(log, **environment):
    """The service of a cluster that everything else of it connects to; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [HEAD, f"--gcs_server_port={port}", "--node-ip-address=127.0.0.1", "--session-name=s", "--config_list=e30="]
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=os.environ | environment)
    try:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and process.poll() is None:
            with contextlib.suppress(ConnectionError):
                knock(f"127.0.0.1:{port}")
                break
            time.sleep(0.02)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def open_head(tmp_path):
    with head(tmp_path / "open.txt", RAY_AUTH_MODE="disabled") as address:
        yield address


@pytest.fixture
def closed_head(tmp_path):
    with head(tmp_path / "closed.txt", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as address:
        yield address


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_token")
def test_a_cluster_without_a_token_is_said_and_refused_where_one_is_required(open_head, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)  # to have one says nothing about the cluster
    assert asks_for_token(open_head) is False
    [line] = cluster_notices(open_head)
    assert open_head in line and "RAY_AUTH_MODE=token" in line and "--ray-require-token" in line
    assert [str(finding) for finding in check_machine(open_head)][2:] == [
        f"note     {line}",
        f"note     {BETWEEN_NODES}",
    ]
    check_token(open_head, required=False)
    with pytest.raises(PlacementError, match="accepts commands without a token; make one with"):
        check_token(open_head, required=True)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("no_token")
def test_a_cluster_with_a_token_is_joined_by_who_has_one(closed_head, monkeypatch):
    assert asks_for_token(closed_head) is True
    assert cluster_notices(closed_head) == []
    check_token(closed_head, required=True)
    with pytest.raises(PlacementError, match=r"none is here; copy the one of its head to ~/\.ray/auth_token"):
        check_own_token(closed_head)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    check_own_token(closed_head)


@pytest.mark.usefixtures("no_token")
def test_a_cluster_that_does_not_answer_is_none_with_a_token():
    assert asks_for_token("127.0.0.1:9") is None and asks_for_token("ray://127.0.0.1:9") is None
    assert cluster_notices("127.0.0.1:9") == []
    check_own_token("127.0.0.1:9")
    with pytest.raises(PlacementError, match="could not be asked whether it asks for a token"):
        check_token("127.0.0.1:9", required=True)


def test_a_run_of_its_own_ray_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(cluster, "asks_for_token", None)
    assert cluster_notices(None) == []
    check_token(None, required=True)
    assert [finding.level for finding in check_machine(None)].count(NOTE) == 0


@pytest.mark.usefixtures("no_token")
def test_rays_own_mode_without_a_token_is_refused_before_ray_ends_the_process(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(PlacementError, match="none is here"):
        check_own_token("127.0.0.1:9")


@pytest.mark.usefixtures("no_token")
def test_where_a_token_is_looked_for(tmp_path):
    assert not has_token()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)
    assert has_token()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_whether_somebody_listens_is_asked_over_ipv4_and_ipv6(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        address = f"[{host}]:{server.getsockname()[1]}" if ":" in host else f"{host}:{server.getsockname()[1]}"
        knock(address)
    with pytest.raises(ConnectionError, match="refused"):
        knock(address)
