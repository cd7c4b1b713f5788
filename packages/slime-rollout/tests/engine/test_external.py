"""Attaching to engines: the waits and the errors. What works is shown on real engines, in test_real_external.py."""

import dataclasses
import json

import pytest

from slime_rollout.engine import EngineDiedError, EngineStartError, ExternalEngineError, external
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.external import (
    ExternalEngine,
    ExternalFleet,
    mismatches,
    same_model,
    wait_for_answers,
)
from slime_rollout.engine.server import EngineSpec

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
        "enable_return_routed_experts": False,
        "disaggregation_mode": "null",
        "encoder_only": False,
    },
    "/model_info": {"weight_version": "default", "is_generation": True},
}


def attach(urls, log_dir, *, model_path="/here/model", **settings):
    config = EngineConfig(rollout_external_engine_addrs=tuple(urls), **settings)
    return ExternalFleet.attach(config, EngineSpec(model_path=model_path, dtype="float32"), log_dir=log_dir)


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
        monkeypatch.setattr(type(fleet._router.process), "workers", lambda _: {engines[0].url: ("id", True)})
        fleet.check()  # it answers, so the router will use it again
        engines[1].end()
        with pytest.raises(EngineDiedError, match=f"the external engine {engines[1].url} does not answer"):
            fleet.check()


@pytest.mark.parametrize("end", [lambda fleet: fleet.confirm_update(1), lambda fleet: fleet.fail_update()])
def test_an_engine_that_is_paused_for_new_weights_is_not_taken_for_gone(worker, tmp_path, monkeypatch, end):
    monkeypatch.setattr(external, "CHECK_SECONDS", 0.0)
    engine = worker("engine", INFO)
    with attach([engine.url], tmp_path) as fleet:
        assert fleet.begin_update() == [engine.url]
        monkeypatch.setattr(type(fleet._router.process), "workers", lambda _: {})  # it asks /health, too
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
        monkeypatch.setattr(type(fleet._router.process), "workers", lambda _: {})
        engine.end()
        with pytest.raises(EngineDiedError, match=engine.url):
            fleet.check()


def test_one_that_a_killed_run_left_paused_is_used_again(worker, tmp_path):
    engine = worker("engine", INFO, paused=True)
    with attach([engine.url], tmp_path, engine_startup_timeout=20.0) as fleet:
        assert not engine.paused
        assert fleet._router.process.healthy_workers() == {engine.url}


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


SERVER = {
    "model_path": "/there/model",
    "dtype": "bfloat16",
    "context_length": None,
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "nnodes": 1,
    "enable_deterministic_inference": True,
    "enable_return_routed_experts": False,
    "disaggregation_mode": "null",
    "encoder_only": False,
}
MODEL = {"weight_version": "default", "is_generation": True}
ENGINE = ExternalEngine(
    url="http://a:1",
    model_path="/there/model",
    dtype="bfloat16",
    context_length=None,
    tp_size=2,
    other_sizes={},
    weight_version="default",
    deterministic=True,
    returns_experts=False,
    generates=True,
)
WANTED = EngineSpec(model_path="/here/model", dtype="bfloat16", context_length=100)


def server(worker, **changes):
    return worker("engine", {"/server_info": {**SERVER, **changes}, "/model_info": MODEL})


def test_an_engine_says_what_it_is(worker):
    engine = server(worker)
    assert ExternalEngine.probe(engine.url) == dataclasses.replace(ENGINE, url=engine.url)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"dp_size": 4, "nnodes": 2}, "other_sizes", {"dp-size": 4, "nnodes": 2}),
        ({"disaggregation_mode": "prefill"}, "generates", False),
        ({"encoder_only": True}, "generates", False),
        ({"enable_deterministic_inference": False}, "deterministic", False),
        ({"enable_return_routed_experts": True}, "returns_experts", True),
    ],
)
def test_what_is_unusual_is_seen(worker, changes, field, value):
    assert getattr(ExternalEngine.probe(server(worker, **changes).url), field) == value


def test_what_is_no_sglang_engine(worker):
    with pytest.raises(ExternalEngineError, match=r"does not report what it is: GET http.*/server_info: HTTP 404"):
        ExternalEngine.probe(worker("other").url)
    odd = worker("odd", {"/server_info": {"model_path": "x"}, "/model_info": {}})
    with pytest.raises(ExternalEngineError, match=f"{odd.url}/server_info answers, but not like an SGLang engine"):
        ExternalEngine.probe(odd.url)
    odder = worker("odder", {"/server_info": [1], "/model_info": "x"})
    with pytest.raises(ExternalEngineError, match="not like an SGLang engine"):
        ExternalEngine.probe(odder.url)


WRONG = {
    "text": [None, 5, True, ["x"], {}],
    "size": [None, 0, -1, 1.0, 1.5, True, "2", "", [1], {}],
    "switch": [None, 0, 1, "true", "false", "", [], {}],
}
KINDS = {
    **dict.fromkeys(("model_path", "dtype", "disaggregation_mode", "weight_version"), "text"),
    **dict.fromkeys(("tp_size", "pp_size", "dp_size", "nnodes"), "size"),
    **dict.fromkeys(("enable_deterministic_inference", "enable_return_routed_experts", "encoder_only"), "switch"),
    "is_generation": "switch",
}
BODIES = (
    *(b"null", b"7", b'"ok"', b"[]", b"{}", b"OK", b"<html>502</html>", b'{"error": "busy"}', b'{"model_path": "x"}'),
    *(
        b"[" * 100_000,
        bytes(900),
        json.dumps(SERVER | MODEL | {"tp_size": 1e400}).encode(),
        json.dumps([SERVER | MODEL]).encode(),
        json.dumps(SERVER | MODEL).encode()[:-9],
    ),
    json.dumps(SERVER | MODEL).encode("utf-16"),
)


def test_no_invalid_answer_about_an_engine_is_taken_and_each_is_said(worker):
    """A size that was text, and a switch that was "false" and so on, were taken for something else."""
    engine = worker("engine", {"/server_info": SERVER, "/model_info": MODEL})
    assert ExternalEngine.probe(engine.url)  # what all cases begin with
    whole = {"/server_info": SERVER, "/model_info": MODEL}
    paths = {name: path for path, answer in whole.items() for name in answer}
    cases = [(paths[name], {**whole[paths[name]], name: value}, name) for name in KINDS for value in WRONG[KINDS[name]]]
    cases += [
        ("/server_info", {**SERVER, "context_length": value}, "context_length") for value in ("9", -1, 0, 1.5, True)
    ]
    for path, answer in whole.items():
        cases += [(path, {key: value for key, value in answer.items() if key != name}, name) for name in answer]
        cases += [(path, body, "") for body in BODIES]
    wrong = []
    for path, answer, name in cases:
        engine.answers.update(whole | {path: answer})
        try:
            outcome = str(ExternalEngine.probe(engine.url))
        except ExternalEngineError as error:
            outcome = str(error)
            if f"{engine.url}{path} answers, but not like" in outcome and name in outcome and "\n" not in outcome:
                continue
        except Exception as error:
            outcome = repr(error)
        wrong.append(f"{path} {name} {str(answer)[:300]}: {outcome[:300]}")
    assert len(cases) > 100 and not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])


def test_engines_that_fit():
    other = dataclasses.replace(ENGINE, url="http://b:1", context_length=100, dtype="bfloat16")
    assert mismatches([ENGINE, other], WANTED, weights_follow=False) == []
    assert mismatches([ENGINE], dataclasses.replace(WANTED, tp_size=2), weights_follow=False) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_path": "/there/other"}, "serves /there/other, and --hf-checkpoint is /here/model: start it with"),
        ({"dtype": "half"}, "computes in float16, and the run in bfloat16: start it with --dtype bfloat16"),
        ({"dtype": "auto"}, "computes in auto, and the run in bfloat16"),
        ({"context_length": 99}, "takes 99 tokens, and prompt and response may have 100: start it with a larger"),
        ({"tp_size": 1}, "has tensor parallel size 1, and http://a:1 has 2: make them the same"),
        ({"other_sizes": {"pp-size": 2}}, "runs with --pp-size 2: weights reach engines with tensor parallelism on"),
        ({"deterministic": False}, "start it with --enable-deterministic-inference"),
        ({"generates": False}, "does not generate by itself"),
        ({"weight_version": "7"}, "has weight version 7, and http://a:1 has default"),
        ({"weight_version": "incomplete"}, "has parts of some weights only"),
    ],
)
def test_one_line_for_what_does_not_fit(changes, line):
    other = dataclasses.replace(ENGINE, url="http://b:1", **changes)
    (problem,) = mismatches([ENGINE, other], WANTED, weights_follow=False)
    assert problem.startswith("http://b:1 ")
    assert line in problem


def test_an_engine_that_cannot_say_which_experts_it_chose():
    wanted = dataclasses.replace(WANTED, returns_experts=True)
    (problem,) = mismatches([ENGINE, dataclasses.replace(ENGINE, returns_experts=True)], wanted, weights_follow=False)
    assert problem == (
        "http://a:1 does not say which experts it chose, for --use-rollout-routing-replay: start it with "
        "--enable-return-routed-experts"
    )


def test_all_lines_of_all_engines():
    odd = dataclasses.replace(ENGINE, tp_size=1, deterministic=False)
    assert len(mismatches([odd, odd], dataclasses.replace(WANTED, tp_size=2), weights_follow=False)) == 4


def test_versions_do_not_matter_where_weights_follow():
    engines = [ENGINE, dataclasses.replace(ENGINE, weight_version="incomplete")]
    assert mismatches(engines, WANTED, weights_follow=True) == []


def write_config(directory, **values):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(values))
    return str(directory)


def test_models_are_the_same_by_config_or_else_by_name(tmp_path):
    ours = write_config(tmp_path / "a" / "model", hidden_size=64, transformers_version="5.1")
    copy = write_config(tmp_path / "b" / "copy", hidden_size=64, transformers_version="5.2")
    larger = write_config(tmp_path / "c" / "model", hidden_size=128)
    assert same_model(copy, ours)
    assert not same_model(larger, ours)
    assert same_model("/on/another/machine/model", ours)
    assert not same_model("/on/another/machine/copy", ours)


@pytest.mark.parametrize(("stored", "computes"), [("bfloat16", "bfloat16"), ("float32", "float16")])
def test_auto_is_what_sglang_makes_of_the_models_own_type(tmp_path, stored, computes):
    path = write_config(tmp_path / "model", dtype=stored)
    wanted = dataclasses.replace(WANTED, model_path=path, dtype=computes)
    assert mismatches([dataclasses.replace(ENGINE, model_path=path, dtype="auto")], wanted, weights_follow=False) == []
