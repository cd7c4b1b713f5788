import socket

import pytest

from slime_core.errors import ConfigError
from slime_core.hooks import HookArgs
from slime_rollout.engine import PortInUseError, addresses
from slime_rollout.engine.addresses import (
    bound,
    check_port_free,
    free_port,
    get_model_url,
    is_this_machine,
    router_args,
)

ROUTERS = {"actor": "http://127.0.0.1:3000", "judge": "http://[::1]:4000"}


def test_hooks_find_every_router():
    args = HookArgs({"lr": 1.0} | router_args(ROUTERS["actor"], ROUTERS))
    assert (args.sglang_router_ip, args.sglang_router_port) == ("127.0.0.1", 3000)
    assert args.sglang_model_routers == {"actor": ["127.0.0.1", 3000], "judge": ["::1", 4000]}
    assert {name: get_model_url(args, name, "") for name in ROUTERS} == ROUTERS
    assert get_model_url(args, "judge") == get_model_url(args, "judge", "/generate") == "http://[::1]:4000/generate"
    assert get_model_url(args) == get_model_url(args, "actor")


def test_a_model_that_is_not_there():
    with pytest.raises(ConfigError, match="no model is called teacher; there are: actor, judge"):
        get_model_url(HookArgs(router_args(ROUTERS["actor"], ROUTERS)), "teacher")
    with pytest.raises(ConfigError, match="there are: none"):
        get_model_url(HookArgs({}), "default")


ELSEWHERE = "http://203.0.113.1:30000"  # an address for documentation, which nobody has


def test_this_machine_by_all_its_names():
    own = socket.gethostbyname(socket.gethostname())
    for host in ("127.0.0.1", "localhost", socket.gethostname(), own):
        assert is_this_machine(f"http://{host}:30000"), host


def test_other_machines():
    assert not is_this_machine(ELSEWHERE)
    assert not is_this_machine("http://no-such-machine.invalid:1")


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
    """A port bound elsewhere: by another thread that checks it, or by a process that was forked during such a check."""
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
    monkeypatch.setattr(addresses, "_PORT_RANGE", file)
    assert all(15000 <= free_port() < below for _ in range(50))


def test_free_ports_are_usable_and_not_those_promised_before():
    found: set[int] = set()
    for _ in range(20):
        found.add(free_port(without=found))
    assert len(found) == 20
    with socket.create_server(("127.0.0.1", found.pop())):
        pass
