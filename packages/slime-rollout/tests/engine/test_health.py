"""Fault tolerance: the real router, with engines that are up in a moment and fail in every way.

Every fault is shown to have happened: by processes that are gone or were stopped, and by the log of events.
"""

import concurrent.futures
import contextlib
import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

import pytest

from slime_rollout.engine import EngineDiedError, EngineError, PortInUseError, health
from slime_rollout.engine.slots import EVENTS_FILE, read_events
from slime_rollout.http import INCOMPLETE, HttpError, call
from slime_rollout.supervise import reaper
from support.failing_fleet import INTERVAL, MARGIN, TIMEOUT, VERSIONS, Fleet, command, running, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared):
    """The fleet that all tests share, whole before and after each of them."""
    shared.whole()
    shared.start_of_test = shared.now()
    yield shared
    shared.whole()


@contextlib.contextmanager
def requests(fleet, count=8, milliseconds=400):
    """Requests that are in flight in the block; all finish."""
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        replies = [pool.submit(fleet.generate, milliseconds) for _ in range(count)]
        wait_until(lambda: all(generated(fleet, number) for number in (0, 1)), what="requests in both engines")
        yield
        assert len([reply.result(60)["port"] for reply in replies]) == count


def generated(fleet, number):
    with contextlib.suppress(HttpError):
        return call("POST", f"{fleet.url(number)}/look", {})["generated"]


REPLACED = ["restarted", "started", "weights", "registered"]


def test_a_killed_engine_is_replaced_and_its_requests_are_answered_elsewhere(fleet):
    since, url = fleet.now(), fleet.url(0)
    with requests(fleet, milliseconds=1500):
        pids = fleet.signal("engine 0", signal.SIGKILL)
        fleet.wait_for("engine 0", "restarted", since=since)
        wait_until(lambda: url not in fleet.workers())
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    fleet.whole()
    assert fleet.events("engine 0", since) == ["unhealthy", *REPLACED]
    assert fleet.events("engine 1", since) == []
    assert read_events(fleet.logs)[since]["detail"] == "ended by itself (exit code 137)"
    assert fleet.url(0) != url


def test_a_stopped_engine_is_noticed_within_the_limit_killed_and_replaced(fleet):
    since = fleet.now()
    with requests(fleet, milliseconds=1500):
        supervisor = fleet.fleet._engines[1].process.pid
        os.kill(supervisor, signal.SIGSTOP)  # nothing may depend on it
        pids = fleet.signal("engine 1", signal.SIGSTOP)
        started = time.monotonic()
        fleet.wait_for("engine 1", "killed", since=since)
        assert time.monotonic() - started < INTERVAL + TIMEOUT + MARGIN
        assert not any(Path(f"/proc/{pid}").exists() for pid in [*pids, supervisor])
    fleet.whole()
    assert fleet.events("engine 1", since) == ["unhealthy", "killed", *REPLACED]
    assert f"gave no good answer within {TIMEOUT:g} s" in read_events(fleet.logs)[since]["detail"]


@pytest.mark.parametrize(
    "behaviour", [pytest.param({"health": "slow", "seconds": 1.0}, marks=pytest.mark.full), {"health": "flapping"}]
)
def test_an_engine_that_is_slow_or_answers_the_second_time_is_left_alone(tmp_path, behaviour):
    with running(tmp_path, rollout_health_check_timeout=MARGIN) as fleet:
        since = fleet.now()
        fleet.behave(0, **behaviour)
        before = probes(fleet)
        wait_until(lambda: probes(fleet) >= before + 3)
        assert fleet.events(since=since) == []


def probes(fleet):
    return call("GET", f"{fleet.url(0)}/model_info")["probes"]


@pytest.mark.full
def test_an_engine_that_only_says_that_it_is_ill_is_replaced(fleet):
    fleet.behave(0, health="bad")
    fleet.wait_for("engine 0", "registered", since=fleet.start_of_test)
    assert fleet.events("engine 0", fleet.start_of_test) == ["unhealthy", "killed", *REPLACED]
    assert "HTTP 503" in read_events(fleet.logs)[fleet.start_of_test]["detail"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_the_router_is_replaced_at_its_address_and_gets_its_engines_again(fleet, signum):
    since, url = fleet.now(), fleet.fleet.router_url
    with requests(fleet):
        pids = fleet.signal("router", signum)
        fleet.wait_for("router", "started", since=since)
    fleet.whole()
    assert fleet.fleet.router_url == url
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    killed = ["killed"] if signum == signal.SIGSTOP else []
    assert fleet.events("router", since) == ["unhealthy", *killed, "restarted", "started"]
    assert fleet.events("engine 0", since) == fleet.events("engine 1", since) == ["registered"]


def test_a_new_router_is_asked_once_to_use_an_engine_that_hangs_unnoticed(tmp_path):
    """It tries ten engines at once, each for long: asked twice a second about one that hangs, it takes no other."""
    with running(tmp_path, rollout_health_check_timeout=6.0) as fleet:
        hangs = fleet.url(0)
        fleet.signal("engine 0", signal.SIGSTOP)
        fleet.signal("router", signal.SIGKILL)
        fleet.wait_for("engine 1", "registered", since=0)
        fleet.wait_for("engine 0", "killed", since=0)
        # None where the machine is so slow that the engine was killed before the router was there again.
        lines = [line for line in router_log(fleet) if hangs in line and "instance_id" in line]
        assert len({re.search(r"instance_id=(\S+)", line)[1] for line in lines}) <= 1
        fleet.whole()


def router_log(fleet):
    """Its lines, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", (fleet.logs / "router.log").read_text()).splitlines()


def test_an_engine_gets_no_requests_before_it_has_the_current_weights(fleet):
    version = next(VERSIONS)
    assert len(fleet.update(version)) == 2
    since = fleet.now()
    fleet.signal("engine 0", signal.SIGKILL)
    behind = wait_until(fleet.fleet.engines_behind)
    assert behind == [fleet.url(0)]
    assert {fleet.generate()["version"] for _ in range(20)} == {str(version)}
    assert fleet.workers() == {fleet.url(1)}
    assert fleet.fleet.not_serving() == ["engine 0"]
    assert fleet.update(version, only_behind=True) == behind
    fleet.wait_for("engine 0", "registered", since=since)
    assert fleet.events("engine 0", since) == ["unhealthy", *REPLACED]
    assert read_events(fleet.logs)[-2]["detail"] == f"version {version}"
    assert fleet.update(version, only_behind=True) == []


def test_if_all_engines_died_requests_wait_for_the_weights(fleet):
    version = next(VERSIONS)
    fleet.update(version)
    with requests(fleet, milliseconds=1500):
        for name in ("engine 0", "engine 1"):
            fleet.signal(name, signal.SIGKILL)
        wait_until(lambda: len(fleet.fleet.engines_behind()) == 2)
        assert fleet.workers() == set()
        assert len(fleet.update(version, only_behind=True)) == 2
    assert fleet.generate()["version"] == str(version)


def test_an_update_waits_for_an_engine(fleet):
    for name in ("engine 0", "engine 1"):
        fleet.signal(name, signal.SIGKILL)
    wait_until(lambda: not fleet.fleet.engine_urls)
    version = next(VERSIONS)
    assert fleet.update(version)
    wait_until(lambda: not fleet.fleet.not_serving() or fleet.update(version, only_behind=True))


def test_an_engine_that_comes_up_amid_an_update_is_behind_after_it(fleet):
    (fleet.model / "wait").touch()
    since = fleet.now()
    fleet.signal("engine 1", signal.SIGKILL)
    fleet.wait_for("engine 1", "restarted", since=since)
    assert fleet.fleet.begin_update() == [fleet.url(0)]
    (fleet.model / "wait").unlink()
    fleet.wait_for("engine 1", "started", since=since)
    assert fleet.fleet.engines_behind() == []
    time.sleep(1.0)  # long enough for the monitor to do what it must not do
    assert fleet.workers() == {fleet.url(0)}
    fleet.fleet.confirm_update(version := next(VERSIONS))
    assert fleet.fleet.engines_behind() == [fleet.url(1)]
    time.sleep(1.0)
    assert fleet.workers() == {fleet.url(0)}
    fleet.update(version, only_behind=True)


def test_a_pause_for_new_weights_is_no_fault_however_long(fleet):
    fleet.behave(0, health="slow", seconds=1.0)
    before = probes(fleet)
    wait_until(lambda: probes(fleet) > before)  # a question is open when the update begins
    urls = fleet.fleet.begin_update()
    for url in urls:
        call("POST", f"{url}/pause_generation", {})
    time.sleep(INTERVAL + TIMEOUT + 1.0)
    for url in urls:
        call("POST", f"{url}/continue_generation", {})
    fleet.fleet.confirm_update(next(VERSIONS))
    fleet.behave(0, health="good")
    before = probes(fleet)
    wait_until(lambda: probes(fleet) > before)
    assert fleet.events(since=fleet.start_of_test) == []


def test_an_engine_that_serves_is_watched_as_ever_while_another_one_catches_up(fleet):
    version, since = next(VERSIONS), fleet.now()
    fleet.update(version)
    fleet.signal("engine 0", signal.SIGKILL)
    behind = wait_until(fleet.fleet.engines_behind)
    assert fleet.fleet.begin_update(only_behind=True) == behind
    fleet.behave(1, health="good", hangs="scheduler")
    fleet.wait_for("engine 1", "killed", since=since)
    call("POST", f"{behind[0]}/update_weight_version", {"new_version": str(version)})
    fleet.fleet.confirm_update(version)
    fleet.wait_for("engine 0", "registered", since=since)
    wait_until(lambda: not fleet.fleet.not_serving() or fleet.update(version, only_behind=True))


def test_a_failed_update_names_its_reason_and_none_of_its_engines_serves(fleet):
    version = next(VERSIONS)
    fleet.fleet.begin_update()
    fleet.signal("engine 0", signal.SIGSTOP)
    assert fleet.fleet.fail_update()
    assert "unhealthy" in fleet.events("engine 0", fleet.start_of_test)
    wait_until(lambda: fleet.workers() == set())
    fleet.update(version)
    wait_until(lambda: not fleet.fleet.not_serving() or fleet.update(version, only_behind=True))
    assert {fleet.generate()["version"] for _ in range(8)} == {str(version)}


@pytest.mark.parametrize("hangs", ["scheduler", pytest.param("update", marks=pytest.mark.full)])
def test_an_engine_that_hangs_amid_an_update_holds_nobody_up(fleet, hangs):
    """Its scheduler, so that only `/health` is answered, which is all that is asked then; or nothing but the update."""
    version, since, url = next(VERSIONS), fleet.now(), fleet.url(0)
    fleet.behave(0, health="good", hangs=hangs)
    started = time.monotonic()
    assert fleet.push(version) == [fleet.url(1)]
    assert time.monotonic() - started < 3 * (INTERVAL + TIMEOUT) + MARGIN
    assert fleet.workers() <= {fleet.url(1)}
    assert {fleet.generate()["version"] for _ in range(8)} == {str(version)}
    assert fleet.events("engine 0", since)[:2] == ["unhealthy", "killed"]
    assert "no answer to a request of a weight update" in read_events(fleet.logs)[since]["detail"]
    behind = wait_until(fleet.fleet.engines_behind)
    assert behind == [fleet.url(0)] != [url]
    fleet.update(version, only_behind=True)
    fleet.wait_for("engine 0", "registered", since=since)
    assert fleet.events("engine 1", since) in ([], ["weights", "registered"])


def test_engines_that_hang_amid_the_same_update_are_replaced_together(fleet, monkeypatch):
    """One after the other, each would cost a whole time limit, and an update that is sent again."""
    version, since, urls, failed = next(VERSIONS), fleet.now(), [fleet.url(0), fleet.url(1)], []
    for number in (0, 1):
        fleet.behave(number, health="good", hangs="update")
    fail_update = fleet.fleet.fail_update
    monkeypatch.setattr(fleet.fleet, "fail_update", lambda silent: failed.append(silent) or fail_update(silent))
    fleet.push(version)
    assert failed == [tuple(urls)]
    for name in ("engine 0", "engine 1"):
        assert fleet.events(name, since)[:2] == ["unhealthy", "killed"]
    wait_until(lambda: not fleet.fleet.not_serving() or fleet.update(version, only_behind=True))


def test_an_update_that_fails_by_itself_is_no_engines_fault(fleet):
    fleet.fleet.begin_update()
    assert not fleet.fleet.fail_update()
    fleet.update(next(VERSIONS))
    assert set(fleet.events(since=fleet.start_of_test)) <= {"weights", "registered"}


def test_past_the_budget_one_error_names_the_engine_and_its_log(tmp_path):
    with running(tmp_path, rollout_max_restarts=1) as fleet:
        for _ in range(2):
            fleet.whole()
            fleet.fleet.check()
            before = fleet.now()
            fleet.signal("engine 1", signal.SIGKILL)
            killed = time.monotonic()
            fleet.wait_for("engine 1", "unhealthy", since=before)
        error = wait_until(lambda: failure(fleet))
        assert time.monotonic() - killed < MARGIN
        assert isinstance(error, EngineDiedError)
        assert str(error).startswith(
            f"engine 1 ({fleet.url(1)}) ended by itself (exit code 137), after it was restarted 1 times, as often as "
            "--rollout-max-restarts allows; the first cause: ended by itself (exit code 137); the end of its log "
        )
        assert fleet.events("engine 1")[-2:] == ["unhealthy", "budget_exhausted"]
        depths = [len(traceback.extract_tb(failure(fleet).__traceback__)) for _ in range(3)]
        assert len(set(depths)) == 1  # although it is the same error that is raised again and again


def failure(fleet):
    try:
        fleet.fleet.check()
    except EngineError as error:
        return error


@pytest.mark.full
def test_an_engine_that_does_not_start_again_uses_up_the_budget(tmp_path):
    with running(tmp_path, rollout_max_restarts=2) as fleet:
        (fleet.model / "broken").touch()
        fleet.signal("engine 0", signal.SIGKILL)
        error = wait_until(lambda: failure(fleet))
        assert "did not start (exit code 1), after it was restarted 2 times" in str(error)
        assert str(error).endswith("no such model")
        assert fleet.events("engine 0") == ["unhealthy", "restarted"] * 2 + ["unhealthy", "budget_exhausted"]
        with pytest.raises(EngineDiedError):
            fleet.fleet.begin_update()


def test_a_fleet_can_be_stopped_amid_a_restart(tmp_path):
    with running(tmp_path) as fleet:
        (fleet.model / "wait").touch()
        for name in ("engine 0", "engine 1"):
            fleet.signal(name, signal.SIGKILL)
            fleet.wait_for(name, "restarted", since=0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            update = pool.submit(fleet.fleet.begin_update)  # waits for an engine
            started = time.monotonic()
            fleet.fleet.stop()
            assert time.monotonic() - started < MARGIN
            assert "were stopped" in str(update.exception(MARGIN))
        assert not fleet.left()
        count = fleet.now()
        fleet.fleet.stop()
        assert fleet.now() == count


def test_an_interrupt_amid_the_start_leaves_nothing(tmp_path):
    fleet = Fleet(tmp_path)
    (fleet.model / "wait").touch()

    def interrupt(ready, total, seconds):
        if len(fleet.left()) >= 6:  # two engines and the router, each under its supervisor
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fleet.start(interrupt)
    assert not fleet.left()


def test_a_router_that_dies_before_the_engines_are_up_ends_the_start(tmp_path):
    fleet = Fleet(tmp_path)
    (fleet.model / "wait").touch()

    def kill(ready, total, seconds):
        supervisors = [pid for pid in fleet.left() if "launch_router" in command(pid) and "reaper.py" in command(pid)]
        for process in reaper.descendants(supervisors[0]) if ready and supervisors else []:
            os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(EngineDiedError, match=r"sglang-router .* ended by itself \(exit code 137\)"):
        fleet.start(kill)
    assert not fleet.left()


def test_a_port_that_somebody_else_took_costs_nothing(tmp_path):
    fleet = Fleet(tmp_path, rollout_max_restarts=1)
    taken = fleet.model / "port_is_taken"
    taken.touch()
    with contextlib.ExitStack() as stack:
        fleet.start()
        stack.callback(fleet.fleet.stop)
        assert not taken.exists()
        assert fleet.events() == []
        taken.touch()
        fleet.signal("engine 0", signal.SIGKILL)
        fleet.wait_for("engine 0", "registered", since=0)
        assert not taken.exists()
        assert fleet.events("engine 0") == ["unhealthy", "restarted", *REPLACED]
        fleet.whole()


def test_a_router_whose_port_somebody_took_is_tried_again_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "PORT_AGAIN_SECONDS", 0.6)
    times = []

    def start():
        times.append(time.monotonic())
        raise PortInUseError("port 7 is taken")

    with running(tmp_path, rollout_max_restarts=2) as fleet:
        monkeypatch.setattr(fleet.fleet._router, "_start", start)
        fleet.signal("router", signal.SIGKILL)
        error = wait_until(lambda: failure(fleet))
        assert "could not be started: port 7 is taken, after it was restarted 2 times" in str(error)
        first, second = times
        assert second - first >= 0.6
        assert fleet.events("router") == ["unhealthy"] * 3 + ["budget_exhausted"]


def test_an_update_that_fails_while_the_router_is_looked_at_is_not_forgotten(tmp_path, monkeypatch):
    with running(tmp_path) as fleet, concurrent.futures.ThreadPoolExecutor(1) as pool:
        monitor, router, seen, go_on = fleet.fleet._monitor, fleet.fleet._router.process, [], threading.Event()
        workers = router.workers

        def hold():
            known = workers()
            seen.append(known)
            assert go_on.wait(MARGIN)
            return known

        monkeypatch.setattr(router, "workers", hold)
        monitor._registry.next_look = 0.0
        wait_until(lambda: seen)
        fleet.fleet.begin_update()
        failed = pool.submit(fleet.fleet.fail_update)
        wait_until(lambda: fleet.fleet._engines[0].now.weights == INCOMPLETE)
        started = time.monotonic()
        go_on.set()
        wait_until(lambda: workers() == {})
        assert time.monotonic() - started < health.LOOK_SECONDS - 1.0
        assert not failed.result(MARGIN)


def test_an_error_of_the_monitor_itself_does_not_pass_in_silence(tmp_path):
    with running(tmp_path) as fleet:
        (fleet.logs / EVENTS_FILE).mkdir()
        fleet.signal("engine 0", signal.SIGKILL)
        error = wait_until(lambda: failure(fleet))
        assert str(error).startswith("fault tolerance failed: IsADirectoryError")


def test_without_fault_tolerance_a_dead_engine_is_an_error_and_stays_dead(tmp_path):
    with running(tmp_path, use_fault_tolerance=False) as fleet:
        assert (
            fleet.fleet.engines_behind()
            == fleet.fleet.not_serving()
            == fleet.fleet.begin_update(only_behind=True)
            == []
        )
        assert fleet.update(1) == fleet.fleet.engine_urls
        assert not fleet.fleet.fail_update()
        fleet.signal("engine 0", signal.SIGKILL)
        error = wait_until(lambda: failure(fleet))
        assert "ended by itself (exit code 137)" in str(error)
        assert not (fleet.logs / EVENTS_FILE).exists()
        with pytest.raises(EngineDiedError):
            fleet.fleet.begin_update()
