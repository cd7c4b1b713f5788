"""Fault tolerance on real SGLang servers behind the real router: all engines fail at once during a rollout."""

import asyncio
import concurrent.futures
import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.slots import read_events
from slime_rollout.generate import EngineClient
from slime_rollout.http import call, patient_delays
from slime_rollout.supervise import reaper
from slime_rollout.weights import TensorWeightChannel, engine_weight_version

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(600)]

INTERVAL, TIMEOUT, STARTUP = 2.0, 15.0, 200.0
PROMPTS = [[3 + (7 * i + j) % 290 for j in range(5 + i % 4)] for i in range(32)]
NEW_TOKENS = 300
# fp32 on both sides, other orders of summation: a few times 1e-6 is usual.
SAME = 1e-4
REPLACED = ["restarted", "started", "weights", "registered"]


@pytest.fixture(scope="module")
def fleet(engine_config, tiny_model, tmp_path_factory):
    config = dataclasses.replace(
        engine_config,
        use_fault_tolerance=True,
        rollout_health_check_interval=INTERVAL,
        rollout_health_check_timeout=TIMEOUT,
        engine_startup_timeout=STARTUP,
    )
    logs = tmp_path_factory.mktemp("logs")
    before = children()
    fleet = EngineFleet.start(
        config, model_path=tiny_model, num_engines=2, dtype="float32", context_length=None, seed=1, log_dir=logs
    )
    fleet.logs = logs
    yield fleet
    fleet.stop()
    left = children() - before
    # Torch's helper for shared memory is this process's own, and ends with it.
    assert not [pid for pid in left if "torch_shm_manager" not in Path(f"/proc/{pid}/cmdline").read_text()]


def children():
    return {process.pid for process in reaper.descendants(os.getpid())}


@pytest.fixture(scope="module")
def trainer(tiny_model):
    """The weights as the training side has them: not those that the engines were started with."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    change(model)
    return model


@torch.no_grad()
def change(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter) * parameter.abs().mean())


def update(fleet, trainer, version, *, only_behind=False):
    channel = TensorWeightChannel(ChannelSpec(tuple(fleet.begin_update(only_behind=only_behind))))
    channel.begin(WeightUpdate(version=version))
    channel.send(list(trainer.state_dict().items()))
    channel.end()
    channel.close()
    fleet.confirm_update(version)


async def sample_all(url):
    async with EngineClient(url, concurrency=64, timeout=300, retry_delays=patient_delays(STARTUP)) as client:
        return await asyncio.gather(*(client.generate(prompt, sampling(seed)) for seed, prompt in enumerate(PROMPTS)))


def sampling(seed):
    return {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}


@torch.no_grad()
def largest_difference(trainer, completions):
    """Largest difference of a sampled token's log-prob between engines and trainer. T: all tokens, V: vocabulary."""
    differences = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logits_TV = trainer(torch.tensor([prompt + completion.tokens])).logits[0]
        all_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], -1)
        expected_T = all_TV[torch.arange(len(completion.tokens)), completion.tokens]
        differences.append((expected_T - torch.tensor(completion.log_probs)).abs().max().item())
    return max(differences)


def running_requests(url):
    return sum(load["num_running_reqs"] for load in call("GET", f"{url}/v1/loads")["loads"])


def wait_until(condition, seconds=STARTUP):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def events(fleet, name):
    return [event for event in read_events(fleet.logs) if event["engine"] == name]


def test_a_rollout_outlives_all_its_engines(fleet, trainer):
    update(fleet, trainer, 5)
    urls = list(fleet.engine_urls)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(asyncio.run, sample_all(fleet.router_url))
        wait_until(lambda: all(running_requests(url) for url in urls))
        processes = fleet.process_ids()
        failed = time.monotonic()
        for name, signum in (("engine 0", signal.SIGKILL), ("engine 1", signal.SIGSTOP)):
            for pid in processes[name]:
                os.kill(pid, signum)
        wait_until(lambda: events(fleet, "engine 0") and events(fleet, "engine 1"), INTERVAL + TIMEOUT + 10.0)
        print(f"both failures were noticed after {time.monotonic() - failed:.1f} s")
        assert not rollout.done()
        while not rollout.done():  # what the launcher does while a rollout runs
            fleet.check()
            if fleet.engines_behind():
                update(fleet, trainer, 5, only_behind=True)
            time.sleep(0.2)
        completions = rollout.result()
        print(f"all requests were answered {time.monotonic() - failed:.1f} s after the failures")
    assert not [pid for pids in (processes["engine 0"], processes["engine 1"]) for pid in pids if is_there(pid)]
    assert [len(completion.tokens) for completion in completions] == [NEW_TOKENS] * len(PROMPTS)
    assert {version for completion in completions for version in completion.weight_versions} == {5}
    assert largest_difference(trainer, completions) < SAME
    wait_until(lambda: fleet.engines_behind() or not fleet.not_serving())
    if fleet.engines_behind():
        update(fleet, trainer, 5, only_behind=True)
    wait_until(lambda: not fleet.not_serving())
    for name, gone, reason in (
        ("engine 0", [], "ended by itself (exit code 137)"),
        ("engine 1", ["killed"], f"gave no good answer within {TIMEOUT:g} s"),
    ):
        assert [event["event"] for event in events(fleet, name)] == ["unhealthy", *gone, *REPLACED]
        assert reason in events(fleet, name)[0]["detail"]
    assert not set(fleet.engine_urls) & set(urls)
    for url in fleet.engine_urls:
        assert engine_weight_version(url) == "5"
        again = asyncio.run(sample_all(url))
        assert [completion.tokens for completion in again] == [completion.tokens for completion in completions]


def is_there(pid):
    return Path(f"/proc/{pid}").exists()


def test_an_engine_that_dies_amid_an_update_holds_nobody_up(fleet, trainer):
    change(trainer)
    since = len(events(fleet, "engine 0"))
    channel = TensorWeightChannel(ChannelSpec(tuple(fleet.begin_update())))
    channel.begin(WeightUpdate(version=6))
    for pid in fleet.process_ids()["engine 0"]:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WeightSyncError, match="weight version 6"):
        channel.send(list(trainer.state_dict().items()))
    channel.close()
    assert fleet.fail_update()
    assert events(fleet, "engine 0")[since]["event"] == "unhealthy"
    update(fleet, trainer, 6)
    completions = asyncio.run(sample_all(fleet.router_url))
    assert {version for completion in completions for version in completion.weight_versions} == {6}
    assert largest_difference(trainer, completions) < SAME
    assert fleet.not_serving() == ["engine 0"]
