"""Requests that are stopped or that nobody waits for any more."""

import asyncio
import base64
import logging
import time

import numpy as np
import pytest

from slime_core.types import Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate import EngineClient
from slime_rollout.generate import client as client_module

LIMIT = 20.0


def in_client(engine, script, *, concurrency=8, timeout=60.0, retry_delays=(0.01,) * 3):
    async def run():
        async with asyncio.timeout(LIMIT):
            async with EngineClient(
                engine.url, concurrency=concurrency, timeout=timeout, retry_delays=retry_delays
            ) as client:
                result = await script(client)
        # Only this task is left: nothing of the client's runs on, or would be complained of when the loop ends.
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    return asyncio.run(run())


async def until(condition):
    async with asyncio.timeout(LIMIT):
        while not condition():
            await asyncio.sleep(0.005)


def start(client, rid=None, tokens=(1, 2)):
    return asyncio.create_task(client.generate(list(tokens), {"temperature": 1.0}, rid=rid))


def obeys(engine, reply):
    """As SGLang: a request goes on until it is told to stop by its name, and then answers with what it has."""

    async def answer(number, body):
        while body["rid"] not in [told["rid"] for told in engine.aborts]:
            await asyncio.sleep(0.005)
        return reply(tokens=(7, 5), text="x?", finish={"type": "abort", "message": "Aborted"})

    return answer


async def forever(number, body):
    await asyncio.sleep(600)


def test_an_aborted_request_returns_its_tokens(engine, reply):
    engine.answer = obeys(engine, reply)

    async def script(client):
        task = start(client, "a")
        await until(lambda: engine.bodies)
        await client.abort("a")
        assert task.done()
        return task.result()

    done = in_client(engine, script)
    assert (done.status, done.tokens, done.log_probs, done.reason) == (Status.ABORTED, [7], [-0.5], "Aborted")
    assert engine.aborts == [{"rid": "a"}]


def test_only_the_named_request_is_aborted(engine, reply):
    engine.answer = obeys(engine, reply)

    async def script(client):
        tasks = [start(client, rid) for rid in ("a", "b")]
        await until(lambda: len(engine.bodies) == 2)
        await client.abort("b")
        assert [task.done() for task in tasks] == [False, True]
        await client.abort("a")

    in_client(engine, script)


def test_an_abort_that_came_before_the_request_is_repeated(engine, reply, monkeypatch):
    """An engine that does not know the request yet ignores its abort."""
    monkeypatch.setattr(client_module, "_ABORT_AGAIN", (0.02,) * 3)

    async def answer(number, body):
        await until(lambda: len(engine.aborts) >= 3)
        return reply(finish={"type": "abort", "message": "Aborted"})

    engine.answer = answer

    async def script(client):
        task = start(client, "a")
        await until(lambda: engine.bodies)
        await client.abort("a")
        return task.result()

    assert in_client(engine, script).status is Status.ABORTED
    assert engine.aborts == [{"rid": "a"}] * 3


def test_a_request_that_waits_for_room_is_never_sent(engine, reply):
    engine.answer = obeys(engine, reply)

    async def script(client):
        first, second = start(client, "a"), start(client, "b")
        await until(lambda: engine.bodies)
        await client.abort("b")
        waited = second.result()
        await client.abort("a")
        return waited, first.result()

    waited, first = in_client(engine, script, concurrency=1)
    assert (waited.status, waited.tokens, waited.weight_versions) == (Status.ABORTED, [], [])
    assert first.tokens == [7]
    assert engine.aborts == [{"rid": "a"}]
    assert [body["rid"] for body in engine.bodies] == ["a"]


def test_a_request_between_two_attempts_is_not_sent_again(engine):
    engine.answer = lambda number, body: 503

    async def script(client):
        task = start(client, "a")
        await until(lambda: client.retries)
        await client.abort("a")
        return task.result()

    assert in_client(engine, script, retry_delays=(40.0,)).tokens == []
    assert len(engine.bodies) == 1


def test_a_request_whose_engine_dies_while_it_is_aborted_is_not_sent_again(engine):
    async def answer(number, body):
        await until(lambda: engine.aborts)

    engine.answer = answer

    async def script(client):
        task = start(client, "a")
        await until(lambda: engine.bodies)
        await client.abort("a")
        return task.result()

    assert in_client(engine, script).status is Status.ABORTED
    assert len(engine.bodies) == 1


def test_an_engine_that_does_not_answer_an_abort_is_left(engine, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "ABORT_SECONDS", 0.3)
    engine.answer = forever

    async def script(client):
        task = start(client, "a")
        await until(lambda: engine.bodies)
        began = time.monotonic()
        await client.abort("a")
        assert task.done()
        return task.result(), time.monotonic() - began

    with caplog.at_level(logging.WARNING):
        done, seconds = in_client(engine, script)
    assert (done.status, done.tokens) == (Status.ABORTED, [])
    assert seconds < 10
    assert "1 aborted requests gave no answer in 0.3 s" in caplog.text


def test_abort_all(engine, reply):
    engine.answer = obeys(engine, reply)

    async def script(client):
        tasks = [start(client) for _ in range(6)]
        await until(lambda: len(engine.bodies) == 4)
        await client.abort_all()
        assert all(task.done() for task in tasks)
        return [task.result() for task in tasks]

    done = in_client(engine, script, concurrency=4)
    assert {it.status for it in done} == {Status.ABORTED}
    assert sorted(len(it.tokens) for it in done) == [0, 0, 1, 1, 1, 1]
    assert sorted(told["rid"] for told in engine.aborts) == sorted(body["rid"] for body in engine.bodies)
    assert len(engine.bodies) == 4


def test_abort_all_is_about_ones_own_requests(engine, reply):
    """Also about those with a name of their own, and not about those of another client of the same engines."""
    engine.answer = obeys(engine, reply)

    async def script(client):
        async with EngineClient(engine.url, concurrency=4, timeout=20.0) as other:
            mine, named, theirs = start(client), start(client, rid="mine"), start(other)
            await until(lambda: len(engine.bodies) == 3)
            await client.abort_all()
            assert (mine.done(), named.done(), theirs.done()) == (True, True, False)
            await other.abort_all()
            return [task.result().status for task in (mine, named, theirs)]

    assert in_client(engine, script) == [Status.ABORTED] * 3


def test_a_request_of_somebody_else(engine):
    in_client(engine, lambda client: client.abort("theirs"))
    assert engine.aborts == [{"rid": "theirs"}]


def test_cancelling_reaches_the_engine_and_is_not_delayed(engine):
    engine.answer = forever

    async def script(client):
        task = start(client, "a")
        await until(lambda: engine.in_flight == 1)
        task.cancel()
        began = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 1.0
        await until(lambda: engine.in_flight == 0)  # the connection is closed as well

    in_client(engine, script)
    assert engine.aborts == [{"rid": "a"}]


def test_leaving_the_client_waits_for_aborts(engine):
    """Also when an error ends the block: what is in flight then belongs to tasks that are cancelled."""
    engine.answer = forever

    async def script(client):
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(client.generate([1], {}, rid=f"r{number:02}"))
            await until(lambda: engine.in_flight == 40)
            raise KeyError("something else")

    with pytest.raises(ExceptionGroup):
        in_client(engine, script, concurrency=64)
    assert sorted(told["rid"] for told in engine.aborts) == [f"r{number:02}" for number in range(40)]


def test_leaving_the_client_stops_what_nobody_waited_for(engine):
    engine.answer = forever
    left = []

    async def script(client):
        left.append(start(client, "a"))
        await until(lambda: engine.in_flight == 1)

    in_client(engine, script)
    assert left[0].result().status is Status.ABORTED
    assert engine.aborts == [{"rid": "a"}]


def test_an_engine_that_takes_no_abort_delays_nobody_for_long(engine, monkeypatch):
    monkeypatch.setattr("slime_rollout.generate.client.CONTROL_SECONDS", 0.3)
    engine.answer = forever
    engine.abort_delay = 600.0
    began = time.monotonic()

    async def script(client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(client), 0.2)

    in_client(engine, script)
    assert time.monotonic() - began < 10
    assert engine.aborts == []


def test_a_request_that_was_cancelled_before_it_was_sent_aborts_nothing(engine, reply):
    engine.answer = obeys(engine, reply)

    async def script(client):
        first, second = start(client, "a"), start(client, "b")
        await until(lambda: engine.bodies)
        second.cancel()
        await asyncio.wait([second])
        await client.abort("a")
        return first.result()

    in_client(engine, script, concurrency=1)
    assert engine.aborts == [{"rid": "a"}]


def test_cancelled_requests_give_their_room_back(engine, reply):
    engine.answer = forever

    async def script(client):
        tasks = [start(client) for _ in range(5)]
        await until(lambda: engine.in_flight == 2)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        engine.answer = lambda number, body: reply()
        return await asyncio.gather(*(client.generate([1], {}) for _ in range(4)))

    assert len(in_client(engine, script, concurrency=2)) == 4
    assert engine.most_in_flight == 2


def test_a_refused_request_is_not_aborted(engine):
    engine.answer = lambda number, body: 400

    async def script(client):
        with pytest.raises(GenerationError, match="refused"):
            await client.generate([1], {})

    in_client(engine, script)
    assert engine.aborts == []


def ask_experts(client, tokens=(1, 2, 3), **params):
    return asyncio.create_task(client.generate(list(tokens), {"max_new_tokens": 9, **params}, experts_from=1))


@pytest.fixture
def with_experts(reply):
    """An answer whose experts are the places of the tokens that chose them."""

    def make(body, tokens, **changes):
        start, length = body["routed_experts_start_len"], len(body["input_ids"])
        rows = np.arange(start, length + len(tokens) - 1, dtype="<i4")[:, None]
        return reply(tokens=tokens, routed_experts=base64.b64encode(rows.tobytes()).decode(), **changes)

    return make


def test_what_asks_for_experts_ends_before_an_update_and_goes_on_after_it(engine, reply, with_experts, monkeypatch):
    """The last token is sampled again: whether it ended the response was not looked at."""
    monkeypatch.setattr(client_module, "_ABORT_AGAIN", (0.02,) * 3)
    updates, told = [], lambda body: body["rid"] in [one["rid"] for one in engine.aborts]

    async def answer(number, body):
        if "routed_experts_start_len" not in body:
            await until(lambda: len(updates) == 2)
            return reply(tokens=(4,))
        if len(updates) < 2:
            await until(lambda: told(body))
            return with_experts(body, (5, 6, 7), version=str(len(updates)), finish={"type": "abort"})
        return with_experts(body, (8, 0), version="2", text="end", finish={"type": "stop"})

    engine.answer = answer

    async def script(client):
        held, others = ask_experts(client, min_new_tokens=0), start(client)
        for version in (1, 2):
            await until(lambda sent=1 + version: len(engine.bodies) == sent)
            await client.hold()
            late = ask_experts(client, (9, 9)) if version == 2 else None
            await asyncio.sleep(0.05)
            assert len(engine.bodies) == 1 + version  # nothing is sent while engines get weights
            updates.append(version)
            client.release()
        return await held, await others, await late

    held, others, late = in_client(engine, script)
    assert others.tokens == [4] and len(engine.aborts) == 2
    assert held.tokens == [5, 6, 5, 6, 8, 0] and held.weight_versions == [0, 0, 1, 1, 2, 2]
    assert (held.text, held.status) == ("end", Status.COMPLETED)
    assert held.experts_TW[:, 0].tolist() == list(range(1, 8))  # each token but the last, each once
    sent = [body for body in engine.bodies if body.get("routed_experts_start_len") is not None]
    assert [body["input_ids"] for body in sent] == [[1, 2, 3], [1, 2, 3, 5, 6], [1, 2, 3, 5, 6, 5, 6], [9, 9]]
    assert [body["routed_experts_start_len"] for body in sent] == [1, 4, 6, 1]
    assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [9, 7, 5, 9]
    assert late.tokens == [8, 0]


def test_a_held_request_that_gets_no_answer_is_begun_again(engine, with_experts, monkeypatch):
    monkeypatch.setattr(client_module, "_ABORT_AGAIN", (0.02,))
    monkeypatch.setattr(client_module, "ABORT_SECONDS", 0.1)

    async def answer(number, body):
        if number == 0:
            await forever(number, body)
        return with_experts(body, (8, 0))

    engine.answer = answer

    async def script(client):
        task = ask_experts(client)
        await until(lambda: engine.bodies)
        await client.hold()
        assert not task.done()
        client.release()
        return await task

    assert in_client(engine, script).tokens == [8, 0]
    assert [body["input_ids"] for body in engine.bodies] == [[1, 2, 3]] * 2


def test_what_is_held_can_be_aborted(engine, with_experts):
    engine.answer = lambda number, body: with_experts(body, (8, 0))

    async def script(client):
        await client.hold()
        task = ask_experts(client)
        await asyncio.sleep(0)
        await client.abort_all()
        client.release()
        return await task

    assert in_client(engine, script).status is Status.ABORTED
    assert not engine.bodies


def test_updates_in_mid_response_use_up_no_retry(engine, with_experts, monkeypatch):
    """Each is a new attempt at the engine, and none of them failed."""
    monkeypatch.setattr(client_module, "_ABORT_AGAIN", (0.02,) * 3)

    async def answer(number, body):
        if number < 3:
            await until(lambda: body["rid"] in [one["rid"] for one in engine.aborts])
            return with_experts(body, (5, 6), finish={"type": "abort"})
        return 503 if number == 3 else with_experts(body, (8, 0))

    engine.answer = answer

    async def script(client):
        task = ask_experts(client)
        for sent in (1, 2, 3):
            await until(lambda sent=sent: len(engine.bodies) == sent)
            await client.hold()
            client.release()
        return await task

    assert in_client(engine, script, retry_delays=(0.01,)).tokens == [5, 5, 5, 8, 0]
    assert len(engine.bodies) == 5
