"""A router that others run: a real one, which the tests start as somebody else would."""

import logging
import time

import pytest

from slime_rollout.engine import given_router
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError
from slime_rollout.engine.given_router import GivenRouter, open_router
from slime_rollout.engine.ports import free_port

pytestmark = pytest.mark.timeout(90)


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_engines_are_registered_for_the_time_of_the_run(router, worker, ask, tmp_path):
    theirs, engine = router(), worker("ours")
    given = open_router(EngineConfig(sglang_router_url=theirs.url + "/"), [], log_path=tmp_path / "none.log")
    assert given.url == theirs.url
    assert given.is_ready()
    given.add_workers([engine.url])
    assert ask(given) == "ours"
    given.check()
    given.request_stop()
    given.stop()
    wait_until(lambda: theirs.workers() == {})
    assert theirs.is_ready()
    assert not (tmp_path / "none.log").exists()


def test_what_was_registered_before_stays(router, worker):
    theirs, engine, new = router(), worker("before"), worker("new")
    theirs.add_workers([engine.url])
    given = GivenRouter.connect(theirs.url, [engine.url, new.url])
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

    monkeypatch.setattr("slime_rollout.engine.router_api.call", call)
    given = GivenRouter("http://router")
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
        GivenRouter.connect(theirs.url)


def test_dead_engines_that_a_killed_run_left_are_no_obstacle(worker, caplog):
    theirs = worker("router", {"/workers": {"workers": [{"url": "http://dead:1", "id": "a", "is_healthy": False}]}})
    with caplog.at_level(logging.WARNING):
        given = GivenRouter.connect(theirs.url)
    assert given.workers() == {}  # fault tolerance takes out what it does not know; that one is not ours
    assert "has workers that do not answer: http://dead:1" in caplog.text


def test_an_address_without_a_router(worker):
    with pytest.raises(EngineStartError, match=r"--sglang-router-url http://127.0.0.1:\d+ does not answer as a router"):
        GivenRouter.connect(f"http://127.0.0.1:{free_port()}")
    engine = worker("engine", {"/workers": {"status": "ok"}})
    with pytest.raises(EngineStartError, match="no list of workers"):
        GivenRouter.connect(engine.url)


def test_one_that_dies_is_noticed_when_it_has_missed_three_checks(router, monkeypatch):
    monkeypatch.setattr(given_router, "CHECK_SECONDS", 0.0)
    theirs = router()
    given = GivenRouter.connect(theirs.url)
    given.check()
    theirs.stop()
    given.check()
    given.check()
    with pytest.raises(EngineDiedError, match=f"the router {theirs.url}, which others run, does not answer"):
        given.check()


def test_an_engine_that_the_router_cannot_reach(router):
    given = GivenRouter.connect(router().url)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineStartError, match=f"does not use {url} after 0.5 s"):
        given.add_workers([url], timeout=0.5)
