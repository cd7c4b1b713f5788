"""Attaching to engines: the waits and the errors. What works is shown on real engines, in test_real_external.py."""

import pytest

from slime_rollout.engine import external
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.errors import EngineDiedError, EngineStartError, ExternalEngineError
from slime_rollout.engine.external import ExternalFleet, wait_for_answers
from slime_rollout.engine.ports import free_port

pytestmark = pytest.mark.timeout(60)
INFO = {
    "/server_info": {
        "model_path": "/there/model",
        "dtype": "float32",
        "context_length": None,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "nnodes": 1,
        "enable_deterministic_inference": True,
        "disaggregation_mode": "null",
        "encoder_only": False,
    },
    "/model_info": {"weight_version": "default", "is_generation": True},
}


def attach(urls, log_dir, *, model_path="/here/model", **settings):
    config = EngineConfig(rollout_external_engine_addrs=tuple(urls), **settings)
    return ExternalFleet.attach(config, model_path=model_path, dtype="float32", context_length=None, log_dir=log_dir)


def test_an_engine_that_is_not_there_is_named_in_time(worker, caplog):
    there, missing = worker("there"), f"http://127.0.0.1:{free_port()}"
    seen = []
    with pytest.raises(
        EngineStartError, match=f"{missing} of --rollout-external-engine-addrs does not answer after 0.3"
    ):
        wait_for_answers([there.url, missing], 0.3, lambda ready, total, _: seen.append((ready, total)))
    assert set(seen) == {(1, 2)}


def test_one_that_comes_later_is_waited_for(worker):
    late = worker("late")
    late.end()
    wait_for_answers([late.url], 20, lambda ready, *_: None if ready or late.is_up else late.start())


def test_engines_that_do_not_fit_start_nothing(worker, tmp_path):
    engine = worker("engine", INFO)
    with pytest.raises(ExternalEngineError, match=rf"do not fit this run:\n  {engine.url} serves /there/model"):
        attach([engine.url], tmp_path / "logs", model_path="/here/other")
    assert not (tmp_path / "logs").exists()


def test_one_that_dies_is_noticed(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(external, "CHECK_SECONDS", 0.0)
    engines = [worker(name, INFO) for name in ("one", "other")]
    with attach([engine.url for engine in engines], tmp_path) as fleet:
        fleet.check()
        monkeypatch.setattr(type(fleet._router), "workers", lambda _: {engines[0].url: ("id", True)})
        fleet.check()  # it answers, so the router will use it again
        engines[1].end()
        with pytest.raises(EngineDiedError, match=f"the engine {engines[1].url}, which others run, does not answer"):
            fleet.check()


@pytest.mark.parametrize("end", [lambda fleet: fleet.confirm_update(1), lambda fleet: fleet.fail_update()])
def test_an_engine_that_is_paused_for_new_weights_is_not_taken_for_gone(worker, tmp_path, monkeypatch, end):
    monkeypatch.setattr(external, "CHECK_SECONDS", 0.0)
    engine = worker("engine", INFO)
    with attach([engine.url], tmp_path) as fleet:
        assert fleet.begin_update() == [engine.url]
        monkeypatch.setattr(type(fleet._router), "workers", lambda _: {})  # it asks /health, too
        engine.answers["/health"] = None
        fleet.check()
        with pytest.raises(EngineDiedError, match=engine.url):
            end(fleet)
            fleet.check()


def test_one_that_dies_amid_an_update_is_noticed(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(external, "CHECK_SECONDS", 0.0)
    engine = worker("engine", INFO)
    with attach([engine.url], tmp_path) as fleet:
        fleet.begin_update()
        monkeypatch.setattr(type(fleet._router), "workers", lambda _: {})
        engine.end()
        with pytest.raises(EngineDiedError, match=engine.url):
            fleet.check()


def test_one_that_a_killed_run_left_paused_is_used_again(worker, tmp_path):
    engine = worker("engine", INFO, paused=True)
    with attach([engine.url], tmp_path, engine_startup_timeout=20.0) as fleet:
        assert not engine.paused
        assert fleet._router.healthy_workers() == {engine.url}


def test_attaching_waits_for_no_requests_of_others(worker, tmp_path):
    """Which SGLang does to close an update of an engine that is not paused."""
    engine = worker("engine", INFO)
    with attach([engine.url], tmp_path):
        assert [path for path, _ in engine.requests] == ["/continue_generation"]


def test_detaching_has_every_engine_generate_and_happens_once(worker, tmp_path):
    engine = worker("engine", INFO)
    fleet = attach([engine.url], tmp_path)
    engine.requests.clear()
    fleet.stop()
    paths = [path for path, _ in engine.requests]
    assert paths == ["/end_weight_update", "/update_weight_version", "/continue_generation"]
    fleet.stop()
    assert len(engine.requests) == 3
