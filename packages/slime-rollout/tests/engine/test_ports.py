import socket

import pytest

from slime_rollout.engine import ports
from slime_rollout.engine.errors import PortInUseError
from slime_rollout.engine.ports import bound, check_port_free, free_port


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_named_with_its_flag(listening):
    with pytest.raises(PortInUseError, match=rf"--sglang-router-port {listening} cannot be used on 127.0.0.1"):
        check_port_free(listening, flag="--sglang-router-port")


def test_an_address_of_another_machine():
    with pytest.raises(PortInUseError, match=r"port 20000 cannot be used on 203\.0\.113\.1"):
        check_port_free(20000, "203.0.113.1")


def test_a_port_is_free_again_at_once(listening):
    with socket.create_connection(("127.0.0.1", listening)):
        pass
    check_port_free(free_port())


def test_a_port_that_is_looked_at_is_not_taken():
    """Another thread's look, or what a process that was forked amid one has of it until it executes its program."""
    port = free_port()
    with bound("127.0.0.1", port):
        check_port_free(port)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(PortInUseError):
            check_port_free(port)


@pytest.mark.parametrize(
    ("ephemeral", "below"), [("32768\t60999", 32768), ("20000\t60999", 20000), ("1024\t65535", 32768), (None, 32768)]
)
def test_where_the_kernel_gives_nearly_all_ports_to_others_there_is_still_one(tmp_path, monkeypatch, ephemeral, below):
    file = tmp_path / "ip_local_port_range"
    if ephemeral is not None:
        file.write_text(ephemeral)
    monkeypatch.setattr(ports, "_PORT_RANGE", file)
    assert all(15000 <= free_port() < below for _ in range(50))


def test_free_ports_are_usable_and_not_those_promised_before():
    found: set[int] = set()
    for _ in range(20):
        found.add(free_port(without=found))
    assert len(found) == 20
    with socket.create_server(("127.0.0.1", found.pop())):
        pass
