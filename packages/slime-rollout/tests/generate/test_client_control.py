import asyncio
import logging
import time

from slime_rollout.generate import client as client_module
from slime_rollout.generate.client import EngineControl
from slime_rollout.http import make_session


def in_control(url, script):
    async def run():
        async with make_session() as session:
            control = EngineControl(session, url)
            try:
                return await script(control)
            finally:
                await control.close()

    return asyncio.run(run())


def test_an_engine_is_its_own(engine):
    assert in_control(engine.url, lambda control: control.engine_urls()) == (engine.url,)


def test_a_router_tells_its_engines_and_all_are_told(engine, other_engine):
    engine.workers = [engine.url + "/", other_engine.url]

    async def script(control):
        assert await control.engine_urls() == (engine.url, other_engine.url)
        await control.abort(["a", "b"])

    in_control(engine.url, script)
    for each in (engine, other_engine):
        assert sorted(told["rid"] for told in each.aborts) == ["a", "b"]


def test_the_list_is_remembered_for_a_while(engine, monkeypatch):
    async def script(control):
        for _ in range(3):
            await control.abort(["a"])
        assert engine.times_asked == 1
        monkeypatch.setattr(client_module, "_KNOWN_SECONDS", 0.0)
        control._known_until = 0.0
        await control.abort(["a"])
        await control.abort(["a"])

    in_control(engine.url, script)
    assert engine.times_asked == 3


def test_an_engine_that_moved_is_found(engine, other_engine, caplog):
    engine.workers = [engine.url, "http://127.0.0.1:9"]

    async def script(control):
        await control.engine_urls()
        engine.workers = [engine.url, other_engine.url]
        await control.abort(["a"])

    with caplog.at_level(logging.WARNING):
        in_control(engine.url, script)
    assert engine.aborts == other_engine.aborts == [{"rid": "a"}]
    assert "http://127.0.0.1:9/abort_request failed: no connection (Connection refused)" in caplog.text


def test_a_router_that_is_gone_is_remembered_for_its_engines(engine, other_engine, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "_KNOWN_SECONDS", 0.0)
    engine.workers = [other_engine.url]

    async def script(control):
        await control.engine_urls()
        control.url = "http://127.0.0.1:9"
        await control.abort(["a"])

    with caplog.at_level(logging.WARNING):
        in_control(engine.url, script)
    assert other_engine.aborts == [{"rid": "a"}]
    assert "http://127.0.0.1:9/workers does not list the engines" in caplog.text


def test_an_engine_that_refuses_does_not_keep_the_others_from_it(engine, other_engine, caplog):
    engine.workers = [engine.url, other_engine.url]
    engine.abort_status = 500
    with caplog.at_level(logging.WARNING):
        in_control(engine.url, lambda control: control.abort(["a"]))
    assert other_engine.aborts == [{"rid": "a"}]
    assert f"{engine.url}/abort_request failed: HTTP 500" in caplog.text


def test_a_list_that_is_none(engine, caplog):
    for workers in ([{}], 3):
        engine.workers_body = {"workers": workers}
        with caplog.at_level(logging.WARNING):
            assert in_control(engine.url, lambda control: control.engine_urls()) == ()
    assert caplog.text.count("does not list the engines") == 2


def test_telling_ends_in_time(engine, monkeypatch, caplog):
    monkeypatch.setattr(client_module, "CONTROL_SECONDS", 0.3)
    engine.abort_delay = 600.0
    start = time.monotonic()
    with caplog.at_level(logging.WARNING):
        in_control(engine.url, lambda control: control.abort(["a"]))
    assert time.monotonic() - start < 10
    assert "took no abort within 0.3 s" in caplog.text


def test_many_at_once_are_told_together(engine):
    async def script(control):
        for number in range(100):
            control.abort_later(f"r{number}")
        control.abort_later("")  # never sent: for an engine it would be every request
        assert engine.aborts == []

    in_control(engine.url, script)
    assert sorted(told["rid"] for told in engine.aborts) == sorted(f"r{number}" for number in range(100))
    assert engine.times_asked == 1
    assert engine.most_aborts <= 8
