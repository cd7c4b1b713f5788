"""A channel before it is opened: who sends to whom; and the ways to make one that earlier versions had."""

import pickle

import pytest

from slime_rollout import generation_service
from slime_rollout.engine import WeightSyncError, addresses, channels
from slime_rollout.engine.channels import ChannelSpec, require_this_machine
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights import DeltaWeightChannel, TensorWeightChannel, open_channel

ELSEWHERE = "http://203.0.113.1:30000"  # an address for documentation, which nobody has


def test_shared_memory_is_seen_by_this_machine_alone():
    require_this_machine(["http://127.0.0.1:1"])
    with pytest.raises(
        WeightSyncError,
        match=r"a checkpoint on it, and http://203\.0\.113\.1:30000 run .* nccl, gloo, or disk, ",
    ):
        require_this_machine(["http://127.0.0.1:1", ELSEWHERE])


def test_in_shared_memory_the_first_rank_of_each_node_sends_to_the_engines_there():
    def addresses():
        return {"a": "10.0.0.1", "b": "10.0.0.2"}

    urls = ("http://10.0.0.1:1", "http://10.0.0.2:2", "http://10.0.0.2:3")
    given, gloo = (
        ChannelSpec(urls, sync=WeightSyncConfig(update_weight_transport=name)) for name in ("tensor", "gloo")
    )
    found = given.by_rank(["a", "a", "b", "b"], addresses)
    assert {rank: each.engine_urls for rank, each in found.items()} == {0: urls[:1], 2: urls[1:]}
    assert gloo.by_rank(["a", "a", "b", "b"], addresses) == {0: gloo}
    assert given.by_rank(["a", "a"], addresses) == {0: given}  # whose engines may be on the loopback address
    with pytest.raises(WeightSyncError, match=r"no trainer rank is on the node of http://10\.0\.0\.2:2"):
        given.by_rank(["a", "c"], addresses)


def test_former_names_are_the_new_ones_and_warn():
    for module, name in ((addresses, "require_this_machine"), (generation_service, "ChannelSpec")):
        with pytest.warns(DeprecationWarning, match=f"{name} is now slime_rollout.engine.channels.{name}"):
            assert getattr(module, name) is getattr(channels, name)
        with pytest.raises(AttributeError):
            module.nothing  # noqa: B018


def test_former_arguments_of_channels_mean_the_same_and_warn():
    urls = ("http://e/",)
    with pytest.warns(DeprecationWarning, match="a weight channel now takes a ChannelSpec"):
        old = TensorWeightChannel(urls, 2, timeout=3.0, pause_mode="in_place", cuda_ipc=True, key="k")
    # The other limit, on requests that read all weights, was 300 seconds unless given; the longer one holds for both.
    sync = WeightSyncConfig(update_weight_timeout=300.0, update_weight_pause_mode="in_place")
    assert old.spec == ChannelSpec(urls, sync=sync, tp_size=2, colocate=True, key="k")
    with pytest.warns(DeprecationWarning):
        both = TensorWeightChannel(urls, timeout=3.0, load_timeout=5.0)
    assert both.spec.sync == WeightSyncConfig(update_weight_timeout=5.0)
    assert pickle.loads(pickle.dumps(old)).spec == old.spec
    with pytest.warns(DeprecationWarning):
        deltas = DeltaWeightChannel(urls, directory="d", keep_files=True, receivers=["http://r"])
    sync = WeightSyncConfig(update_weight_disk_dir="d", update_weight_disk_keep_files=True)
    assert deltas.spec == ChannelSpec(urls, sync=sync, receivers=("http://r",))
    sync = WeightSyncConfig(update_weight_transport="tensor")
    with pytest.warns(DeprecationWarning, match="open_channel is now ChannelSpec"):
        assert open_channel(sync, engine_urls=urls, tp_size=1, hf_checkpoint="hf").spec.hf_checkpoint == "hf"
    with pytest.raises(TypeError):
        TensorWeightChannel(ChannelSpec(urls), 2)
