import asyncio
import logging
import resource
import socket
import threading
import time

import pytest
from aiohttp import web

from slime_rollout.errors import GenerationError
from slime_rollout.generate import EngineClient
from slime_rollout.http import INCOMPLETE
from slime_rollout.serving_engines import CacheNamespace

QUICK = (0.01, 0.01, 0.01)


def ask(url, times=1, *, concurrency=8, timeout=20.0, retry_delays=QUICK, sampling_params=None, **names):
    params = sampling_params or {"temperature": 1.0}

    async def run():
        async with EngineClient(url, concurrency=concurrency, timeout=timeout, retry_delays=retry_delays) as client:
            done = await asyncio.gather(*(client.generate([1, 2], params, **names) for _ in range(times)))
            return done, client.retries

    return asyncio.run(run())


def test_what_is_asked_and_answered(engine):
    (done,), retries = ask(engine.url + "/")
    assert (done.text, done.tokens, retries) == ("42", [5, 6], 0)
    (body,) = engine.bodies
    assert len(body.pop("rid")) == 45
    assert body == {"input_ids": [1, 2], "sampling_params": {"temperature": 1.0}, "return_logprob": True}
    assert "X-SMG-Routing-Key" not in engine.headers[0]
    assert engine.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(("session_id", "key"), [("chat-7", "chat-7"), ("für\n1", "f%C3%BCr%0A1")])
def test_a_session_is_named_to_the_router(engine, session_id, key):
    ask(engine.url, rid="mine", session_id=session_id)
    assert engine.headers[0]["X-SMG-Routing-Key"] == key
    assert engine.bodies[0]["rid"] == "mine"


def test_request_ids_are_made_and_differ(engine):
    ask(engine.url, times=3)
    assert len({body["rid"] for body in engine.bodies}) == 3


@pytest.mark.parametrize(("rid", "problem"), [("same", "'same' is in flight already"), ("", "'' is empty")])
def test_a_request_id_that_cannot_be_used(engine, rid, problem):
    with pytest.raises(GenerationError, match=f"the request id {problem}; give every request its own"):
        ask(engine.url, times=2, rid=rid)


def test_every_attempt_is_in_the_namespace_of_its_time(engine, reply):
    namespace = CacheNamespace("in_place")

    def answer(number, body):
        namespace.change()
        return reply() if number else 503

    async def run():
        async with EngineClient(
            engine.url, concurrency=1, timeout=20, retry_delays=QUICK, cache_namespace=namespace
        ) as client:
            await client.generate([1, 2], {})

    engine.answer = answer
    asyncio.run(run())
    first, second = (body["extra_key"] for body in engine.bodies)
    assert (first[-2:], second[-2:]) == ("-0", "-1") and first[:-2] == second[:-2]
    assert CacheNamespace("in_place")() != first  # another run's, perhaps on the same engines
    assert CacheNamespace("retract")() is None


def test_what_cannot_be_sent(engine):
    with pytest.raises(GenerationError, match=r"cannot be written as JSON .*set"):
        ask(engine.url, sampling_params={"stop": {"a"}})
    assert engine.bodies == []


def test_outside_of_async_with(engine):
    client = EngineClient(engine.url, concurrency=1, timeout=1.0)
    with pytest.raises(RuntimeError, match="used outside `async with`"):
        asyncio.run(client.generate([1], {}))


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again_and_logged(engine, reply, caplog, status):
    engine.answer = lambda number, body: status if number < 2 else reply()
    with caplog.at_level(logging.WARNING):
        (done,), retries = ask(engine.url)
    assert (done.text, retries, len(engine.bodies)) == ("42", 2, 3)
    assert f"HTTP {status}: scripted {status}; trying again" in caplog.text


def test_a_broken_connection_is_tried_again(engine, reply):
    engine.answer = lambda number, body: None if number == 0 else reply()
    (done,), retries = ask(engine.url)
    assert (done.text, retries) == ("42", 1)


def test_a_repeated_request_differs_in_its_id_alone(engine, reply):
    engine.answer = lambda number, body: 500 if number < 2 else reply()
    ask(engine.url, rid="mine", sampling_params={"sampling_seed": 7})
    rids = [body.pop("rid") for body in engine.bodies]
    assert rids == ["mine", "2~mine", "3~mine"]  # no id is the beginning of another
    assert engine.bodies[0] == engine.bodies[1] == engine.bodies[2]


@pytest.mark.parametrize(("trouble", "aborted"), [(None, True), (500, True), (504, True), (503, False), (429, False)])
def test_an_attempt_that_may_still_run_is_aborted(engine, reply, trouble, aborted):
    engine.answer = lambda number, body: trouble if number == 0 else reply()
    ask(engine.url, rid="mine")
    assert engine.aborts == ([{"rid": "mine"}] if aborted else [])


def test_retry_after_is_heeded(engine, reply):
    def answer(number, body):
        return web.Response(status=429, headers={"Retry-After": "1"}) if number == 0 else reply()

    engine.answer = answer
    start = time.monotonic()
    _, retries = ask(engine.url)
    assert time.monotonic() - start >= 1.0
    assert retries == 1


def test_retry_after_beyond_the_deadline_is_not_waited_for(engine):
    engine.answer = lambda number, body: web.Response(status=503, text="later", headers={"Retry-After": "60"})
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"no answer within 20 s \(attempt 1: HTTP 503: later\)"):
        ask(engine.url)
    assert time.monotonic() - start < 10


def test_retries_end(engine):
    engine.answer = lambda number, body: 502
    with pytest.raises(GenerationError, match="failed 4 times, at last with: HTTP 502: scripted 502; see the logs"):
        ask(engine.url)
    assert len(engine.bodies) == 4


def test_nobody_listens():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(GenerationError, match="failed 4 times, at last with: no connection"):
            ask(f"http://127.0.0.1:{held.getsockname()[1]}")


@pytest.mark.parametrize("banner", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_something_that_speaks_no_http(banner):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def greet():
            with server.accept()[0] as connection:
                connection.sendall(banner)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(GenerationError, match=f"{url}/generate is not the address of a router or engine"):
            ask(url)
        thread.join(20)


def test_an_address_that_is_none():
    with pytest.raises(GenerationError, match="is not the address of a router or engine"):
        ask("router:30000")


@pytest.mark.parametrize("status", [201, 302, 400, 401, 404, 409, 413, 422, 501])
def test_a_refusal_is_not_tried_again(engine, status):
    engine.answer = lambda number, body: status
    with pytest.raises(GenerationError, match=rf"refused a request \(HTTP {status}\): scripted {status}"):
        ask(engine.url)
    assert len(engine.bodies) == 1


def test_a_long_error_body_is_shortened_to_a_line(engine):
    engine.answer = lambda number, body: 400

    async def long(number, body):
        return "\n".join(["<html>"] * 300)

    engine.answer = long
    with pytest.raises(GenerationError, match="JSON is malformed") as caught:
        ask(engine.url)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_deadline_covers_all_attempts(engine):
    async def slow(number, body):
        await asyncio.sleep(0.25)
        return 500

    engine.answer = slow
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"gave no answer within 0\.6 s \(attempt [123]: HTTP 500"):
        ask(engine.url, timeout=0.6, retry_delays=[0.01] * 1000)
    assert time.monotonic() - start < 10
    assert 2 <= len(engine.bodies) <= 3


def test_the_time_limit_holds_and_is_not_tried_again(engine):
    async def never(number, body):
        await asyncio.sleep(60)

    engine.answer = never
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"gave no answer within 0\.3 s; .* raise --rollout-request-timeout"):
        ask(engine.url, timeout=0.3, rid="mine")
    assert time.monotonic() - start < 10
    assert len(engine.bodies) == 1
    assert engine.aborts == [{"rid": "mine"}]


def test_more_connections_than_open_files(engine):
    """Waiting would not help, and the system's own words name no flag."""

    async def slow(number, body):
        await asyncio.sleep(0.5)
        return 500

    engine.answer = slow
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 20, before[1]))
    try:
        with pytest.raises(GenerationError, match=r"may open no more files, .* raise `ulimit -n` or lower"):
            ask(engine.url, times=100, concurrency=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_more_in_flight_than_allowed_and_waiting_costs_no_time_limit(engine, reply):
    async def slow(number, body):
        await asyncio.sleep(0.1)
        return reply()

    engine.answer = slow
    done, _ = ask(engine.url, times=30, concurrency=3, timeout=0.9)
    assert len(done) == 30
    assert engine.most_in_flight == 3


@pytest.mark.parametrize("spans", [None, [{"version": INCOMPLETE, "start": 0, "end": 1}]])
def test_what_was_sampled_from_weights_of_a_failed_update_is_sampled_again(engine, reply, spans):
    bad = reply(version="4", weight_versions=spans) if spans else reply(version=INCOMPLETE)
    engine.answer = lambda number, body: bad if number < 2 else reply(version="4")
    (done,), retries = ask(engine.url)
    assert (done.weight_versions, retries) == ([4, 4], 2)


def test_a_word_of_a_response_is_no_version(engine, reply):
    engine.answer = lambda number, body: reply(text=f'"{INCOMPLETE}"', version="4") | {INCOMPLETE: [INCOMPLETE]}
    assert ask(engine.url)[1] == 0
