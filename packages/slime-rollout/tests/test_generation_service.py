"""The generation half as one object; its engines are scripted here, and real in the integration tests."""

import types

import pytest
from aiohttp import web

from slime_core.errors import SlimeError
from slime_core.interfaces import Rollout
from slime_rollout.engine.config import EngineConfig
from slime_rollout.generation_service import GenerationService, GenerationSpec
from slime_rollout.http import HttpError


@pytest.fixture
def service(manager, engine):
    """A service whose engine is the scripted one."""
    given = manager()
    spec = GenerationSpec(
        engine=EngineConfig(), rollout=given._config, num_engines=1, num_gpus=1, topology=None, dtype="float32",
        context_length=None, seed=5, log_dir="", flags={},
    )  # fmt: skip
    service = GenerationService(spec)
    updates = []
    service._manager = given
    service._engines = types.SimpleNamespace(
        engine_urls=[engine.url], tp_size=1, updates=updates, check=lambda: None, stop=lambda: updates.append("stop"),
        begin_update=lambda only_behind: [] if only_behind else [engine.url], confirm_update=updates.append,
    )  # fmt: skip
    return service


def test_it_implements_the_protocol(service):
    assert isinstance(service, Rollout)


def test_what_is_not_started_is_told(service):
    with pytest.raises(SlimeError, match="the engines are not started"):
        GenerationService(service._spec).generate(0)


def test_a_rollout_is_trained_from_the_version_that_was_confirmed_last(service, engine, reply):
    engine.answer = lambda number, body: reply(version="7")
    assert service.begin_update().engine_urls == (engine.url,)
    service.confirm_update(7)
    assert [service.generate(number).weight_version for number in (0, 1)] == [7, 7]  # no update between them
    assert service._engines.updates == [7]
    service.close()
    assert service._engines.updates == [7, "stop"]


def test_an_engine_gives_its_memory_back_once_it_is_idle_and_takes_it_again(service, engine):
    posted, busy = [], [503, 400]
    engine.pages["/server_info"] = {"enable_memory_saver": True}

    def answer(path):
        posted.append(path)
        return web.Response(status=busy.pop() if path == "/flush_cache" and busy else 200)

    engine.on_post = answer
    service.sleep()
    assert posted == ["/flush_cache", "/flush_cache", "/flush_cache", "/release_memory_occupation"]
    service.wake()
    service.wake()
    assert posted[4:] == ["/resume_memory_occupation"]


def test_one_that_cannot_keeps_it_and_says_so(service, engine, caplog):
    engine.pages["/server_info"] = {"enable_memory_saver": False}
    service.sleep()
    service.wake()
    (line,) = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert line == f"{engine.url} runs without --enable-memory-saver: it keeps its device memory while it sleeps"


def test_one_that_stays_busy_is_an_error(service, engine, monkeypatch):
    monkeypatch.setattr("slime_rollout.generation_service.IDLE_SECONDS", 0.3)
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response(status=400)
    with pytest.raises(HttpError, match="/flush_cache"):
        service.sleep()
