"""What fills a place of a fleet. Replacing it is in `test_health.py`."""

import socket

import pytest

from slime_rollout.engine import PortInUseError
from slime_rollout.engine.addresses import LOOPBACK, free_port
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineLauncher, EngineSpec
from slime_rollout.engine.slots import PORT_ATTEMPTS, EngineSlot

pytestmark = pytest.mark.timeout(60)


class Ports:
    """Gives one port after the other, free or not."""

    def __init__(self, ports):
        self._ports = iter(ports)

    def take(self, host=LOOPBACK):
        return next(self._ports)


@pytest.fixture
def slot(quick_python, tmp_path):
    made = []

    def with_ports(ports):
        launcher = EngineLauncher(EngineConfig(sglang_python=quick_python), Ports(ports))
        spec = EngineSpec(model_path="hf", device="cpu")
        made.append(EngineSlot(0, spec, launcher, log_path=tmp_path / "engine.log"))
        return made[-1]

    yield with_ports
    for one in made:
        one.stop()


@pytest.fixture
def taken():
    with socket.create_server((LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_somebody_takes_before_the_start_is_given_up_for_another(slot, taken):
    free = free_port()
    engine = slot([taken, taken, free])
    engine.start()
    engine.process.wait_until_ready(30)
    assert engine.process.url == f"http://{LOOPBACK}:{free}"


def test_where_every_port_is_taken_nothing_is_started(slot, taken):
    ports = iter([taken] * 100)
    engine = slot(ports)
    with pytest.raises(PortInUseError, match=f"port {taken} cannot be used"):
        engine.start()
    assert len(list(ports)) == 100 - (PORT_ATTEMPTS + 1)
