"""What any router is asked, where the answer is not what was hoped for."""

import pytest

from slime_rollout.engine.errors import EngineDiedError, EngineStartError
from slime_rollout.engine.ports import free_port
from slime_rollout.engine.router_api import RouterApi
from slime_rollout.http import HttpError

pytestmark = pytest.mark.timeout(90)


class Someone(RouterApi):
    """A router of which nothing but the address is known."""

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


def test_one_that_does_not_answer_as_a_router_refuses(worker):
    url = worker("engine", {"/workers": {"status": "ok"}}).url
    with pytest.raises(
        EngineStartError, match=rf"the router {url} refused an engine: .* no list of workers: .* its log"
    ):
        Someone(url).add_workers(["http://127.0.0.1:1"])
    with pytest.raises(HttpError, match="no list of workers"):
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

    monkeypatch.setattr("slime_rollout.engine.router_api.call", call)
    someone = Someone("http://router")
    someone.remove_worker("http://engine")
    with pytest.raises(HttpError, match="HTTP 400"):
        someone.remove_worker("http://engine")


def test_questions_are_repeated_as_often_as_the_class_says(monkeypatch):
    asked = []

    def call(*args, attempts, **kwargs):
        asked.append(attempts)
        return {"workers": []}

    monkeypatch.setattr("slime_rollout.engine.router_api.call", call)
    once, often = Someone("http://127.0.0.1:1"), Someone("http://127.0.0.1:1")
    often.attempts = 3
    for each in (once, often):
        each.workers()
        each.offer_worker("http://127.0.0.1:2")
    once.healthy_workers()
    assert asked == [1, 1, 3, 3, 3]
