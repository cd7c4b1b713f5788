"""Several models at once, on quick stand-ins. Real ones are in `integration_tests/test_several_models.py`."""

import os
import signal
import time

import pytest

from slime_rollout.engine import EngineDiedError, EngineStartError
from slime_rollout.engine import router as router_module
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import EngineLauncher, EngineSpec
from slime_rollout.engine.start import ModelFleets, start_engines
from slime_rollout.http import call
from slime_rollout.supervise import SupervisionError, reaper

pytestmark = pytest.mark.timeout(90)
ENGINES = """
sglang:
  - name: judge
    model_path: {judge}
    server_groups: [{{num_gpus: 1}}, {{worker_type: placeholder, num_gpus: 1}}]
  - name: actor
    server_groups: [{{num_gpus: 2}}]
"""


@pytest.fixture
def start(quick_python, tmp_path):
    def run(judge, actor="hf", **settings):
        file = tmp_path / "engines.yaml"
        file.write_text(ENGINES.format(judge=judge))
        config = EngineConfig(sglang_python=quick_python, sglang_config=str(file), **settings)
        return start_engines(
            config,
            EngineSpec(model_path=actor, dtype="float32", device="cpu"),
            num_engines=0,
            num_gpus=4,
            log_dir=tmp_path / "logs",
        )

    return run


def model_behind(url):
    return call("POST", f"{url}/generate", {"input_ids": [1], "sampling_params": {}})["text"]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children():
    return {process.pid for process in reaper.descendants(os.getpid())}


def test_each_model_has_its_router_and_weights_go_to_the_trained_one(start, tmp_path):
    before = children()
    with start("judge") as engines:
        assert isinstance(engines, ModelFleets)
        assert {name: model_behind(url) for name, url in engines.model_urls.items()} == {
            "actor": "hf",
            "judge": "judge",
        }
        assert engines.router_url == engines.model_urls["actor"]
        assert [model_behind(url) for url in engines.engine_urls] == ["hf", "hf"]
        engines.check()
    assert children() <= before
    logs = sorted(str(path.relative_to(tmp_path / "logs")) for path in (tmp_path / "logs").rglob("*.log"))
    assert logs == [
        *(f"actor/{name}.log" for name in ("engine_0", "engine_1", "router")),
        *(f"judge/{name}.log" for name in ("engine_0", "router")),
    ]


def test_one_model_that_does_not_come_up_ends_all(start):
    before = children()
    with pytest.raises(EngineStartError, match=r"(?s)judge.engine_0\.log:\nthis model is broken"):
        start("broken")
    assert children() <= before


def test_a_model_that_is_still_starting_does_not_hide_that_another_one_has_failed(start):
    before, started = children(), time.monotonic()
    with pytest.raises(EngineStartError, match="this model is broken"):
        start("broken", actor="endless")
    assert time.monotonic() - started < 60  # by default a start may take 300 s
    assert children() <= before


def test_an_interrupt_amid_the_start_of_several_models_leaves_nothing(start, monkeypatch):
    def interrupt(futures):
        wait_until(lambda: len(children() - before) > 3)
        raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr("concurrent.futures.as_completed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        start("judge", actor="endless")
    assert children() <= before


def test_one_that_cannot_be_stopped_keeps_no_other_one():
    stopped = []

    class Part(EngineFleet):
        def __init__(self, name, error=None):
            super().__init__([], None, None, 1)
            self.name, self.error = name, error

        def request_stop(self):
            pass

        def stop(self):
            stopped.append(self.name)
            if self.error:
                raise self.error

    fleets = {"a": Part("a"), "b": Part("b", SupervisionError("still busy"))}
    fleets = ModelFleets(fleets, "a", [Part("encoder")])
    with pytest.raises(SupervisionError):
        fleets.stop()
    assert sorted(stopped) == ["a", "b", "encoder"]


@pytest.mark.full
def test_our_engines_behind_a_router_that_others_run(start, quick_python, router, tmp_path):
    theirs = router()
    with start("judge", sglang_router_url=theirs.url) as engines:
        assert engines.router_url == theirs.url  # the trained model's; the judge has one of its own
        assert engines.model_urls["judge"] != theirs.url
        assert theirs.healthy_workers() == set(engines.engine_urls)
    assert theirs.workers() == {}
    assert theirs.is_ready()


def test_one_fleet_behind_a_router_that_others_run(quick_python, router, tmp_path, monkeypatch):
    """With fault tolerance: the engine is replaced there, and the router is not."""
    monkeypatch.setattr(router_module, "CHECK_SECONDS", 0.0)
    theirs = router()
    with EngineFleet.start(
        EngineConfig(sglang_python=quick_python, sglang_router_url=theirs.url, use_fault_tolerance=True),
        model_path="m",
        num_engines=1,
        dtype="float32",
        context_length=None,
        seed=0,
        log_dir=tmp_path / "logs",
        device="cpu",
    ) as fleet:
        assert fleet.model_urls == {"default": theirs.url}
        assert model_behind(theirs.url) == "m"
        fleet.check()
        (before,) = fleet.engine_urls
        os.kill(fleet.process_ids()["engine 0"][0], signal.SIGKILL)
        wait_until(lambda: before not in theirs.workers() and theirs.healthy_workers())
        (after,) = fleet.engine_urls
        assert theirs.workers().keys() == {after} != {before}
        assert model_behind(theirs.url) == "m"
        fleet.stop()
        assert theirs.workers() == {}
        theirs.stop()
        with pytest.raises(EngineDiedError, match=f"the external router {theirs.url} does not answer"):
            for _ in range(router_module.MISSED_CHECKS):
                fleet.check()
    assert not (tmp_path / "logs" / "router.log").exists()


def test_engines_are_started_by_the_launcher_that_is_given(quick_python, tmp_path):
    started = []

    class Recorder(EngineLauncher):
        def start(self, spec, *, log_path):
            started.append((spec.seed, log_path.name))
            return super().start(spec, log_path=log_path)

    config = EngineConfig(sglang_python=quick_python)
    with start_engines(
        config,
        EngineSpec(model_path="m", dtype="float32", seed=3, device="cpu"),
        num_engines=2,
        log_dir=tmp_path,
        launcher=Recorder(config, Ports()),
    ) as fleet:
        assert started == [(3, "engine_0.log"), (4, "engine_1.log")]
        assert [model_behind(url) for url in fleet.engine_urls] == ["m", "m"]
