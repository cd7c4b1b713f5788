"""Buckets through shared memory, and failures of the broadcast, with engines that only listen."""

import datetime
import http.server
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from slime_core.errors import ConfigError
from slime_core.interfaces import WeightChannel
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights import DistributedWeightChannel, TensorWeightChannel, buckets, engine_weight_version
from slime_rollout.weights.buckets import (
    ALIGNMENT_BYTES,
    BroadcastGroup,
    copy_into,
    largest_elements_first,
    local_address,
)
from slime_rollout.weights.checkpoint import tensor_bytes


@pytest.fixture
def channel():
    return TensorWeightChannel(ChannelSpec((f"http://127.0.0.1:{free_port()}/",), tp_size=2))


def test_it_is_a_weight_channel_and_survives_pickling(channel):
    assert isinstance(channel, WeightChannel)
    copy = pickle.loads(pickle.dumps(channel))
    assert type(copy) is type(channel) and copy.spec == channel.spec
    assert not copy.spec.engine_urls[0].endswith("/")


@pytest.mark.parametrize(
    "look", [tensor_bytes, lambda tensor: copy_into(torch.empty(12, dtype=torch.uint8), tensor, 0)]
)
def test_weights_that_were_sent_can_be_emptied(look):
    """Which is how trainers sleep; torch refuses it of a tensor that NumPy has seen."""
    tensor = torch.arange(3.0)
    look(tensor)
    tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    "action", [lambda channel: channel.send([("w", torch.ones(1))]), lambda channel: channel.end()]
)
def test_nothing_goes_without_begin(channel, action):
    with pytest.raises(WeightSyncError, match=r"no update is open; call begin\(update\) first"):
        action(channel)


def test_an_engine_that_is_not_there_is_named_and_the_channel_stays_usable(channel):
    for version in (3, 4):
        with pytest.raises(
            WeightSyncError, match=rf"weight version {version}: POST http://.*/pause_generation: no answer"
        ):
            channel.begin(WeightUpdate(version=version))
    with pytest.raises(WeightSyncError, match="cannot ask for the weight version"):
        engine_weight_version(channel.spec.engine_urls[0])


class NoEngine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *args):
        pass


def test_a_server_that_is_no_engine_is_named():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NoEngine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(WeightSyncError, match=f"{url}/model_info names no weight version"):
            engine_weight_version(url)
        server.shutdown()


def test_tensors_of_all_kinds_are_copied_into_one_shared_buffer(channel):
    before = torch.multiprocessing.get_sharing_strategy()
    bucket = [
        ("bf16", torch.arange(3, dtype=torch.bfloat16)),
        ("scalar", torch.tensor(2.5)),
        ("part", torch.arange(24.0).view(4, 6)[:, ::2]),
        ("empty", torch.zeros(0, 3)),
        ("parameter", torch.nn.Parameter(torch.ones(2, 2))),
    ]
    flat, metadata = channel._copied(bucket)
    assert flat.is_shared() and flat.dtype == torch.uint8
    for (name, tensor), entry in zip(bucket, metadata, strict=True):
        assert (entry.name, entry.shape, entry.dtype) == (name, tensor.shape, tensor.dtype)
        assert entry.end_idx - entry.start_idx == entry.numel == tensor.numel() * tensor.element_size()
        assert entry.start_idx % ALIGNMENT_BYTES == 0
        assert flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape).equal(tensor)
    again, _ = channel._copied(bucket[:2])
    assert again.data_ptr() == flat.data_ptr()
    assert torch.multiprocessing.get_sharing_strategy() == before


def test_a_bucket_is_loaded_in_pieces_from_one_buffer(engines, monkeypatch):
    monkeypatch.setattr(buckets, "PIECE_BYTES", 2 * ALIGNMENT_BYTES)
    channel = TensorWeightChannel(ChannelSpec((engines[0].url,)))
    loaded, addresses = [], set()

    def load(flat, metadata):
        addresses.add(flat.data_ptr())
        loaded.append([(at.name, flat[at.start_idx : at.end_idx].view(torch.float32).tolist()) for at in metadata])

    monkeypatch.setattr(channel, "_load", load)
    for sizes, pieces in (
        ((2, 2, 1, 1, 1, 3), [["w0", "w1"], ["w2", "w3"], ["w4"], ["w5"]]),
        ((1, 1, 6, 1, 1, 3), [["w0", "w1"], ["w2"], ["w3", "w4"], ["w5"]]),  # w2 has three times ALIGNMENT_BYTES
    ):
        loaded.clear()
        sent = [(f"w{number}", torch.full((8 * size,), float(number))) for number, size in enumerate(sizes)]
        channel.begin(WeightUpdate(version=4))
        channel.send(sent)
        assert [item for piece in loaded for item in piece] == [(name, tensor.tolist()) for name, tensor in sent]
        assert [[name for name, _ in piece] for piece in loaded] == pieces
        assert len(addresses) == 1
        channel.end()
        addresses.clear()


def test_a_piece_that_an_engine_refuses_ends_the_send(engines, monkeypatch):
    monkeypatch.setattr(buckets, "PIECE_BYTES", ALIGNMENT_BYTES)
    channel = TensorWeightChannel(ChannelSpec((engines[0].url,)))
    engines[0].refuse["/update_weights_from_tensor"] = "no room"
    before = shared_memory()
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match="no room"):
        channel.send([(f"w{number}", torch.ones(16)) for number in range(4)])
    assert shared_memory() == before


def test_a_bucket_of_nothing_but_empty_tensors_is_sent(channel):
    flat, (entry,) = channel._copied([("empty", torch.zeros(0, 3))])
    assert flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape).shape == (0, 3)


def test_a_closed_channel_leaves_no_shared_memory_and_can_be_used_again(channel):
    before = shared_memory()
    for value in (1.0, 2.0):
        flat, _ = channel._copied([("w", torch.full((5,), value))])
        assert len(shared_memory() - before) == 1
        assert flat[:20].view(torch.float32).tolist() == [value] * 5
        del flat
        channel.close()
        channel.close()
        assert shared_memory() == before


def test_what_an_engine_never_opened_is_given_back(engines):
    """These engines open nothing, as one does not that dies."""
    before = shared_memory()
    channel = TensorWeightChannel(ChannelSpec((engines[0].url,)))
    channel.begin(WeightUpdate(version=4))
    channel.send([("w", torch.ones(3))])
    channel.send([("w", torch.ones(3000))])
    assert len(shared_memory() - before) == 1
    channel.end()
    assert shared_memory() == before  # also if this process is killed before the next update
    engines[0].refuse["/update_weights_from_tensor"] = "no room"
    channel.begin(WeightUpdate(version=5))
    with pytest.raises(WeightSyncError):
        channel.send([("w", torch.ones(3))])
    assert shared_memory() == before


def test_every_rank_gets_a_handle_of_its_own(engines):
    channel = TensorWeightChannel(ChannelSpec(tuple(engine.url for engine in engines), tp_size=3))
    channel.begin(WeightUpdate(version=4))
    channel.send([("w", torch.ones(3))])
    channel.end()
    for engine in engines:
        (body,) = [body for path, body in engine.asked if path == "/update_weights_from_tensor"]
        assert len(body["serialized_named_tensors"]) == 3
        assert body["load_format"] == "flattened_bucket"


def shared_memory():
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def test_a_buffer_that_something_keeps_until_later_does_not_end_the_process():
    """Such as the traceback of a failed update: torch would call a missing file an error, in a destructor."""
    program = """
        from pathlib import Path
        import os, torch
        from slime_rollout.weights.buckets import TensorWeightChannel

        def files():
            return list(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))

        channel = TensorWeightChannel(("http://127.0.0.1:1",))
        kept = channel._copied([("w", torch.ones(8))])[0]
        assert files()
        channel.close()
        assert not files()
        assert kept[:32].view(torch.float32).sum() == 8
        del kept
        print("goes on")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


@pytest.fixture
def broadcast(engines):
    channel = DistributedWeightChannel(
        ChannelSpec(tuple(engine.url for engine in engines), sync=WeightSyncConfig(update_weight_timeout=2.0))
    )
    yield channel
    channel.close()


def test_an_engine_that_refuses_to_join_is_named_at_once(broadcast, engines):
    broadcast.timeout = 30.0
    engines[1].refuse["/init_weights_update_group"] = "no group"
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="no group") as caught:
        broadcast.begin(WeightUpdate(version=4))
    assert time.monotonic() - started < 10
    assert not [thread for thread in threading.enumerate() if thread.name == "weight-sync"]
    assert caught.value.url == engines[1].url
    for engine in engines:
        assert engine.version == "incomplete" and "/destroy_weights_update_group" in engine.paths()
        assert engine.paths()[-1] == "/continue_generation"


def test_engines_that_agree_and_never_join_are_given_up_in_time(broadcast, engines):
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="weight version 4: "):
        broadcast.begin(WeightUpdate(version=4))
    assert time.monotonic() - started < 15
    first = next(body for path, body in engines[1].asked if path == "/init_weights_update_group")
    assert (first["rank_offset"], first["world_size"], first["backend"]) == (2, 3, "gloo")
    with pytest.raises(WeightSyncError, match="weight version 5"):
        broadcast.begin(WeightUpdate(version=5))
    names = {body["group_name"] for path, body in engines[0].asked if path == "/init_weights_update_group"}
    assert len(names) == 2  # a group that failed is never joined again


def test_a_broadcast_that_nobody_receives_ends_by_its_time_limit(engines):
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
    channel = DistributedWeightChannel(ChannelSpec((engines[0].url,), sync=WeightSyncConfig(update_weight_timeout=1.0)))
    channel._group = group
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match="weight version 4: the broadcast took over 1 s"):
        channel.send([("w", torch.ones(2))])
    assert group.left and group.settled and "/destroy_weights_update_group" in engines[0].paths()


def test_an_engine_that_waits_for_another_one_is_not_blamed(engines):
    """In a broadcast all wait for all, and the request to any of them may run out of time first."""
    channel = DistributedWeightChannel(ChannelSpec((engines[0].url,)))

    def ask(url):
        raise WeightSyncError("time limit", url=url, silent=(url,))

    with pytest.raises(WeightSyncError) as caught:
        channel._while_engines(ask, lambda: None, 5.0)
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
        DistributedWeightChannel(ChannelSpec(("http://e",), sync=WeightSyncConfig(update_weight_transport="nccl")))
    with pytest.raises(ConfigError, match="backend tensor is unknown; allowed: nccl, gloo"):
        DistributedWeightChannel(ChannelSpec(("http://e",), sync=WeightSyncConfig(update_weight_transport="tensor")))


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


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_group_listens_on_its_address_alone(address):
    group = BroadcastGroup("g", address, 2, "gloo", 5.0)
    assert [host for host in ("127.0.0.1", "127.0.0.2", "::1") if answers(host, group.port)] == [address]


def answers(host, port):
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except ConnectionRefusedError:
        return False
    return True
