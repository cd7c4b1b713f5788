"""The fleet's servers as engines that are external: used, given weights, and left as they were."""

import concurrent.futures

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.types import WeightUpdate
from slime_rollout.engine import ExternalEngineError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.external import ExternalFleet
from slime_rollout.engine.server import EngineSpec
from slime_rollout.engine.start import start_engines
from slime_rollout.http import call
from slime_rollout.weights import TensorWeightChannel, engine_weight_version

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
PARAMS = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def attach(fleet, tiny_model, tmp_path_factory):
    def start(**settings):
        config = EngineConfig(rollout_external_engine_addrs=tuple(fleet.engine_urls), **settings)
        return start_engines(
            config,
            EngineSpec(model_path=tiny_model, dtype="float32"),
            num_engines=0,
            log_dir=tmp_path_factory.mktemp("logs"),
            weights_follow=True,
        )

    return start


@pytest.fixture(scope="module")
def weights(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()


def push(engines, weights, version):
    channel = TensorWeightChannel(ChannelSpec(tuple(engines.engine_urls), tp_size=engines.tp_size))
    channel.begin(WeightUpdate(version=version))
    channel.send(list(weights.items()))
    channel.end()


def tokens(url):
    body = {"input_ids": [5, 6, 7], "sampling_params": PARAMS}
    return call("POST", f"{url}/generate", body)["output_ids"]


def test_others_engines_behind_our_router(attach, fleet, weights):
    before = tokens(fleet.router_url)
    with attach() as engines:
        assert isinstance(engines, ExternalFleet)
        assert engines.router_url != fleet.router_url
        assert engines.engine_urls == fleet.engine_urls
        assert engines.tp_size == 1
        assert engines.engines[0].deterministic
        engines.check()
        assert engines.model_urls == {"default": engines.router_url}
        assert tokens(engines.router_url) == before
        push(engines, {name: -weight for name, weight in weights.items()}, 3)
        assert tokens(engines.router_url) != before
        push(engines, weights, 0)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(tokens, [engines.router_url] * 8)) == [before] * 8
    fleet.check()
    assert tokens(fleet.router_url) == before


def test_a_given_router_that_has_them_already_keeps_them(attach, fleet):
    known = call("GET", f"{fleet.router_url}/workers")["workers"]
    with attach(sglang_router_url=fleet.router_url) as engines:
        assert engines.router_url == fleet.router_url
        assert len(tokens(engines.router_url)) == 8
    workers = call("GET", f"{fleet.router_url}/workers")["workers"]
    assert {worker["id"] for worker in workers} == {worker["id"] for worker in known}
    assert len(tokens(fleet.router_url)) == 8


def test_an_update_that_was_cut_off_is_closed_when_the_run_ends(attach, fleet, weights):
    engines = attach()
    TensorWeightChannel(ChannelSpec(tuple(engines.engine_urls))).begin(WeightUpdate(version=4))  # the trainer dies here
    engines.stop()
    assert [engine_weight_version(url) for url in fleet.engine_urls] == ["incomplete"] * 2
    assert len(tokens(fleet.router_url)) == 8
    push(fleet, weights, 0)


def test_each_thing_that_does_not_fit_has_a_line(fleet, tmp_path):
    config = EngineConfig(rollout_external_engine_addrs=tuple(fleet.engine_urls), rollout_num_gpus_per_engine=2)
    with pytest.raises(ExternalEngineError) as caught:
        ExternalFleet.attach(config, EngineSpec(model_path=str(tmp_path / "other")), log_dir=tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[0] == "engines of --rollout-external-engine-addrs do not fit this run:"
    for url in fleet.engine_urls:
        assert sum(line.startswith(f"  {url} serves ") for line in lines) == 1
        assert (
            f"  {url} has tensor parallel size 1, and --rollout-num-gpus-per-engine is 2: make them the same" in lines
        )
    assert len(lines) == 5
