import http.server
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from slime_core.interfaces import WeightChannel
from slime_core.types import WeightUpdate
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.weights import TensorWeightChannel, engine_weight_version
from slime_rollout.weights.tensor import ALIGNMENT_BYTES


@pytest.fixture
def channel():
    return TensorWeightChannel((f"http://127.0.0.1:{free_port()}/",), tp_size=2)


def test_it_is_a_weight_channel_and_survives_pickling(channel):
    assert isinstance(channel, WeightChannel)
    copy = pickle.loads(pickle.dumps(channel))
    assert copy == channel
    assert not copy.engine_urls[0].endswith("/")


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
        engine_weight_version(channel.engine_urls[0])


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
    channel = TensorWeightChannel((engines[0].url,))
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
    channel = TensorWeightChannel(tuple(engine.url for engine in engines), tp_size=3)
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
        from slime_rollout.weights.tensor import TensorWeightChannel

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
