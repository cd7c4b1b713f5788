"""Memory and weights of engines that are scripted here, and real in the integration tests."""

import dataclasses

import pytest
from aiohttp import web

from slime_core.memory import MemoryStateError
from slime_rollout.engine.config import EngineConfig


@pytest.mark.parametrize("ends", ["confirm_update", "fail_update"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_ask_for_experts_are_held_while_weights_change_that_would_compute_them_again(service, mode, ends):
    service.engines.spec = dataclasses.replace(service.engines.spec, engine=EngineConfig(update_weight_pause_mode=mode))
    service.engines.fleet.fail_update = lambda silent: True
    calls = []
    generator = service.engines.generator
    generator.hold, generator.release = (lambda: calls.append("hold")), (lambda: calls.append("release"))
    service.engines.fleet.begin_update = lambda only_behind: ["http://127.0.0.1:1"]
    service.engines.begin_update(only_behind=True)
    assert calls == []  # an engine that is behind has no requests
    service.engines.begin_update()
    assert calls == ["hold"] * (mode == "retract")
    getattr(service.engines, ends)(*[7] * (ends == "confirm_update"))
    assert calls[-1:] == ["release"]


@pytest.fixture
def asked(engine):
    """What the engine was asked besides generating: paths, with tags."""
    busy = [503, 400]
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response(status=busy.pop() if path == "/flush_cache" and busy else 200)
    return engine.posted


def test_engines_give_their_memory_back_once_idle_and_take_it_again_in_steps(service, asked):
    service.engines.sleep()
    assert asked == [("/flush_cache",)] * 3 + [("/release_memory_occupation", "weights", "kv_cache", "cuda_graph")]
    service.engines.wake(weights_only=True)
    service.engines.begin_update()
    service.engines.wake()
    assert asked[4:] == [
        ("/resume_memory_occupation", "weights"),
        ("/resume_memory_occupation", "kv_cache", "cuda_graph"),
    ]
    assert service.engines.fleet.updates == ["begin_sleep", ("end_sleep", False), ("end_sleep", True)]
    del asked[:]
    service.engines.sleep(keep_weights=True)
    service.engines.wake()
    service.engines.sleep(keep_weights=True)
    service.engines.sleep()
    assert [call for call in asked if call[0] != "/flush_cache"] == [
        ("/release_memory_occupation", "kv_cache", "cuda_graph"),
        ("/resume_memory_occupation", "kv_cache", "cuda_graph"),
        ("/release_memory_occupation", "kv_cache", "cuda_graph"),
        ("/release_memory_occupation", "weights"),
    ]


def test_an_engine_that_came_meanwhile_has_its_memory(service, asked):
    service.engines.sleep()
    service.engines.fleet.engine_urls = []
    service.engines.wake(weights_only=True)
    assert len(asked) == 4


def test_a_call_that_sleeping_engines_cannot_answer_is_refused(service, asked):
    service.engines.sleep(keep_weights=True)
    service.engines.begin_update()
    for call in (service.generate, service.engines.evaluate):
        with pytest.raises(MemoryStateError, match=r"(generate|evaluate) needs all .* holds its weights alone"):
            call(0)
    service.engines.sleep()
    with pytest.raises(MemoryStateError, match=r"begin_update needs its weights .* the generation half holds nothing"):
        service.engines.begin_update()
    with pytest.raises(MemoryStateError, match="sleep would leave the generation half with nothing"):
        service.engines.sleep()
    assert len([call for call in asked if call[0] == "/release_memory_occupation"]) == 2


def test_one_that_cannot_keeps_it_and_says_so_once(service, engine, caplog):
    engine.pages["/server_info"] = {"enable_memory_saver": False, "device": "cuda"}
    engine.on_post = lambda path: web.Response()
    for _ in range(2):
        service.engines.sleep()
        service.engines.wake()
    (line,) = [record.getMessage() for record in caplog.records if "memory" in record.getMessage()]
    assert line == f"{engine.url} runs without --enable-memory-saver: it keeps its memory while it sleeps"


def test_one_that_answers_something_else_is_replaced(service, engine):
    engine.pages["/server_info"] = "busy"
    service.engines.sleep()
    assert ("replace", [engine.url]) in service.engines.fleet.updates


def test_one_that_stays_busy_is_replaced_where_that_is_wanted(service, engine, monkeypatch):
    monkeypatch.setattr("slime_rollout.engine.sleep.IDLE_SECONDS", 0.3)
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response(status=400)
    service.engines.sleep()
    assert ("replace", [engine.url]) in service.engines.fleet.updates
