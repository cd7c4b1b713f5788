"""From the flags to the channel that the trainer's rank 0 sends through."""

import dataclasses
import pickle
import types

import pytest

from slime_core.errors import ConfigError
from slime_core.types import WeightUpdate
from slime_launch.flags import parse_train
from slime_launch.processes import Place
from slime_launch.trainers import TrainerGroup, TrainerRank
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.serving_engines import GenerationSpec, ServingEngines, start_receiver
from slime_rollout.weights import DeltaWeightChannel, DiskWeightChannel, DistributedWeightChannel, TensorWeightChannel


def engine_flags(*words):
    command = ["--hf-checkpoint", "hf", "--prompt-data", "p", "--num-rollout", "1", "--colocate", "--load", "l"]
    return parse_train([*command, "--rollout-batch-size", "2", "--n-samples-per-prompt", "2", *words])


def spec(*words, **more):
    return ChannelSpec(("http://127.0.0.1:9",), sync=engine_flags(*words).engine, hf_checkpoint="hf", **more)


DISK = ("--update-weight-transport", "disk", "--update-weight-disk-dir", "d")
TOLD = (*DISK, "--update-weight-mode", "delta", "--update-weight-receivers")
FAR = (*TOLD, "a:9", "b:9")
DELTA = (*DISK, "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", "l")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ((), TensorWeightChannel),
        (("--update-weight-transport", "gloo", "--update-weight-pause-mode", "in_place"), DistributedWeightChannel),
        ((*DISK, "--update-weight-disk-keep-files", "--check-weight-update-equal"), DiskWeightChannel),
        (DELTA, DeltaWeightChannel),
    ],
)
def test_flags_choose_the_channel(words, kind):
    channel = pickle.loads(pickle.dumps(spec(*words, receivers=("http://r",)))).open()
    assert type(channel) is kind
    told = channel.spec.sync
    assert told.update_weight_pause_mode == ("in_place" if "in_place" in words else "retract")
    assert told.check_weight_update_equal == ("--check-weight-update-equal" in words)
    assert told.update_weight_disk_keep_files == ("--update-weight-disk-keep-files" in words)


def test_colocated_tensors_stay_on_their_gpu():
    on_a_gpu = types.SimpleNamespace(is_cuda=True)
    assert spec(colocate=True).open()._stays(on_a_gpu) and not spec().open()._stays(on_a_gpu)


def rollout_spec(*words):
    settings = engine_flags(*words)
    return GenerationSpec(
        engine=settings.engine, rollout=settings.rollout, num_engines=1, num_gpus=1, topology=None,
        dtype="float32", context_length=None, seed=1, log_dir="", flags={},
    )  # fmt: skip


def test_only_deltas_to_engines_here_need_a_receiver(tmp_path):
    shared = ("--update-weight-disk-dir", str(tmp_path / "d"))
    here = (*DELTA, *shared, "--update-weight-local-checkpoint-dir", str(tmp_path))
    for words in ((), DISK, here, (*FAR, *shared)):
        receiver = start_receiver(rollout_spec(*words))
        assert (receiver is not None) == (words == here)
        if receiver is not None:
            receiver.stop()


class Fleet:
    tp_size = 1
    engine_urls = ("http://a:1", "http://b:1", "http://a:2")

    def begin_update(self, *, only_behind):
        return self.engine_urls[only_behind:]

    def confirm_update(self, version):
        self.version = version


def host(spec):
    engines = ServingEngines(spec)
    engines._fleet = Fleet()
    return engines


def test_each_engine_gets_deltas_from_the_receiver_on_its_machine():
    given = host(rollout_spec(*FAR))
    assert given.begin_update().receivers == ("http://a:9", "http://b:9", "http://a:9")
    behind = given.begin_update(only_behind=True)
    assert behind.receivers == ("http://b:9", "http://a:9")
    assert behind.open().spec == behind
    assert host(rollout_spec(*TOLD, "c:9")).begin_update(only_behind=True).receivers == ("http://c:9",) * 2
    with pytest.raises(ConfigError, match=r"b:8 c:9 has 0 on the machine of http://a:2; give one on each, .*: a:PORT"):
        host(rollout_spec(*TOLD, "b:8", "c:9")).begin_update(only_behind=True)


def test_requests_before_amid_and_after_an_update_in_place_share_no_cached_prefixes():
    given = host(rollout_spec("--update-weight-pause-mode", "in_place"))
    names = [given.namespace()]
    given.begin_update()
    names.append(given.namespace())
    given.confirm_update(3)
    names.append(given.namespace())
    assert len(set(names)) == 3 and given._fleet.version == 3


def test_cached_prefixes_are_kept_where_no_engine_is_behind():
    given = host(rollout_spec("--update-weight-pause-mode", "in_place"))
    before = given.namespace()
    given._fleet.engine_urls = ()
    assert given.begin_update(only_behind=True).engine_urls == ()
    assert given.namespace() == before


def test_a_channel_to_engines_that_are_others_now_is_closed_first():
    class Sender:
        def push(self, update, channel, senders):
            return channel

    rank = TrainerRank.__new__(TrainerRank)
    rank.held, rank._channel, rank._rank = Sender(), None, 2

    def push(version, spec):
        return rank.push(WeightUpdate(version=version), {2: spec})

    first = push(1, spec())
    assert push(2, spec()) is first
    closed = []
    first.close = lambda: closed.append(True)
    other = push(3, dataclasses.replace(spec(), engine_urls=("http://f",)))
    assert closed and other.spec.engine_urls == ("http://f",)
    assert rank.push(WeightUpdate(version=4), {0: spec()}) is None  # which is not its to send


def test_all_ranks_are_told_which_of_them_send_and_where(monkeypatch):
    monkeypatch.setattr("slime_launch.trainers.live_nodes", lambda: {"a": "10.0.0.1", "b": "10.0.0.2"})
    trainers, asked = TrainerGroup.__new__(TrainerGroup), []

    def start_on_all(ranks, method, *given):
        asked.append((method, *given))
        return types.SimpleNamespace(wait=lambda on_poll: ["the first rank's"])

    monkeypatch.setattr("slime_launch.trainers.start_on_all", start_on_all)
    places = [None if node is None else Place(node, None) for node in ("a", None, "b")]
    trainers._ranks, trainers._workers = (
        [],
        [types.SimpleNamespace(place=lambda place=place: place) for place in places],
    )
    urls = ("http://10.0.0.2:2", "http://10.0.0.1:1")
    given = dataclasses.replace(spec("--update-weight-transport", "tensor"), engine_urls=urls)
    assert trainers.push_weights(given, 7, on_poll=None) == "the first rank's"
    [(method, update, channels)] = asked
    assert (method, update.version) == (TrainerRank.push, 7)
    assert {rank: each.engine_urls for rank, each in channels.items()} == {0: urls[1:], 2: urls[:1]}
