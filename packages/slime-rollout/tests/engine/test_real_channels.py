"""Every weight transport on real SGLang, against transformers. T: prompt and response tokens, V: vocabulary."""

import asyncio
import concurrent.futures
import copy
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DynamicCache

from slime_core.errors import DataError
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.generate import EngineClient
from slime_rollout.http import call
from slime_rollout.serving_engines import CacheNamespace
from slime_rollout.weights import (
    DeltaReceiver,
    buckets,
    engine_weight_version,
    verify_checkpoint,
)
from slime_rollout.weights.channel import EngineChannel

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PROMPTS = [[3 + (7 * i + j) % 290 for j in range(5 + i % 4)] for i in range(4)]
NEW_TOKENS = 16
ATTEMPTS = 10
SAME, DIFFERENT = 1e-4, 1e-2
TRANSPORTS = ("tensor", "gloo", "disk", "delta")


class Parts:
    """A trainer's model, and channels to the fleet by every transport."""

    def __init__(self, fleet, model_path, directory):
        self.fleet, self.model_path, self.directory = fleet, model_path, directory
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        self.version = 100
        self.receiver = DeltaReceiver(
            directory=str(directory / "local"), hf_checkpoint=model_path, source=str(directory / "delta")
        )
        self.opened = {}

    def config(self, transport, **more):
        if transport in ("disk", "delta"):
            more["update_weight_disk_dir"] = str(self.directory / transport)
        if transport == "delta":
            more |= {"update_weight_mode": "delta", "update_weight_local_checkpoint_dir": str(self.directory / "local")}
        transport = "disk" if transport == "delta" else transport
        return WeightSyncConfig(update_weight_transport=transport, check_weight_update_equal=True, **more)

    def open(self, transport, urls=None, **more):
        spec = ChannelSpec(
            tuple(urls or self.fleet.engine_urls),
            sync=self.config(transport, **more),
            hf_checkpoint=self.model_path,
            receivers=(self.receiver.url,),
            key="of-the-run",  # these engines ask for none, and the receiver does
        )
        return spec.open()

    def channel(self, transport):
        if transport not in self.opened:
            self.opened[transport] = self.open(transport)
        return self.opened[transport]

    @torch.no_grad()
    def train(self):
        torch.manual_seed(self.version)
        for parameter in self.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter) * parameter.abs().mean())

    def push(self, channel, bucket=9):
        self.version += 1
        channel.begin(WeightUpdate(version=self.version))
        named = list(self.model.state_dict().items())
        for first in range(0, len(named), bucket):
            channel.send(named[first : first + bucket])
        return channel.end()


@pytest.fixture(scope="module")
def parts(fleet, tiny_model, tmp_path_factory):
    parts = Parts(fleet, tiny_model, tmp_path_factory.mktemp("versions"))
    yield parts
    parts.model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    parts.version = -1
    parts.push(parts.channel("tensor"))  # the tests after these find the engines as they were started
    for channel in parts.opened.values():
        channel.close()
    parts.receiver.stop()


def request(prompt, seed, new_tokens=NEW_TOKENS):
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True, "sampling_seed": seed}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def generate(url, requests):
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda body: call("POST", f"{url}/generate", body, timeout=120), requests))


def log_probs(reply):
    return torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])


def picked(logits_TV, tokens):
    return torch.log_softmax(logits_TV, -1)[torch.arange(len(tokens)), tokens]


@torch.no_grad()
def expected(model, prompt, reply):
    response = reply["output_ids"]
    return picked(model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1], response)


@torch.no_grad()
def expected_with_old_cache(old, new, prompt, reply, changed):
    """Log-probs from token ``changed`` on, if the keys and values before it are the old model's."""
    tokens, cache = prompt + reply["output_ids"], DynamicCache(config=old.config)
    first = len(prompt) + changed - 1  # the first token that goes through the new weights
    old(torch.tensor([tokens[:first]]), past_key_values=cache)
    logits_TV = new(torch.tensor([tokens[first:]]), past_key_values=cache).logits[0, :-1]
    return picked(logits_TV, reply["output_ids"][changed:])


def difference(model, url):
    replies = generate(url, [request(prompt, seed) for seed, prompt in enumerate(PROMPTS)])
    pairs = zip(PROMPTS, replies, strict=True)
    return max((expected(model, prompt, it) - log_probs(it)).abs().max().item() for prompt, it in pairs)


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_have_the_new_models_log_probs_and_confirm(parts, transport):
    channel = parts.channel(transport)
    parts.train()
    behind = difference(parts.model, parts.fleet.engine_urls[0])
    parts.push(channel)
    parts.train()
    checksums = parts.push(channel)  # the second update of a channel finds what the first left
    versions = [engine_weight_version(url) for url in parts.fleet.engine_urls]
    after = [difference(parts.model, url) for url in parts.fleet.engine_urls]
    print(f"{transport}: one behind {behind:.1e}, after {max(after):.1e}")
    assert versions == [str(parts.version)] * 2
    assert behind > DIFFERENT
    assert max(after) < SAME
    assert set(checksums) == (set(parts.model.state_dict()) if transport == "delta" else set())


@pytest.mark.parametrize(
    "transport", [pytest.param(each, marks=[pytest.mark.full] * (each in ("disk", "delta"))) for each in TRANSPORTS]
)
def test_one_engine_alone_is_updated_by_a_channel_that_travelled(parts, transport):
    urls = parts.fleet.engine_urls[:1]
    channel = pickle.loads(pickle.dumps(parts.open(transport, urls)))
    parts.train()
    parts.push(channel, bucket=100)
    channel.close()
    assert engine_weight_version(urls[0]) == str(parts.version)
    assert difference(parts.model, urls[0]) < SAME
    assert difference(parts.model, parts.fleet.engine_urls[1]) > DIFFERENT
    parts.push(parts.channel("tensor"))


def test_the_group_stands_beside_the_trainers_own(parts):
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    channel = parts.open("gloo")
    try:
        parts.push(channel)
        with pytest.raises(ConnectionRefusedError):  # all have met: nobody else may
            socket.create_connection((channel._group.address, channel._group.port), 5.0)
        assert dist.get_world_size() == 1
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]
        channel.close()
        assert dist.is_initialized()
    finally:
        channel.close()
        dist.destroy_process_group()
    assert difference(parts.model, parts.fleet.engine_urls[0]) < SAME


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize(
    "transport", ["tensor", *(pytest.param(each, marks=pytest.mark.full) for each in ("gloo", "disk", "delta"))]
)
def test_requests_in_flight_go_on_with_the_new_weights(parts, transport, mode):
    parts.push(parts.channel("tensor"))
    channel = parts.open(transport, update_weight_pause_mode=mode)
    for _ in range(ATTEMPTS):
        old, before = copy.deepcopy(parts.model), str(parts.version)
        replies = generate_and_push(parts, channel)
        if all(len(reply["meta_info"]["weight_versions"]) > 1 for reply in replies):
            break  # or else a busy machine had the engine end before the update began
    channel.close()
    assert len(replies) == len(PROMPTS)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert_spans_are_right(old, parts.model, mode, prompt, reply, (before, str(parts.version)))
    assert difference(parts.model, parts.fleet.engine_urls[1]) < SAME


def generate_and_push(parts, channel):
    """Update both engines while the first one generates; its replies."""
    url, replies = parts.fleet.engine_urls[0], []
    bodies = [request(prompt, 50 + seed, 500) for seed, prompt in enumerate(PROMPTS)]
    thread = threading.Thread(target=lambda: replies.extend(generate(url, bodies)))
    parts.train()
    thread.start()
    wait_until(lambda: running(url) == len(PROMPTS) or not thread.is_alive())
    parts.push(channel)
    thread.join(120)
    return replies


def test_a_prefix_that_the_old_weights_cached_is_not_met_by_requests_after_an_update_in_place(parts):
    """While requests run, so that the engines keep their cache; through the router, as in a rollout."""
    parts.push(parts.channel("tensor"))
    urls, prompt, old = parts.fleet.engine_urls, [3 + (11 * place) % 290 for place in range(64)], parts.model
    parts.model = copy.deepcopy(old)
    namespace = CacheNamespace("in_place")
    for url in urls:
        generate(url, [request(prompt, 1) | {"extra_key": namespace()}])
    stale = namespace()
    over = threading.Event()

    def keep_busy(url, new_tokens):
        while not over.is_set():
            generate(url, [request(PROMPTS[0], 7, new_tokens)])

    # Two for each engine: when one request has ended, the other runs.
    busy = [threading.Thread(target=keep_busy, args=(url, length)) for url in urls for length in (4500, 3100)]
    channel = parts.open("tensor", update_weight_pause_mode="in_place")
    parts.train()
    for thread in busy:
        thread.start()
    wait_until(lambda: all(running(url) for url in urls))
    namespace.change()
    parts.push(channel)
    assert all(running(url) for url in urls)  # or else the cache would have been flushed, and this shown nothing
    namespace.change()
    channel.close()

    async def sample(asked):
        sampling = request(prompt, 1)["sampling_params"]
        async with EngineClient(parts.fleet.router_url, concurrency=1, timeout=60, cache_namespace=asked) as client:
            return await client.generate(prompt, sampling)

    def off(done):
        reply = {"output_ids": done.tokens}
        return (expected(parts.model, prompt, reply) - torch.tensor(done.log_probs)).abs().max().item()

    met, apart = [off(asyncio.run(sample(asked))) for asked in (lambda: stale, namespace)]
    over.set()
    for url in urls:
        call("POST", f"{url}/abort_request", {"abort_all": True})
    for thread in busy:
        thread.join(120)
    print(f"a request off the new weights by {met:.1e} with the old namespace, {apart:.1e} with a new one")
    assert met > DIFFERENT
    assert apart < SAME


def assert_spans_are_right(old, new, mode, prompt, reply, versions):
    """Each token's log-prob is that of the version that its span names."""
    spans = [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]
    changed = spans[0][2]
    assert spans == [(versions[0], 0, changed), (versions[1], changed, len(reply["output_ids"]))]
    got = log_probs(reply)
    assert (expected(old, prompt, reply)[:changed] - got[:changed]).abs().max() < SAME
    anew = expected(new, prompt, reply)[changed:]
    kept = expected_with_old_cache(old, new, prompt, reply, changed)
    right, wrong = (anew, kept) if mode == "retract" else (kept, anew)
    assert (right - got[changed:]).abs().max() < SAME
    assert (wrong - got[changed:]).abs().max() > DIFFERENT


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.full), True])
def test_an_engine_that_refuses_a_broadcast_blocks_nobody(parts, monkeypatch, late):
    """Nor if another engine is so late that the trainer's broadcast has failed when it begins to wait for it."""
    first, second = parts.fleet.engine_urls
    channel = parts.channel("gloo")
    parts.push(channel)
    channel.begin(WeightUpdate(version=parts.version + 1))
    call("POST", f"{second}/end_weight_update", {})
    if late:
        stop_until_left(parts.fleet, first, second, monkeypatch)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"_from_distributed: HTTP 400: .*must run between") as caught:
        channel.send(list(parts.model.state_dict().items()))
    print(f"a refused broadcast was given up after {time.monotonic() - started:.1f} s")
    assert time.monotonic() - started < 30
    assert caught.value.url == second
    assert [engine_weight_version(url) for url in (first, second)] == ["incomplete"] * 2
    parts.push(channel)
    assert max(difference(parts.model, url) for url in (first, second)) < SAME


def stop_until_left(fleet, stopped, left, monkeypatch):
    """The first engine comes to the broadcast when the second has left the group, and the trainer has given up."""
    (name,) = (name for name in ("engine 0", "engine 1") if fleet.engine_urls[int(name[-1])] == stopped)
    pids = [pid for pid in fleet.process_ids()[name] if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert pids

    def called(method, address, *args, **kwargs):
        try:
            return call(method, address, *args, **kwargs)
        finally:
            if address == f"{left}/destroy_weights_update_group":
                # The broadcast has failed; only the stopped engine's request is left.
                wait_until(lambda: [each.name for each in threading.enumerate()].count("weight-sync") == 1)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)

    monkeypatch.setattr(buckets, "call", called)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def test_weights_that_do_not_fit_are_refused_before_engines_meet_them(parts):
    parts.push(parts.channel("tensor"))
    name, weight = next(iter(parts.model.state_dict().items()))
    for transport in ("disk", "delta"):
        channel = parts.channel(transport)
        channel.begin(WeightUpdate(version=parts.version + 1))
        with pytest.raises(DataError, match=rf"{name} has shape \[299, 63\]"):
            channel.send([(name, weight[:-1, :-1])])
        assert not list((parts.directory / transport).glob(f"*{parts.version + 1}*"))
    assert [engine_weight_version(url) for url in parts.fleet.engine_urls] == [str(parts.version)] * 2
    assert difference(parts.model, parts.fleet.engine_urls[0]) < SAME
    gloo = parts.channel("gloo")
    gloo.spec, gloo._shapes = (
        dataclasses.replace(gloo.spec, hf_checkpoint=""),
        None,
    )  # what an engine does that meets them
    gloo.begin(WeightUpdate(version=parts.version + 1))
    with pytest.raises(WeightSyncError, match=r"HTTP 400: .*partially updated"):
        gloo.send([(name, weight[:-1, :-1])])
    parts.push(gloo)
    assert difference(parts.model, parts.fleet.engine_urls[1]) < SAME


def test_the_files_of_the_last_version_are_whole_and_alone(parts):
    for transport in ("disk", "delta"):
        parts.push(parts.channel(transport))
    (path,) = (parts.directory / "disk").iterdir()
    assert verify_checkpoint(path).keys() == parts.model.state_dict().keys()
    (local,) = (parts.directory / "local").iterdir()
    assert verify_checkpoint(local).keys() == parts.model.state_dict().keys()


# A trainer that dies when its engines wait for a broadcast.
DYING_TRAINER = """
import os, signal, sys, threading, time, torch
from slime_core.types import WeightUpdate
from slime_rollout.weights import ChannelSpec, DistributedWeightChannel, buckets
def die(self, tensor):
    time.sleep(1)  # the engines are told at the same time
    os.kill(os.getpid(), signal.SIGKILL)
buckets.BroadcastGroup.broadcast = die
channel = DistributedWeightChannel(ChannelSpec(tuple(sys.argv[1:])))
channel.begin(WeightUpdate(version=9))
channel.send([("model.norm.weight", torch.ones(64))])
"""


@pytest.mark.full
def test_a_trainer_that_dies_in_a_broadcast_stops_neither_engines_nor_the_next_update(parts):
    command = [sys.executable, "-c", DYING_TRAINER, *parts.fleet.engine_urls]
    ended = subprocess.run(command, timeout=240, check=False)
    assert ended.returncode == -signal.SIGKILL
    channel = parts.open("gloo")
    parts.push(channel)
    channel.close()
    assert difference(parts.model, parts.fleet.engine_urls[0]) < SAME


@pytest.mark.full
@pytest.mark.parametrize("transport", ["tensor", "gloo"])
def test_an_engine_that_dies_in_an_update_is_named_soon(engine_config, tiny_model, tmp_path, transport, monkeypatch):
    fleet = EngineFleet.start(
        engine_config,
        model_path=tiny_model,
        num_engines=1,
        dtype="float32",
        context_length=None,
        seed=0,
        log_dir=tmp_path,
    )
    with fleet:
        (url,) = fleet.engine_urls
        parts = Parts(fleet, tiny_model, tmp_path)
        channel = parts.open(transport)
        parts.push(channel)
        monkeypatch.setattr(EngineChannel, "_open_update", lambda channel, url: fleet._engines[0].stop())
        started = time.monotonic()
        with pytest.raises(WeightSyncError) as caught:
            parts.push(channel)
        assert time.monotonic() - started < 45
        assert caught.value.url == url
        channel.close()
        parts.receiver.stop()


def running(url):
    return sum(load["num_running_reqs"] for load in call("GET", f"{url}/v1/loads")["loads"])
