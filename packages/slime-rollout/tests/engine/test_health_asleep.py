"""A fleet that gives its memory back: the same one as in `test_health`."""

import signal
import time

import pytest

from slime_core.memory import Held
from slime_rollout.engine import EngineDiedError
from slime_rollout.engine.sleep import IDLE_SECONDS, EngineMemory
from slime_rollout.http import call
from support.failing_fleet import MARGIN, running, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared):
    """The fleet that both tests share, whole before and after each of them."""
    shared.whole()
    shared.start_of_test = shared.now()
    yield shared
    shared.whole()


def test_no_engine_is_started_where_there_is_no_memory_and_none_that_sleeps_is_asked_to_generate(fleet):
    fleet.update(1)
    since = fleet.start_of_test
    fleet.fleet.begin_sleep()
    probes = call("GET", f"{fleet.url(1)}/look")["probes"]
    fleet.signal("engine 0", signal.SIGKILL)
    fleet.wait_for("engine 0", "unhealthy", since=since)
    checked = fleet.fleet._engines[1].now.checked
    wait_until(lambda: fleet.fleet._engines[1].now.checked > checked, what="a health check")
    assert call("GET", f"{fleet.url(1)}/look")["probes"] == probes
    assert fleet.fleet.engine_urls == [fleet.url(1)] and fleet.fleet.serves()
    assert "restarted" not in fleet.events("engine 0", since)
    fleet.fleet.end_sleep(awake=False)  # there is room for weights, and engines cannot generate yet
    fleet.wait_for("engine 0", "started", since=since)
    assert call("GET", f"{fleet.url(1)}/look")["probes"] == probes
    fleet.update(2)
    fleet.fleet.end_sleep(awake=True)
    wait_until(lambda: call("GET", f"{fleet.url(1)}/look")["probes"] > probes, what="a health check")


def test_an_engine_that_keeps_its_memory_is_replaced_when_there_is_room(fleet):
    fleet.update(3)
    since = fleet.start_of_test
    fleet.fleet.begin_sleep()
    fleet.fleet.replace([fleet.url(0)])
    fleet.wait_for("engine 0", "killed", since=since)
    assert "restarted" not in fleet.events("engine 0", since)
    fleet.fleet.end_sleep(awake=True)
    fleet.wait_for("engine 0", "started", since=since)
    fleet.fleet.begin_sleep()
    fleet.fleet.end_sleep(awake=True)
    fleet.update(4)


def test_a_dead_engine_that_is_asked_for_its_memory_is_not_taken_for_a_busy_one(tmp_path):
    with running(tmp_path, use_fault_tolerance=False) as fleet:
        memory, urls = EngineMemory(fleet.config.key), [fleet.url(0)]
        assert memory.release(urls, Held.NOTHING) == memory.resume(urls, Held.EVERYTHING) == []
        fleet.signal("engine 0", signal.SIGKILL)
        begun = time.monotonic()
        assert memory.release(urls, Held.NOTHING) == urls
        with pytest.raises(EngineDiedError, match=r"ended by itself \(exit code 137\)"):
            fleet.fleet.replace(urls)
        assert time.monotonic() - begun < MARGIN < IDLE_SECONDS
