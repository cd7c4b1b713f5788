"""The real router in front of small servers."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slime_rollout.engine import EngineDiedError, EngineStartError, PortInUseError
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.config import ROUTER_POLICIES, SESSION_POLICIES, EngineConfig
from slime_rollout.engine.router import ExternalRouter, RouterApi, check_router_port, router_command
from slime_rollout.http import HttpError, call

pytestmark = pytest.mark.timeout(90)

SESSIONS = [f"session {number}" for number in range(16)]


@pytest.mark.parametrize(
    "policy", [pytest.param(one, marks=[pytest.mark.full] * (one != "consistent_hashing")) for one in SESSION_POLICIES]
)
def test_a_session_stays_at_one_engine_and_moves_on_when_that_dies(router, worker, ask, policy):
    one, other = worker("one"), worker("other")
    running = router(router_policy=policy)
    running.add_workers([one.url, other.url])
    places = {session: {ask(running, session) for _ in range(4)} for session in SESSIONS}
    assert all(len(place) == 1 for place in places.values())
    home = {session: place.pop() for session, place in places.items()}
    assert set(home.values()) == {"one", "other"}
    if policy == "consistent_hashing":
        again = router(router_policy=policy)
        again.add_workers([other.url, one.url])
        assert {session: ask(again, session) for session in SESSIONS} == home
    one.end()
    assert {ask(running, session) for session in SESSIONS} == {"other"}


def test_a_new_session_goes_where_the_fewest_are(router, worker, ask):
    engines = [worker("one"), worker("other")]
    running = router(router_policy="manual")
    running.add_workers([engine.url for engine in engines])
    for engine in engines:
        engine.gate.clear()
    first = threading.Thread(target=ask, args=(running, "first"))
    first.start()
    try:
        while not (busy := [engine for engine in engines if engine.requests]):
            assert first.is_alive()
        (idle,) = [engine for engine in engines if engine not in busy]
        idle.gate.set()
        assert {ask(running, session) for session in SESSIONS} == {idle.name}
    finally:
        for engine in engines:
            engine.gate.set()
        first.join(20)


def test_without_a_session_the_same_policy_uses_all_engines(router, worker, ask):
    running = router(router_policy="manual")
    running.add_workers([worker("one").url, worker("other").url])
    assert {ask(running) for _ in range(40)} == {"one", "other"}


def test_another_policy_does_not_keep_sessions_together(router, worker, ask):
    """So the test above can fail."""
    running = router(router_policy="round_robin")
    running.add_workers([worker("one").url, worker("other").url])
    assert {ask(running, "session") for _ in range(4)} == {"one", "other"}


def test_the_router_of_this_interpreter_has_all_policies():
    code = (
        "import sys; from sglang_router.router import policy_from_str;"
        "from sglang_router.launch_router import parse_router_args;"
        "[policy_from_str(name) for name in sys.argv[1:]]"
    )
    subprocess.run([sys.executable, "-c", code, *ROUTER_POLICIES], check=True, timeout=240)
    for policy in ROUTER_POLICIES:
        assert policy in router_command(EngineConfig(router_policy=policy), port=1, prometheus_port=2)


def test_a_port_where_a_router_runs_already(router):
    port = int(router().url.rsplit(":", 1)[1])
    with pytest.raises(
        PortInUseError, match=f"port {port} .*; give a router that runs already with --sglang-router-url"
    ):
        check_router_port("127.0.0.1", port)


class Someone(RouterApi):
    """A router known by its address alone."""

    is_gone = False

    def __init__(self, url):
        self.url = url

    def check(self):
        if self.is_gone:
            raise EngineDiedError("gone")

    def log_excerpt(self):
        return "its log"


def test_an_engine_that_the_router_cannot_reach(router):
    running, url = router(), f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineStartError) as caught:
        running.add_workers([url], timeout=0.5)
    beginning = (
        f"the router {running.url} does not use {url} after 0.5 s; see whether it can reach them, and the end of"
    )
    assert str(caught.value).startswith(beginning)
    assert "router.log" in str(caught.value)


def test_one_that_ends_meanwhile_is_not_waited_for(router):
    running = router()
    someone = Someone(running.url)
    someone.is_gone = True
    with pytest.raises(EngineDiedError, match="gone"):
        someone.add_workers([f"http://127.0.0.1:{free_port()}"])


def test_one_that_a_signal_has_stopped_is_named(router, monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.router.CONTROL_TIMEOUT_SECONDS", 0.2)
    running = router()
    [pid, *_] = running.process_ids()
    os.kill(pid, signal.SIGSTOP)
    try:
        said = rf"{running.url} did not answer when .*; see process {pid}, stopped by a signal, and the end of its log"
        with pytest.raises(EngineStartError, match=said):
            running.add_workers(["http://127.0.0.1:1"])
    finally:
        os.kill(pid, signal.SIGCONT)


def test_one_that_does_not_answer_as_a_router_refuses(worker):
    url = worker("engine", {"/workers": {"status": "ok"}}).url
    with pytest.raises(
        EngineStartError, match=rf"the router {url} refused an engine: .* not a list of workers: .* its log"
    ):
        Someone(url).add_workers(["http://127.0.0.1:1"])
    with pytest.raises(HttpError, match="not a list of workers"):
        Someone(url).workers()


def test_an_engine_that_it_uses_already_is_not_offered_again(worker):
    known = {"url": "http://127.0.0.1:1", "id": "a", "is_healthy": True}
    stand_in = worker("router", {"/workers": {"workers": [known]}})
    Someone(stand_in.url).add_workers([known["url"]])
    assert stand_in.requests == []
    with pytest.raises(EngineStartError, match=r"does not use http://127.0.0.1:2 after 0 s"):
        Someone(stand_in.url).add_workers([known["url"], "http://127.0.0.1:2"], roles={}, timeout=0.0)
    assert stand_in.requests == [("/workers", {"url": "http://127.0.0.1:2"})]


def test_one_that_has_gone_before_it_is_taken_out_is_fine(monkeypatch):
    statuses = [404, 400]

    def call(method, url, *_, **more):
        if method == "DELETE":
            raise HttpError(method, url, statuses.pop(0), "no such worker")
        return {"workers": [{"url": "http://engine", "id": "a", "is_healthy": True}]}

    monkeypatch.setattr("slime_rollout.engine.router.call", call)
    someone = Someone("http://router")
    someone.remove_worker("http://engine")
    with pytest.raises(HttpError, match="HTTP 400"):
        someone.remove_worker("http://engine")


def test_questions_are_repeated_as_often_as_the_class_says(monkeypatch):
    asked = []

    def call(*args, attempts, **kwargs):
        asked.append(attempts)
        return {"workers": []}

    monkeypatch.setattr("slime_rollout.engine.router.call", call)
    once, often = Someone("http://127.0.0.1:1"), Someone("http://127.0.0.1:1")
    often.attempts = 3
    for each in (once, often):
        each.workers()
        each.offer_worker("http://127.0.0.1:2")
    once.healthy_workers()
    assert asked == [1, 1, 3, 3, 3]


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_engines_are_registered_for_the_time_of_the_run(router, worker, ask):
    theirs, engine = router(), worker("ours")
    given = ExternalRouter.connect(theirs.url + "/")
    assert given.url == theirs.url
    assert given.is_ready()
    given.add_workers([engine.url])
    assert ask(given) == "ours"
    given.check()
    given.request_stop()
    given.stop()
    wait_until(lambda: theirs.workers() == {})
    assert theirs.is_ready()


def test_what_was_registered_before_stays(router, worker):
    theirs, engine, new = router(), worker("before"), worker("new")
    theirs.add_workers([engine.url])
    given = ExternalRouter.connect(theirs.url, [engine.url, new.url])
    given.add_workers([engine.url, new.url])
    assert given.healthy_workers() == {engine.url, new.url}
    given.stop()
    wait_until(lambda: theirs.workers().keys() == {engine.url})


def test_an_engine_that_is_listed_only_after_it_was_taken_out_is_taken_out_again(monkeypatch):
    listed, deleted = [], []

    def call(method, url, *_, **more):
        if method == "DELETE":
            deleted.append(url)
        return {"workers": listed}

    monkeypatch.setattr("slime_rollout.engine.router.call", call)
    given = ExternalRouter("http://router")
    given.offer_worker("http://engine")
    given.remove_worker("http://engine")
    assert deleted == []
    listed.append({"url": "http://engine", "id": "a", "is_healthy": True})
    assert given.workers().keys() == {"http://engine"}  # so that it is taken out where it is not wanted
    given.stop()
    assert deleted == ["http://router/workers/a"]


def test_requests_would_go_to_other_engines(router, worker):
    theirs, other = router(), worker("other")
    theirs.add_workers([other.url])
    with pytest.raises(EngineStartError, match=f"sends requests to {other.url}, not of this run"):
        ExternalRouter.connect(theirs.url)


def test_dead_engines_that_a_killed_run_left_are_no_obstacle(worker, caplog):
    theirs = worker("router", {"/workers": {"workers": [{"url": "http://dead:1", "id": "a", "is_healthy": False}]}})
    with caplog.at_level(logging.WARNING):
        given = ExternalRouter.connect(theirs.url)
    assert given.workers() == {}  # fault tolerance takes out what it does not know; that one is not ours
    assert "has workers that do not answer: http://dead:1" in caplog.text


def test_an_address_without_a_router(worker):
    with pytest.raises(EngineStartError, match=r"--sglang-router-url http://127.0.0.1:\d+ does not answer as a router"):
        ExternalRouter.connect(f"http://127.0.0.1:{free_port()}")
    engine = worker("engine", {"/workers": {"status": "ok"}})
    with pytest.raises(EngineStartError, match="not a list of workers"):
        ExternalRouter.connect(engine.url)


def test_one_that_dies_is_noticed_when_it_has_missed_three_checks(router, monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.router.CHECK_SECONDS", 0.0)
    theirs = router()
    given = ExternalRouter.connect(theirs.url)
    given.check()
    theirs.stop()
    given.check()
    given.check()
    with pytest.raises(EngineDiedError, match=f"the external router {theirs.url} does not answer"):
        given.check()


def test_an_engine_that_an_external_router_cannot_reach(router):
    given = ExternalRouter.connect(router().url)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineStartError, match=f"does not use {url} after 0.5 s"):
        given.add_workers([url], timeout=0.5)


def test_a_router_with_a_key_answers_nobody_without_it_and_brings_it_to_engines(router, worker):
    engine = worker("one")
    running = router(own_key="the key", sglang_args={})
    assert not any("the key" in word for pid in running.process_ids() for word in command_of(pid))
    with pytest.raises(HttpError) as caught:
        call("GET", f"{running.url}/workers", key="another")
    assert caught.value.status == 401
    running.add_workers([engine.url])
    assert running.healthy_workers() == {engine.url}
    body = {"input_ids": [1], "sampling_params": {}}
    with pytest.raises(HttpError, match="HTTP 401"):
        call("POST", f"{running.url}/generate", body)
    assert call("POST", f"{running.url}/generate", body, key="the key") == {"text": "one"}
    running.remove_worker(engine.url)
    assert not running.healthy_workers()
    given = ExternalRouter.connect(running.url, key="the key")
    given.add_workers([engine.url])
    given.stop()
    with pytest.raises(EngineStartError, match="HTTP 401"):
        ExternalRouter.connect(running.url)


def command_of(pid):
    """The words of a process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
