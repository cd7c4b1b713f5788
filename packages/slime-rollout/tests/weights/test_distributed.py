"""Failures of the broadcast, with engines that only listen; what goes well is shown on real ones."""

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from slime_core.errors import ConfigError
from slime_core.types import WeightUpdate
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights import DistributedWeightChannel
from slime_rollout.weights.distributed import BroadcastGroup, largest_elements_first, local_address, while_engines
from slime_rollout.weights.engines import EngineUpdate


@pytest.fixture
def channel(engines):
    channel = DistributedWeightChannel(tuple(engine.url for engine in engines), timeout=2.0)
    yield channel
    channel.close()


def test_an_engine_that_refuses_to_join_is_named_at_once(channel, engines):
    channel.timeout = 30.0
    engines[1].refuse["/init_weights_update_group"] = "no group"
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="no group") as caught:
        channel.begin(WeightUpdate(version=4))
    assert time.monotonic() - started < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-sync"]
    assert caught.value.url == engines[1].url
    for engine in engines:
        assert engine.version == "incomplete" and "/destroy_weights_update_group" in engine.paths()
        assert engine.paths()[-1] == "/continue_generation"


def test_engines_that_agree_and_never_join_are_given_up_in_time(channel, engines):
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="weight version 4: "):
        channel.begin(WeightUpdate(version=4))
    assert time.monotonic() - started < 15
    first = next(body for path, body in engines[1].asked if path == "/init_weights_update_group")
    assert (first["rank_offset"], first["world_size"], first["backend"]) == (2, 3, "gloo")
    with pytest.raises(WeightSyncError, match="weight version 5"):
        channel.begin(WeightUpdate(version=5))
    names = {body["group_name"] for path, body in engines[0].asked if path == "/init_weights_update_group"}
    assert len(names) == 2  # a group that failed is never joined again


def test_a_broadcast_that_nobody_receives_ends_by_its_time_limit(engines, monkeypatch):
    class Deaf:
        name = "deaf"
        device = torch.device("cpu")

        def broadcast(self, tensor):
            time.sleep(60)

        def leave(self):
            self.left = True

        def settle(self, seconds):
            self.settled = True

    group = Deaf()
    channel = DistributedWeightChannel((engines[0].url,), timeout=1.0)
    monkeypatch.setattr(channel, "_joined", lambda update: group)
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match="weight version 4: the broadcast took over 1 s"):
        channel.send([("w", torch.ones(2))])
    assert group.left and group.settled and "/destroy_weights_update_group" in engines[0].paths()


def test_an_engine_that_waits_for_another_one_is_not_blamed(engines):
    """In a broadcast all wait for all, and the request to any of them may run out of time first."""
    update = EngineUpdate((engines[0].url,), 4)

    def ask(url):
        raise WeightSyncError("time limit", url=url, silent=(url,))

    with pytest.raises(WeightSyncError) as caught:
        while_engines(update, ask, lambda: None, 5.0)
    assert not caught.value.silent


def test_tensors_lie_at_multiples_of_their_size():
    bucket = [("a", torch.ones(3, dtype=torch.int8)), ("b", torch.ones(2)), ("c", torch.ones(1, dtype=torch.float64))]
    bucket += [("d", torch.ones(5, dtype=torch.bfloat16)), ("e", torch.ones(0))]
    start = 0
    for _, tensor in largest_elements_first(bucket):
        assert start % tensor.element_size() == 0
        start += tensor.nbytes
    assert start == sum(tensor.nbytes for _, tensor in bucket)


def test_this_machines_address_is_the_one_that_leads_to_an_engine(engines):
    assert local_address(engines[0].url) == "127.0.0.1"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without CUDA")
def test_nccl_without_cuda_is_refused():
    with pytest.raises(ConfigError, match="nccl needs CUDA"):
        DistributedWeightChannel(("http://e",), backend="nccl")
    with pytest.raises(ConfigError, match="backend mpi is unknown; allowed: nccl, gloo"):
        DistributedWeightChannel(("http://e",), backend="mpi")


def test_engines_that_wait_for_one_that_refuses_are_woken():
    group = BroadcastGroup("g", "127.0.0.1", 3, "gloo", 30.0)
    waiting = []

    def engine():
        store = dist.PrefixStore("cpu/", dist.PrefixStore("g/", dist.PrefixStore("g", client)))
        try:
            dist.ProcessGroupGloo(store, 1, 3, datetime.timedelta(seconds=30))
        except RuntimeError as error:
            waiting.append(error)

    def here():
        with pytest.raises(RuntimeError):
            group.join()

    client = dist.TCPStore("127.0.0.1", group.port, 3, False, timeout=datetime.timedelta(seconds=30))
    ours = threading.Thread(target=here, daemon=True)
    theirs = threading.Thread(target=engine, daemon=True)
    for thread in (ours, theirs):
        thread.start()
    wait_until(lambda: group._thread is not None)
    group.leave()
    group.settle(10)
    theirs.join(10)
    assert waiting and not ours.is_alive()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_group_takes_a_free_port():
    groups = [BroadcastGroup("g", "127.0.0.1", 2, "gloo", 1.0) for _ in range(2)]
    assert len({group.port for group in groups}) == 2
