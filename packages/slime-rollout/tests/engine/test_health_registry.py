"""What the monitor does when the router refuses its engines, or an engine dies just after its start."""

import logging
import types

import pytest

from slime_rollout.engine import EngineDiedError, EngineError, NoRoomError, health
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.health import FleetMonitor, Registry, not_ready
from slime_rollout.engine.server import SGLangEngine
from slime_rollout.engine.slots import EventLog, read_events
from slime_rollout.http import HttpError

pytestmark = pytest.mark.timeout(60)
URL = "http://engine"


class Router:
    """Answers an offer with a status; 200 is none that it refuses."""

    url = "http://router"

    def __init__(self):
        self.status, self.reason = 200, "no"

    def workers(self):
        return {}

    def offer_worker(self, url, role):
        if self.status != 200:
            raise HttpError("POST", f"{self.url}/workers", self.status, self.reason)


@pytest.fixture
def router():
    return Router()


@pytest.fixture
def register(router, monkeypatch):
    """Tell the router of one engine, at a time in seconds."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    engine = types.SimpleNamespace(process=types.SimpleNamespace(spec=types.SimpleNamespace(router_role=None)))
    place = types.SimpleNamespace(url=router.url, process=router)
    told = Registry([], place, lambda *event: None)

    def register(seconds):
        now[0] = seconds
        told.register({URL: engine})

    return register


def test_a_router_that_refuses_lastingly_ends_the_run_with_its_own_words(router, register, caplog):
    router.status, router.reason = 400, "no model is named"
    with caplog.at_level(logging.WARNING):
        for seconds in (0.0, 1.0, health.REFUSED_SECONDS):
            register(seconds)
    assert caplog.text.count("no model is named") == 1
    with pytest.raises(EngineError, match=r"the router http://router refuses .*HTTP 400: no model is named; see that"):
        register(health.REFUSED_SECONDS + 1.0)


@pytest.mark.parametrize("between", [200, 503])
def test_one_that_refuses_for_a_moment_is_told_again(router, register, between):
    for start in (0.0, 100.0, 200.0):
        for router.status in (400, between):
            register(start)


def test_one_that_is_away_is_told_for_as_long_as_it_takes(router, register, caplog):
    with caplog.at_level(logging.WARNING):
        for seconds in range(0, 1000, 10):
            router.status = 503
            register(float(seconds))
    assert len(caplog.records) == 1
    router.reason = "starting"
    register(1000.0)
    assert len(caplog.records) == 2


class DiesOnceReady(SGLangEngine):
    def __init__(self):
        pass

    def is_ready(self, timeout):
        return True

    def freeze_gc(self):
        raise EngineDiedError("ended by itself")


def test_an_engine_that_dies_once_it_is_ready_is_one_more_that_is_not():
    assert not_ready(DiesOnceReady()) == "has ended"


def test_an_engine_that_no_node_has_room_for_is_tried_again_and_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "ROOM_AGAIN_SECONDS", 0.0)
    refusals = [NoRoomError("no node has room")] * 3

    def start():
        if refusals:
            raise refusals.pop()
        slot.now = types.SimpleNamespace(has_no_room=False, process=None)
        monitor._stopping.set()

    slot = types.SimpleNamespace(name="engine 0", url=URL, restarts=0, start=start)
    slot.now = types.SimpleNamespace(has_no_room=False, due=0.0)
    router = types.SimpleNamespace(is_external=True, now=types.SimpleNamespace(up=False))
    monitor = FleetMonitor([slot], router, EngineConfig(), EventLog(tmp_path))
    monitor._start_again(slot)
    assert slot.now.has_no_room and slot.restarts == 0
    while not monitor._stopping.is_set():
        monitor._look_at_all()
    assert [event["event"] for event in read_events(tmp_path)] == ["no_room", "restarted"]
    assert slot.restarts == 0  # the engine is not at fault: nodes may come and go as often as they like
