"""On one machine nothing of a run can be reached from another: every socket listens on the loopback interface."""

from __future__ import annotations

import ipaddress
import json

import pytest
from ended import Ended

PARTS = ("gcs_server", "raylet", "sglang", "router", "Trainer", "Rollout")


def is_loopback(address: str) -> bool:
    """Whether the address is in 127.0.0.0/8 or ::1; also as an IPv4 address written as IPv6."""
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_every_socket_listens_on_loopback(learned_run: Ended) -> None:
    """Those of the group by which weights travel, too."""
    settings = json.loads((learned_run.work / "out" / "settings.json").read_text())["settings"]
    assert settings["update_weight_transport"]["value"] == "gloo"
    commands = " ".join(command for command, _, _ in learned_run.listening)
    assert all(part in commands for part in PARTS), commands
    outside = sorted(socket for socket in learned_run.listening if not is_loopback(socket[1]))
    assert not outside, "\n".join(map(str, outside))


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_its_engine_was_forked_from_the_process_with_sglangs_imports(learned_run: Ended) -> None:
    """Else a start takes as long as these imports; what another environment has is said in this log."""
    assert "is started, not forked" not in (learned_run.work / "out" / "logs" / "rollout.log").read_text()
