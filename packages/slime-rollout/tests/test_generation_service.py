"""The generation half as one object; its engines are scripted here, and real in the integration tests."""

import dataclasses
import types

import pytest
from aiohttp import web

from slime_core.errors import SlimeError
from slime_core.interfaces import Rollout
from slime_core.memory import MemoryStateError
from slime_rollout.engine.config import EngineConfig
from slime_rollout.generation_service import GenerationService, GenerationSpec


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
        begin_sleep=lambda: updates.append("begin_sleep"), replace=lambda urls: updates.append(("replace", urls)),
        end_sleep=lambda awake: updates.append(("end_sleep", awake)),
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


@pytest.mark.parametrize("ends", ["confirm_update", "fail_update"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_ask_for_experts_are_held_while_weights_change_that_would_compute_them_again(service, mode, ends):
    service._spec = dataclasses.replace(service._spec, engine=EngineConfig(update_weight_pause_mode=mode))
    service._engines.fail_update = lambda silent: True
    calls = []
    service._manager.hold, service._manager.release = (lambda: calls.append("hold")), (lambda: calls.append("release"))
    service._engines.begin_update = lambda only_behind: ["http://127.0.0.1:1"]
    service.begin_update(only_behind=True)
    assert calls == []  # an engine that is behind has no requests
    service.begin_update()
    assert calls == ["hold"] * (mode == "retract")
    getattr(service, ends)(*[7] * (ends == "confirm_update"))
    assert calls[-1:] == ["release"]


@pytest.fixture
def asked(engine):
    """What the engine was asked besides generating: paths, with tags."""
    busy = [503, 400]
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response(status=busy.pop() if path == "/flush_cache" and busy else 200)
    return engine.posted


def test_engines_give_their_memory_back_once_idle_and_take_it_again_in_steps(service, asked):
    service.sleep()
    assert asked == [("/flush_cache",)] * 3 + [("/release_memory_occupation", "weights", "kv_cache", "cuda_graph")]
    service.wake(weights_only=True)
    service.begin_update()
    service.wake()
    assert asked[4:] == [
        ("/resume_memory_occupation", "weights"),
        ("/resume_memory_occupation", "kv_cache", "cuda_graph"),
    ]
    assert service._engines.updates == ["begin_sleep", ("end_sleep", False), ("end_sleep", True)]
    del asked[:]
    service.sleep(keep_weights=True)
    service.wake()
    service.sleep(keep_weights=True)
    service.sleep()
    assert [call for call in asked if call[0] != "/flush_cache"] == [
        ("/release_memory_occupation", "kv_cache", "cuda_graph"),
        ("/resume_memory_occupation", "kv_cache", "cuda_graph"),
        ("/release_memory_occupation", "kv_cache", "cuda_graph"),
        ("/release_memory_occupation", "weights"),
    ]


def test_an_engine_that_came_meanwhile_has_its_memory(service, asked):
    service.sleep()
    service._engines.engine_urls = []
    service.wake(weights_only=True)
    assert len(asked) == 4


def test_a_call_that_sleeping_engines_cannot_answer_is_refused(service, asked):
    service.sleep(keep_weights=True)
    service.begin_update()
    for call in (service.generate, service.evaluate):
        with pytest.raises(MemoryStateError, match=r"(generate|evaluate) needs all .* holds its weights alone"):
            call(0)
    service.sleep()
    with pytest.raises(MemoryStateError, match=r"begin_update needs its weights .* the generation half holds nothing"):
        service.begin_update()
    with pytest.raises(MemoryStateError, match="sleep would leave the generation half with nothing"):
        service.sleep()
    assert len([call for call in asked if call[0] == "/release_memory_occupation"]) == 2


def test_one_that_cannot_keeps_it_and_says_so_once(service, engine, caplog):
    engine.pages["/server_info"] = {"enable_memory_saver": False, "device": "cuda"}
    engine.on_post = lambda path: web.Response()
    for _ in range(2):
        service.sleep()
        service.wake()
    (line,) = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert line == f"{engine.url} runs without --enable-memory-saver: it keeps its memory while it sleeps"


def test_one_that_answers_something_else_is_replaced(service, engine):
    engine.pages["/server_info"] = "busy"
    service.sleep()
    assert ("replace", [engine.url]) in service._engines.updates


def test_one_that_stays_busy_is_replaced_where_that_is_wanted(service, engine, monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.sleep.IDLE_SECONDS", 0.3)
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response(status=400)
    service.sleep()
    assert ("replace", [engine.url]) in service._engines.updates
