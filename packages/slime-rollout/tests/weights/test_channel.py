"""What every channel does, shown with engines that only listen."""

import contextlib
import dataclasses
import hashlib
import pickle
import socket
import threading

import pytest
import torch

from slime_core.errors import DataError
from slime_core.interfaces import WeightChannel
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.transports import REQUEST_TIMEOUT_SECONDS, WeightSyncConfig
from slime_rollout.http import call
from slime_rollout.weights import (
    DeltaWeightChannel,
    DiskWeightChannel,
    DistributedWeightChannel,
    TensorWeightChannel,
)

CONTROL = [
    "/pause_generation",
    "/update_weight_version",
    "/begin_weight_update",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
]
FILES = {"update_weight_transport": "disk", "update_weight_disk_dir": "/shared"}
DELTA = {**FILES, "update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "/local"}


@pytest.fixture
def channel(engines, hf_checkpoint):
    urls = tuple(engine.url for engine in engines)
    channel = TensorWeightChannel(ChannelSpec(urls, hf_checkpoint=str(hf_checkpoint)))
    yield channel
    channel.close()


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, TensorWeightChannel),
        ({"update_weight_transport": "gloo"}, DistributedWeightChannel),
        (FILES, DiskWeightChannel),
        (DELTA, DeltaWeightChannel),
    ],
)
def test_flags_choose_the_channel_which_survives_pickling(flags, kind):
    config = WeightSyncConfig(**flags, update_weight_pause_mode="in_place", check_weight_update_equal=True)
    spec = ChannelSpec(
        ("http://127.0.0.1:9/",),
        sync=config,
        tp_size=2,
        hf_checkpoint="/hf",
        receivers=("http://r",),
        colocate=True,
        key="secret",
    )
    assert spec.engine_urls == ("http://127.0.0.1:9",) and "secret" not in repr(spec)
    channel = pickle.loads(pickle.dumps(spec)).open()
    assert type(channel) is kind and isinstance(channel, WeightChannel)
    chosen = flags.get("update_weight_transport", "tensor")
    assert channel.spec == dataclasses.replace(spec, sync=config.adapted(update_weight_transport=chosen))
    again = pickle.loads(pickle.dumps(channel))
    assert type(again) is kind and again.spec == channel.spec


def test_an_update_asks_in_order(channel, engines):
    channel.begin(WeightUpdate(version=4))
    assert [engine.version for engine in engines] == ["incomplete"] * 2  # if this process is killed now
    assert (channel.send([("w", torch.ones(3))]), channel.send([])) == (12, 0)
    assert channel.end() == {}
    for engine in engines:
        paths = engine.paths()
        assert [path for path in paths if path in CONTROL] == CONTROL
        assert paths[-1] == "/continue_generation" and engine.version == "4"
        assert engine.asked[0] == ("/pause_generation", {"mode": "retract"})


def test_a_second_update_waits_for_the_first(channel):
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match="the update to version 4 is still open; end it before version 5"):
        channel.begin(WeightUpdate(version=5))


def test_a_refusal_names_the_engine_and_no_engine_stays_paused(channel, engines, caplog):
    engines[1].refuse["/update_weights_from_tensor"] = "no room"
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match=r"weight version 4: POST .*from_tensor: HTTP 400: .*no room") as caught:
        channel.send([("w", torch.ones(3))])
    assert caught.value.url == engines[1].url == pickle.loads(pickle.dumps(caught.value)).url
    for engine in engines:
        assert engine.version == "incomplete" and engine.paths()[-1] == "/continue_generation"
    with pytest.raises(WeightSyncError, match="no update is open"):
        channel.end()
    engines[0].refuse["/update_weights_from_tensor"] = "nor here"
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(WeightSyncError, match="nor here"):
        channel.send([("w", torch.ones(3))])
    assert engines[1].url in caplog.text and "no room" in caplog.text  # each is told, one is raised
    del engines[0].refuse["/update_weights_from_tensor"]
    del engines[1].refuse["/update_weights_from_tensor"]
    channel.begin(WeightUpdate(version=5))
    channel.end()
    assert [engine.version for engine in engines] == ["5", "5"]


@pytest.fixture
def deaf():
    """A server that takes every request and answers none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def also_deaf():
    """Another one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address(server):
    return f"http://127.0.0.1:{server.getsockname()[1]}"


def times_asked(deaf):
    deaf.setblocking(False)
    with contextlib.ExitStack() as stack:
        for count in range(100):
            try:
                stack.enter_context(deaf.accept()[0])
            except BlockingIOError:
                return count


def test_an_engine_that_does_not_answer_is_named_and_the_others_go_on_soon(engines, deaf):
    url = address(deaf)
    channel = TensorWeightChannel(ChannelSpec((engines[0].url, url), sync=WeightSyncConfig(update_weight_timeout=0.5)))
    with pytest.raises(WeightSyncError, match=r"time limit of 0\.5 s") as caught:
        channel.begin(WeightUpdate(version=4))
    assert (caught.value.url, caught.value.silent) == (url, (url,))
    assert times_asked(deaf) == 3  # then to close the update, and once more to have it go on; then nothing more
    assert engines[0].paths()[-1] == "/continue_generation"
    assert pickle.loads(pickle.dumps(caught.value)).silent == (url,)


def test_one_that_is_slow_to_close_a_failed_update_goes_on_yet(channel, engines):
    """Left paused it would count as one that hangs, or wait for the next update."""
    sync = dataclasses.replace(channel.spec.sync, update_weight_timeout=0.5)
    channel = TensorWeightChannel(dataclasses.replace(channel.spec, sync=sync))
    closed = engines[0].hold["/end_weight_update"] = threading.Event()
    engines[1].refuse["/update_weights_from_tensor"] = "no room"
    try:
        channel.begin(WeightUpdate(version=4))
        with pytest.raises(WeightSyncError, match="no room") as caught:
            channel.send([("w", torch.ones(3))])
    finally:
        closed.set()
    assert caught.value.silent == ()
    for engine in engines:
        assert engine.paths()[-1] == "/continue_generation" and engine.version == "incomplete"


def test_all_engines_that_do_not_answer_are_named_at_once(engines, deaf, also_deaf):
    """Also where the first error is another one: each that is told later would cost a whole time limit."""
    silent = (address(deaf), address(also_deaf))
    engines[0].refuse["/pause_generation"] = "not now"
    for urls in (silent, (engines[0].url, *silent)):
        with pytest.raises(WeightSyncError) as caught:
            TensorWeightChannel(ChannelSpec(urls, sync=WeightSyncConfig(update_weight_timeout=0.5))).begin(
                WeightUpdate(version=4)
            )
        assert (caught.value.url, caught.value.silent) == (urls[0], silent)


def test_only_reading_all_weights_may_take_longer_than_another_request(engines, hf_checkpoint, tmp_path, monkeypatch):
    limits = {}

    def timed(method, url, payload=None, **how):
        limits["/" + url.rpartition("/")[2]] = how.get("timeout")
        return call(method, url, payload, **how)

    monkeypatch.setattr("slime_rollout.weights.channel.call", timed)
    hangs = {"use_fault_tolerance": True, "rollout_health_check_interval": 0.0, "rollout_health_check_timeout": 2.0}
    files = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path / "shared")}
    for more, limit in (({}, REQUEST_TIMEOUT_SECONDS), ({"update_weight_timeout": 900.0}, 900.0)):
        sync = EngineConfig(**hangs, **files, **more)
        channel = ChannelSpec((engines[0].url,), sync=sync, hf_checkpoint=str(hf_checkpoint)).open()
        channel.begin(WeightUpdate(version=4))
        channel.send([("w", torch.ones(3))])
        channel.end()
        assert (limits["/pause_generation"], limits["/update_weights_from_disk"]) == (2.0, limit)


def test_with_fault_tolerance_a_request_takes_no_longer_than_noticing_that_an_engine_hangs():
    for settings, limit in (
        ({}, 60.0),
        ({"rollout_health_check_timeout": 5.0}, 35.0),
        ({"use_fault_tolerance": False}, 300.0),
    ):
        config = EngineConfig(**{"use_fault_tolerance": True, **settings})
        assert ChannelSpec(("http://e",), sync=config).open().spec.sync.update_request_timeout == limit


def test_a_large_model_is_given_its_time_at_engines_and_receivers(engines, hf_checkpoint, tmp_path, monkeypatch):
    limits = {}

    def call(method, url, payload, *, key, timeout):
        path = "/" + url.rpartition("/")[2]
        limits[path] = timeout
        engines[0].version = payload.get("new_version", engines[0].version)
        return {"checksums": channel._after, "path": "/local"}

    monkeypatch.setattr("slime_rollout.weights.channel.call", call)
    for module in ("channel", "disk"):
        name = f"slime_rollout.weights.{module}.engine_weight_version"
        monkeypatch.setattr(name, lambda url, key: engines[0].version)
    for tolerant, limit in ((True, 60.0), (False, 1800.0)):
        config = EngineConfig(
            **{**DELTA, "update_weight_disk_dir": str(tmp_path / f"shared-{tolerant}")},
            use_fault_tolerance=tolerant,
            update_weight_timeout=1800.0,
        )
        channel = ChannelSpec(
            ("http://e",), sync=config, hf_checkpoint=str(hf_checkpoint), receivers=("http://r",)
        ).open()
        channel.begin(WeightUpdate(version=4))
        channel.send([("model.norm.weight", torch.zeros(8, dtype=torch.bfloat16))])
        channel.end()
        assert limits["/pull"] == limits["/update_weights_from_disk"] == 1800.0
        assert limits["/pause_generation"] == limits["/continue_generation"] == limit


def test_an_engine_that_is_gone_is_named(engines):
    gone = f"http://127.0.0.1:{free_port()}"
    for channel in (
        TensorWeightChannel(ChannelSpec((engines[0].url, gone))),
        DistributedWeightChannel(ChannelSpec((engines[0].url, gone))),
        DiskWeightChannel(
            ChannelSpec((engines[0].url, gone), sync=WeightSyncConfig(update_weight_disk_dir="/nowhere"))
        ),
    ):
        with pytest.raises(WeightSyncError) as caught:
            channel.begin(WeightUpdate(version=4))
        assert (caught.value.url, caught.value.silent) == (gone, ())


def test_an_engine_that_says_another_version_is_not_believed(channel, engines):
    channel.begin(WeightUpdate(version=4))
    engines[0].answers["/model_info"] = {"weight_version": "3"}
    with pytest.raises(WeightSyncError, match="says it has weight version '3' after version '4' was sent") as caught:
        channel.end()
    assert caught.value.url == engines[0].url


def test_in_place_keeps_a_cache_that_engines_do_not_give_up(engines):
    channel = TensorWeightChannel(
        ChannelSpec((engines[0].url,), sync=WeightSyncConfig(update_weight_pause_mode="in_place"))
    )
    engines[0].refuse["/flush_cache"] = "requests are running"
    channel.begin(WeightUpdate(version=4))
    channel.end()
    assert engines[0].version == "4" and engines[0].asked[0] == ("/pause_generation", {"mode": "in_place"})
    channel = TensorWeightChannel(ChannelSpec((engines[0].url,)))
    channel.begin(WeightUpdate(version=5))
    with pytest.raises(WeightSyncError, match="requests are running"):
        channel.end()


def test_a_wrong_shape_is_refused_before_any_engine_meets_it(channel, engines):
    channel.begin(WeightUpdate(version=4))
    with pytest.raises(DataError, match=r"model.norm.weight has shape \[9\]; in .*hf it is \[8\]"):
        channel.send([("model.norm.weight", torch.ones(9))])
    assert "/update_weights_from_tensor" not in engines[0].paths()
    channel.begin(WeightUpdate(version=5))
    channel.send([("model.norm.weight", torch.ones(8)), ("unknown", torch.ones(3))])
    channel.end()
    assert engines[0].version == "5"


def sha(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.fixture
def checking(engines):
    for engine in engines:
        holds(engine, torch.ones(3))
        engine.answers["/server_info"] = {"device": "cpu", "dtype": "float32"}
    return TensorWeightChannel(
        ChannelSpec(tuple(engine.url for engine in engines), sync=WeightSyncConfig(check_weight_update_equal=True))
    )


def holds(engine, *ranks):
    engine.answers["/weights_checker"] = {"ranks": [{"checksums": {"w": sha(rank)}} for rank in ranks]}


def push_checked(checking, tensor):
    checking.begin(WeightUpdate(version=4))
    checking.send([("w", tensor)])
    checking.end()


def test_engines_that_hold_what_was_sent_are_confirmed(checking, engines):
    push_checked(checking, torch.ones(3))
    assert [engine.version for engine in engines] == ["4", "4"]


def test_an_engine_that_holds_something_else_is_named(checking, engines):
    holds(engines[1], torch.zeros(3))
    with pytest.raises(WeightSyncError, match=f"version 4: {engines[1].url} holds w wrong; send") as caught:
        push_checked(checking, torch.ones(3))
    assert caught.value.url == engines[1].url
    assert [engine.version for engine in engines] == ["incomplete", "incomplete"]


@pytest.mark.parametrize("sent", [torch.zeros(3), -torch.ones(3)])
def test_engines_that_all_hold_something_else_are_noticed(checking, engines, sent):
    both = "; ".join(f"{engine.url} holds w wrong" for engine in engines)
    with pytest.raises(WeightSyncError, match=f"{both}; send the weights again"):
        push_checked(checking, sent)


@pytest.mark.parametrize(
    ("info", "tp_size", "ranks", "sent", "why"),
    [
        ({"device": "xpu", "dtype": "float32"}, 1, 1, torch.zeros(3), "on xpu with weights in float32 compute another"),
        ({"device": "cpu", "dtype": "auto"}, 1, 1, torch.zeros(3), "on cpu with weights in auto compute another"),
        (
            {"device": "cpu", "dtype": "float32"},
            2,
            3,
            torch.zeros(3),
            "tensor parallelism over 2 does not divide the 3 ranks of an engine",
        ),
        ({"device": "cpu", "dtype": "float32"}, 1, 1, torch.zeros(3).char(), "with what was sent: 1 quantized tensors"),
        ({"device": "cpu", "dtype": "float32", "quantization": "fp8"}, 1, 1, torch.zeros(3), "engines quantize it"),
    ],
)
def test_where_engines_have_no_checksum_of_it_only_they_are_compared(
    checking, engines, info, tp_size, ranks, sent, why, caplog
):
    checking.spec = dataclasses.replace(checking.spec, tp_size=tp_size)
    for engine in engines:
        engine.answers["/server_info"] = info
        holds(engine, *[torch.ones(3)] * ranks)
    push_checked(checking, sent)
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith("weight version 4: engines hold the same; not compared with what was sent: ") and why in line
    holds(engines[1], *[torch.zeros(3)] * ranks)
    with pytest.raises(WeightSyncError, match=f"{engines[1].url} holds w wrong; send the weights again"):
        push_checked(checking, sent)


def test_an_engine_without_checksums_is_named(checking, engines):
    engines[0].answers["/weights_checker"] = {"success": True}
    with pytest.raises(WeightSyncError, match="gives no checksums of its weights"):
        push_checked(checking, torch.ones(3))
