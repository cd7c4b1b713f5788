"""An engine that is forked from a process that has imported SGLang, beside one that is started."""

import dataclasses
import os
import signal

import pytest

from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.server import EngineSpec, SGLangEngine
from slime_rollout.http import call
from slime_rollout.supervise import reaper

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PROMPTS = [[3 + (7 * i + j) % 290 for j in range(5 + i % 4)] for i in range(6)]


def replies(engine):
    """Tokens and log-probs, one request after the other: a batch of another size may change a last bit."""
    found = []
    for seed, prompt in enumerate(PROMPTS):
        sampling = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        reply = call("POST", f"{engine.url}/generate", body, timeout=120)
        found.append(reply["meta_info"]["output_token_logprobs"])
    return found


def test_a_forked_engine_answers_as_a_started_one_to_the_last_bit(engine_config, tiny_model, tmp_path):
    spec = EngineSpec(model_path=tiny_model, dtype="float32", seed=1)
    configs = {"forked": engine_config, "started": dataclasses.replace(engine_config, template=None)}
    answers, ports, parents = {}, Ports(), {}
    for name, config in configs.items():
        with SGLangEngine.start(config, spec, log_path=tmp_path / name, ports=ports) as engine:
            engine.wait_until_ready(200)
            answers[name] = replies(engine)
            parents[name] = reaper.find_process(engine.pid).parent
            if name == "forked":
                os.kill(engine.process_ids()[0], signal.SIGKILL)
                assert engine._process.wait(60) == 128 + signal.SIGKILL
    assert parents["started"] == os.getpid() != parents["forked"]
    assert reaper.find_process(parents["forked"]).parent == os.getpid()
    assert answers["forked"] == answers["started"]
