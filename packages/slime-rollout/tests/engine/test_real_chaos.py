"""Everything fails at once: three real SGLang servers, the real router and a reward service, during a rollout.

Of two engines one is killed and one stopped, chosen by what they are doing, and the third has to finish what all three
had begun. Each fault is seen to have happened, in `/proc` and in the events, and each bad answer is counted.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime_core.types import WeightUpdate
from slime_rollout.config import RolloutConfig
from slime_rollout.engine import EngineDiedError, WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.slots import read_events
from slime_rollout.errors import REWARD_FAILURE, GenerationError
from slime_rollout.generate import EngineClient
from slime_rollout.http import call, patient_delays
from slime_rollout.rollout import RolloutManager
from slime_rollout.supervise import reaper
from slime_rollout.weights import TensorWeightChannel

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.timeout(300)]

INTERVAL, TIMEOUT, STARTUP = 2.0, 15.0, 200.0
NOTICED = INTERVAL + TIMEOUT + 10.0
IN_FLIGHT = 200
PROMPTS, SAMPLES = 50, 8
REWARD_TIMEOUT = 10.0  # more than 200 requests at once take on a busy machine
ATTEMPTS = 4
# fp32 on both sides, other orders of summation: a few times 1e-6 is usual.
SAME = 1e-4
REPLACED = ["restarted", "started", "weights", "registered"]
KILLED, STOPPED = "ended by itself (exit code 137)", f"gave no good answer within {TIMEOUT:g} s"
# What the reward service does to the samples of some prompts, attempt by attempt; the last one goes on.
BAD = {"0": ["500"], "1": ["hang"], "2": ["garbage"], "3": ["500", "broken", "hang", "good"]}
GARBAGE = [b"<html>busy</html>", b'{"score": "many"}', b"[1, 2", b"NaN", b"null", b"", b'{"score": 1e999}', b"\xff\xfe"]


def children():
    """What this process has started, and nobody has ended. Torch's helper for shared memory ends with this process."""
    return {process for process in reaper.descendants(os.getpid()) if "torch_shm_manager" not in command(process.pid)}


def command(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@contextlib.contextmanager
def started_fleet(engine_config, tiny_model, logs, *, num_engines, restarts):
    config = dataclasses.replace(
        engine_config,
        use_fault_tolerance=True,
        rollout_health_check_interval=INTERVAL,
        rollout_health_check_timeout=TIMEOUT,
        rollout_max_restarts=restarts,
        engine_startup_timeout=STARTUP,
        router_policy="round_robin",
    )
    before = children()
    fleet = EngineFleet.start(
        config,
        model_path=tiny_model,
        num_engines=num_engines,
        dtype="float32",
        context_length=None,
        seed=1,
        log_dir=logs,
    )
    fleet.logs = logs
    with fleet:
        yield fleet
    assert not children() - before


@pytest.fixture(scope="module")
def fleet(engine_config, tiny_model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    with started_fleet(engine_config, tiny_model, logs, num_engines=3, restarts=20) as fleet:
        yield fleet


class RewardService:
    """Scores by length; to the samples of the prompts in `bad` it answers as that says. Counts what it did."""

    def __init__(self):
        self.bad = {}
        self.did = collections.Counter()
        self._attempts = collections.Counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                getattr(self, f"_{service.next_deed(asked)}", self._good)(asked)

            def _good(self, asked):
                self._reply(200, json.dumps(score(asked["response"], asked["label"])).encode())

            def _500(self, asked):
                self._reply(500, b"out of memory")

            def _garbage(self, asked):
                self._reply(200, GARBAGE[service.did["garbage"] % len(GARBAGE)])

            def _broken(self, asked):
                self.wfile.write(b"no HTTP at all\r\n\r\n")
                self.connection.shutdown(socket.SHUT_RDWR)

            def _hang(self, asked):
                service._ended.wait(60)

            def _reply(self, status, content):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.socket.listen(256)  # by itself it lets 5 wait, and the others try again after seconds
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def next_deed(self, asked):
        with self._lock:
            deeds = self.bad.get(asked["label"], ["good"])
            attempt = self._attempts[asked["label"], asked["response"]]
            self._attempts[asked["label"], asked["response"]] += 1
            deed = deeds[min(attempt, len(deeds) - 1)]
            self.did[deed] += 1
            return deed

    def close(self):
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()


def score(response, label):
    return len(response) % 7 + int(label) / 100


@pytest.fixture
def service():
    service = RewardService()
    yield service
    service.close()


@pytest.fixture
def manager(tiny_model, service, write_rows):
    """Builds a manager of 400 samples; waits with retries as the launcher does."""

    def build(fleet, *, samples=SAMPLES, prompt_characters=20, response_len=150, delays=None):
        texts = [f"{number} + 30 = {number + 30}, " for number in range(PROMPTS * SAMPLES // samples)]
        rows = [
            {"prompt": (text * (prompt_characters // len(text) + 1))[:prompt_characters], "label": str(number)}
            for number, text in enumerate(texts)
        ]
        config = RolloutConfig.of(
            hf_checkpoint=tiny_model,
            prompt_data=write_rows(rows),
            rollout_batch_size=len(rows),
            n_samples_per_prompt=samples,
            rollout_max_response_len=response_len,
            rm_type="remote_rm",
            rm_url=service.url,
            rm_timeout=REWARD_TIMEOUT,
            rm_on_failure="zero",
        )
        delays = patient_delays(STARTUP) if delays is None else delays
        client = EngineClient.of(config, fleet.router_url, retry_delays=delays)
        return RolloutManager(config, client=client, run_seed=1)

    return build


class Trainer:
    """Plays the training side: has the weights of every version, and sends them as the launcher does.

    Attributes:
        networks: By version, from 5: none is what the engines were started with.
        version: The current one.
    """

    def __init__(self, tiny_model):
        torch.set_num_threads(1)
        self._model = tiny_model
        self.networks = {}
        self.version = 4
        self.step()

    @torch.no_grad()
    def step(self):
        self.version += 1
        network = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(self.version)
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator) * parameter.abs().mean())
        self.networks[self.version] = network

    def push(self, fleet):
        while not self.try_to_push(fleet):
            pass

    def try_to_push(self, fleet, *, only_behind=False, begun=None, amid=None):
        """Whether all went well; `begun` is called with the engines before, `amid` after half of the weights."""
        urls = tuple(fleet.begin_update(only_behind=only_behind))
        if not urls:
            return True
        weights = list(self.networks[self.version].state_dict().items())
        channel = TensorWeightChannel(ChannelSpec(urls))
        try:
            if begun:
                begun(urls)
            channel.begin(WeightUpdate(version=self.version))
            channel.send(weights[::2])
            if amid:
                amid()
            channel.send(weights[1::2])
            channel.end()
        except WeightSyncError as error:
            assert fleet.fail_update(), error
            return False
        finally:
            channel.close()
        fleet.confirm_update(self.version)
        return True

    def watch(self, fleet, rollout):
        """What the launcher does while a rollout runs; its result."""
        while not rollout.done():
            fleet.check()
            if fleet.engines_behind():
                self.try_to_push(fleet, only_behind=True)
            time.sleep(0.2)
        return rollout.result()

    @torch.no_grad()
    def largest_difference(self, samples):
        """Of all log-probs, from those under the weights that each token names. R: response, V: vocabulary."""
        worst = 0.0
        for sample in samples:
            response_R1 = torch.tensor(sample.response_tokens)[:, None]
            given_R = torch.tensor(sample.rollout_log_probs)
            for version in set(sample.weight_versions):
                logits_TV = self.networks[version](torch.tensor([sample.tokens])).logits[0, :-1]
                expected_R = logits_TV[-len(response_R1) :].log_softmax(-1).gather(1, response_R1)[:, 0]
                there_R = torch.tensor([other == version for other in sample.weight_versions])
                worst = max(worst, (expected_R - given_R).abs()[there_R].max().item())
        return worst


@pytest.fixture(scope="module")
def trainer(tiny_model, fleet):
    trainer = Trainer(tiny_model)
    trainer.push(fleet)
    return trainer


def wait_until(condition, seconds=STARTUP):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def loads(fleet):
    """What each engine says of its work."""
    return [call("GET", f"{url}/v1/loads")["loads"][0] for url in fleet.engine_urls]


def in_flight(load):
    return load["num_running_reqs"] + load["num_waiting_reqs"]


def start(pool, fleet, manager, busy):
    """A rollout, once 200 requests are in flight, and every engine is busy with them as `busy` says."""
    rollout = pool.submit(manager.generate, 0)

    def all_at_work():
        assert not rollout.done(), rollout.result()
        now = loads(fleet)
        return now if sum(map(in_flight, now)) >= IN_FLIGHT and all(map(busy, now)) else None

    now = wait_until(all_at_work, 60)
    print(f"\nin flight, engine by engine: {[in_flight(load) for load in now]}")
    return rollout


@dataclasses.dataclass
class Fault:
    """A signal that took effect.

    Attributes:
        name: Whom it struck: `engine 0` … or `router`.
        processes: All that belongs to it.
        since: How many events there were before.
    """

    name: str
    processes: set[reaper.Process]
    since: int
    fleet: EngineFleet

    def events(self):
        """What happened to it since."""
        return [event for event in read_events(self.fleet.logs)[self.since :] if event["engine"] == self.name]


def strike(fleet, name, signum, part=""):
    """Send a signal to the processes of an engine or the router whose command contains `part`; see what it did."""
    pids = fleet.process_ids()[name]
    processes = {process for process in reaper.descendants(os.getpid()) if process.pid in pids}
    fault = Fault(name, processes, len(read_events(fleet.logs)), fleet)
    struck = [pid for pid in pids if part in command(pid)]
    if signum == signal.SIGKILL and not part:
        struck = struck[:1]  # its supervisor ends the others
    assert struck
    for pid in struck:
        os.kill(pid, signum)
    wait_until(lambda: all(state(pid) in ("T" if signum == signal.SIGSTOP else "ZX") for pid in struck), 10)
    return fault


def state(pid):
    """One letter, as `ps` has it; X for what is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def check_fault(fault, *reasons):
    """It was noticed for one of these reasons, nothing is left of it, and another one serves in its place."""
    events = fault.events()
    print(f"{fault.name}: {events[0]['detail'].partition(':')[0]}")
    assert any(reason in events[0]["detail"] for reason in reasons)
    kinds = [event["event"] for event in events if event["event"] != "killed"]
    assert kinds == ["unhealthy", *(REPLACED[:2] if fault.name == "router" else REPLACED)]
    assert not fault.processes & children()


def recover(fleet, trainer):
    """Every engine serves again, with the current weights."""

    def serves():
        fleet.check()
        if fleet.engines_behind():
            trainer.try_to_push(fleet, only_behind=True)
        return not fleet.not_serving()

    wait_until(serves)
    assert len(fleet.engine_urls) == 3


def check_batch(manager, batch, trainer, versions):
    """Every prompt has its samples, each once, and every token is from the weights that it names."""
    samples = batch.samples
    assert [sample.index for sample in samples] == list(range(PROMPTS * SAMPLES))
    size = len(batch.groups[0])
    assert [[sample.label for sample in group] for group in batch.groups] == [
        [str(number)] * size for number in range(PROMPTS * SAMPLES // size)
    ]
    assert all(len({tuple(sample.prompt_tokens) for sample in group}) == 1 for group in batch.groups)
    assert all(len(sample.weight_versions) == sample.response_length >= 1 for sample in samples)
    assert trainer.version in {version for sample in samples for version in sample.weight_versions} <= versions
    assert all(sample.weight_versions == sorted(sample.weight_versions) for sample in samples)
    assert trainer.largest_difference(samples) < SAME
    assert manager.source.check_ledger() is None
    counts = manager.source.ledger.counts
    assert (counts["generated"], counts["trained"], counts["out"]) == (len(samples),) * 2 + (0,)


def check_rewards(samples, bad):
    for sample in samples:
        failure = sample.metadata.get(REWARD_FAILURE)
        if sample.label in bad:
            assert sample.reward == 0.0
            assert bad[sample.label] in failure
        else:
            assert failure is None
            assert sample.reward == score(sample.response, sample.label)


def test_a_rollout_outlives_engines_router_and_reward_service(fleet, trainer, manager, service):
    service.bad = BAD
    given = manager(fleet)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rollout = start(pool, fleet, given, lambda load: load["num_running_reqs"])
        began = time.monotonic()
        faults = [
            strike(fleet, "engine 0", signal.SIGKILL),
            strike(fleet, "engine 1", signal.SIGSTOP),
            strike(fleet, "router", signal.SIGKILL),
        ]
        wait_until(lambda: all(fault.events() for fault in faults), NOTICED)
        print(f"all was noticed after {time.monotonic() - began:.1f} s")
        batch = trainer.watch(fleet, rollout)
    print(f"the rollout was there {time.monotonic() - began:.1f} s after the faults")
    check_batch(given, batch, trainer, {trainer.version})
    check_rewards(batch.samples, {"0": "HTTP 500", "1": "time limit", "2": "not a finite number"})
    print(f"the service did: {dict(service.did)}")
    assert service.did["500"] >= ATTEMPTS * SAMPLES + SAMPLES / 2
    assert service.did["hang"] >= ATTEMPTS * SAMPLES + SAMPLES / 2
    assert service.did["garbage"] >= SAMPLES
    assert service.did["broken"] >= SAMPLES / 2
    assert service.did["good"] >= (PROMPTS - len(BAD) + 1) * SAMPLES
    recover(fleet, trainer)
    for fault, reason in zip(faults, (KILLED, STOPPED, KILLED), strict=True):
        check_fault(fault, reason)


def test_engines_fail_while_they_read_prompts(fleet, trainer, manager):
    """Responses of one token: until it is there, a request is being read or waits for that."""
    given = manager(fleet, samples=1, prompt_characters=1300, response_len=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rollout = start(pool, fleet, given, in_flight)
        faults = [strike(fleet, "engine 0", signal.SIGSTOP), strike(fleet, "engine 1", signal.SIGKILL)]
        batch = trainer.watch(fleet, rollout)
    assert min(len(sample.prompt_tokens) for sample in batch.samples) > 430
    finish(fleet, trainer, given, batch, {trainer.version})
    check_fault(faults[0], STOPPED)
    check_fault(faults[1], KILLED)


def test_schedulers_and_the_router_hang_or_die_while_tokens_are_sampled(fleet, trainer, manager):
    """The servers themselves go on: one whose scheduler was killed or stopped still takes connections."""
    given = manager(fleet)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rollout = start(pool, fleet, given, lambda load: load["num_running_reqs"])
        faults = [
            strike(fleet, "engine 0", signal.SIGKILL, "scheduler"),
            strike(fleet, "engine 1", signal.SIGSTOP, "scheduler"),
            strike(fleet, "router", signal.SIGSTOP),
        ]
        batch = trainer.watch(fleet, rollout)
    finish(fleet, trainer, given, batch, {trainer.version})
    check_fault(faults[0], "ended by itself", STOPPED)
    check_fault(faults[1], STOPPED)
    check_fault(faults[2], STOPPED)


@pytest.mark.parametrize("moment", ["paused", "half of the weights are there"])
def test_engines_fail_while_weights_are_sent(fleet, trainer, manager, moment):
    """Requests are in flight throughout. What an engine with half of the weights has sampled counts for nothing."""
    given = manager(fleet)
    faults = []

    def fail():
        faults.append(strike(fleet, "engine 0", signal.SIGKILL))
        faults.append(strike(fleet, "engine 1", signal.SIGSTOP))

    def pause_and_fail(urls):
        for url in urls:
            call("POST", f"{url}/pause_generation", {"mode": "retract"})
            call("POST", f"{url}/update_weight_version", {"new_version": "incomplete", "abort_all_requests": False})
        fail()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        rollout = start(pool, fleet, given, lambda load: load["num_running_reqs"])
        old = trainer.version
        trainer.step()
        how = {"begun": pause_and_fail} if moment == "paused" else {"amid": fail}
        assert not trainer.try_to_push(fleet, **how)
        assert not rollout.done(), rollout.result()
        trainer.push(fleet)
        batch = trainer.watch(fleet, rollout)
    finish(fleet, trainer, given, batch, {old, trainer.version})
    check_fault(faults[0], KILLED)
    check_fault(faults[1], STOPPED)


def finish(fleet, trainer, given, batch, versions):
    check_batch(given, batch, trainer, versions)
    check_rewards(batch.samples, {})
    recover(fleet, trainer)


@pytest.mark.parametrize(
    ("name", "signum", "reason", "limit"),
    [
        ("engine 0", signal.SIGKILL, KILLED, 5.0),
        ("engine 0", signal.SIGSTOP, STOPPED, INTERVAL + TIMEOUT + 5.0),
        ("router", signal.SIGKILL, KILLED, 5.0),
    ],
)
def test_past_the_budget_the_run_ends_in_time_with_one_error(
    engine_config, tiny_model, tmp_path, manager, name, signum, reason, limit
):
    with started_fleet(engine_config, tiny_model, tmp_path, num_engines=1, restarts=0) as fleet:
        trainer = Trainer(tiny_model)
        trainer.push(fleet)
        given = manager(fleet, delays=[5.0] * 3)  # few: 400 requests that fail often take a busy machine minutes
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            rollout = start(pool, fleet, given, lambda load: load["num_running_reqs"])
            fault = strike(fleet, name, signum)
            began = time.monotonic()
            with pytest.raises(EngineDiedError) as failure:
                trainer.watch(fleet, rollout)
            ended = time.monotonic() - began
            print(f"the run ended {ended:.1f} s after the fault: {str(failure.value)[:150]}")
            assert ended < limit
            text = str(failure.value)
            assert text.startswith(f"{name} (http://") and reason in text
            assert "restarted 0 times, as often as --rollout-max-restarts allows; the end of its log" in text
            assert [event["event"] for event in fault.events()][-1] == "budget_exhausted"
            assert not rollout.done(), rollout.result()  # its requests would wait longer for an engine
            fleet.stop()
            assert not fault.processes & children()
            with pytest.raises(GenerationError):
                rollout.result(60)
