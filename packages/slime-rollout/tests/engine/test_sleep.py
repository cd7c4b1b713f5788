"""Memory of engines by request, of one that is scripted; with a run's order of calls: `test_serving_engines`."""

from aiohttp import web

from slime_core.memory import Held
from slime_rollout.engine.sleep import EngineMemory


def test_an_engine_is_asked_for_no_more_than_it_has_and_to_take_no_more_than_it_gave(engine):
    engine.pages["/server_info"] = {"enable_memory_saver": True}
    engine.on_post = lambda path: web.Response()
    memory, urls = EngineMemory(None), [engine.url]
    assert memory.resume(urls, Held.EVERYTHING) == [] and engine.posted == []
    for down_to in (Held.WEIGHTS, Held.WEIGHTS, Held.NOTHING):
        assert memory.release(urls, down_to) == []
    assert memory.resume(urls, Held.WEIGHTS) == memory.resume(urls, Held.WEIGHTS) == []
    assert [call for call in engine.posted if call != ("/flush_cache",)] == [
        ("/release_memory_occupation", "kv_cache", "cuda_graph"),
        ("/release_memory_occupation", "weights"),
        ("/resume_memory_occupation", "weights"),
    ]


def test_one_that_is_not_there_is_named():
    url = "http://127.0.0.1:9"
    assert EngineMemory(None).release([url], Held.NOTHING) == [url]
