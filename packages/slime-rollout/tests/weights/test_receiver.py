"""Deltas from the sender's end to a whole checkpoint at the receiver's, without engines that could load it."""

import contextlib
import dataclasses
import http.client
import os
import pickle
import shutil
import signal
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file

from slime_core.errors import DamagedError, DataError, IntegrityError, WrongBaseError
from slime_core.types import WeightUpdate
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.http import HttpError, call, key_headers
from slime_rollout.weights import DeltaReceiver, DeltaWeightChannel, LocalCheckpoint, verify_checkpoint
from slime_rollout.weights.checkpoint import CheckpointReader, CheckpointWriter, tensor_checksum
from slime_rollout.weights.disk import KEY_FILE, publish_key

KEY = "of-the-run"
KILLED = """
import os, signal, sys
from pathlib import Path
from slime_rollout.weights import LocalCheckpoint, receiver
def killed(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)
receiver.CheckpointWriter.finish = killed
LocalCheckpoint(*map(Path, sys.argv[1:])).pull(1)
"""

# A publisher; and receivers, each killed at another one of the calls that change the disk, and then started once more.
# They are forked, for it takes long to import torch.
PUBLISHER = """
import sys, torch
from safetensors.torch import load_file, save_file
from slime_core.types import WeightUpdate
from slime_rollout.weights import ChannelSpec, DeltaWeightChannel
from slime_rollout.engine.transports import WeightSyncConfig
source, hf_checkpoint, whole = sys.argv[1:]
sync = WeightSyncConfig(update_weight_disk_dir=source)
channel = DeltaWeightChannel(ChannelSpec((), sync=sync, hf_checkpoint=hf_checkpoint))
weights = load_file(hf_checkpoint + "/model.safetensors")
for version in (1, 2, 3):
    torch.manual_seed(version)
    channel.begin(WeightUpdate(version=version))
    for name, tensor in weights.items():
        if name != "model.frozen":
            tensor += (0.1 * torch.randn(tensor.shape) * (torch.rand(tensor.shape) < 0.03)).to(tensor.dtype)
            channel.send([(name, tensor)])
    channel.end()
save_file(weights, whole)
"""
KILLED_ANYWHERE = """
import os, pathlib, shutil, signal, sys, torch
from safetensors.torch import load_file
from slime_rollout.weights import LocalCheckpoint, checkpoint, receiver, verify_checkpoint
source, hf_checkpoint, whole, place = map(pathlib.Path, sys.argv[1:])
expected = load_file(whole)
CHANGES = [(checkpoint, "save_file"), (os, "fsync"), (pathlib.Path, "rename"), (shutil, "rmtree"), (shutil, "copyfile")]

def receive(directory, killed_at):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [killed_at]
    def before(change):
        def changing(*args, **more):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return change(*args, **more)
        return changing
    for owner, name in CHANGES:
        setattr(owner, name, before(getattr(owner, name)))
    receiver.FILE_BYTES = 20_000
    LocalCheckpoint(directory, hf_checkpoint, source).pull(3)
    os._exit(0)

killed = ended = 0
for killed_at in range(1, 100):
    directory = place / f"{killed_at:02}"
    if killed_at % 2:
        LocalCheckpoint(directory, hf_checkpoint, source).pull(1)
    code = receive(directory, killed_at)
    if code == 0:
        ended += 1
        if ended == 2:  # with a copy to begin with, and without
            break
        continue
    assert code == -signal.SIGKILL, code
    killed += 1
    for path in directory.glob("weight_v*"):
        verify_checkpoint(path)  # whole, or not under its name
    assert receive(directory, 0) == 0
    assert [path.name for path in directory.iterdir()] == ["weight_v000003"]
    reader = checkpoint.CheckpointReader(directory / "weight_v000003")
    assert reader.names == expected.keys()
    for name, tensor in expected.items():
        assert reader.read(name).view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name
    if killed_at > 2:
        shutil.rmtree(place / f"{killed_at - 2:02}", ignore_errors=True)
print(killed)
"""


@pytest.fixture
def source(tmp_path):
    return tmp_path / "shared"


@pytest.fixture
def local(tmp_path, hf_checkpoint, source):
    """A receiver that is told nothing; it pulls when a test says so."""
    return LocalCheckpoint(tmp_path / "late", hf_checkpoint, source)


@pytest.fixture
def receiver(tmp_path, hf_checkpoint, source):
    with DeltaReceiver(
        directory=str(tmp_path / "local"), hf_checkpoint=str(hf_checkpoint), source=str(source)
    ) as receiver:
        yield receiver


@pytest.fixture
def channel(engines, receiver, hf_checkpoint, source):
    return DeltaWeightChannel(
        ChannelSpec(
            tuple(engine.url for engine in engines),
            hf_checkpoint=str(hf_checkpoint),
            receivers=(receiver.url,),
            key=KEY,
            sync=WeightSyncConfig(update_weight_disk_dir=str(source)),
        )
    )


def publish(source):
    source.mkdir()
    publish_key(source, KEY)


def push(channel, weights, version):
    channel.begin(WeightUpdate(version=version))
    for item in weights.items():
        channel.send([item])
    return channel.end()


def held(path):
    reader = CheckpointReader(path)
    return {name: reader.read(name) for name in reader.names}


def assert_holds(path, *layers):
    """The checkpoint is the first of the layers, with what the later ones changed, to the bit."""
    expected = {name: tensor for layer in layers for name, tensor in layer.items()}
    found = held(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and tensor_checksum(found[name]) == tensor_checksum(tensor)


@pytest.fixture
def pushed(channel, first, step):
    """Three versions, each made from the one before, published but for the files' removal."""
    layers, weights = [first], first
    for version in (1, 2, 3):
        weights = step(weights, version)
        layers.append(weights)
        push(channel, weights, version)
    return layers


def test_engines_load_what_the_receiver_made_of_the_deltas(channel, engines, tmp_path, first, step):
    one = step(first, 1)
    checksums = push(channel, one, 1)
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in one.items()}
    assert_holds(tmp_path / "local" / "weight_v000001", first, one)
    two = step(one, 2)
    two.pop("model.norm.weight")  # not sent: it stays
    push(channel, two, 2)
    path = tmp_path / "local" / "weight_v000002"
    assert_holds(path, first, one, two)
    assert verify_checkpoint(path)
    assert (path / "tokenizer.json").exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["weight_v000002"]
    for engine in engines:
        loads = [body["model_path"] for asked, body in engine.asked if asked == "/update_weights_from_disk"]
        assert loads[-1] == str(path) and engine.version == "2"


def test_only_what_changed_is_sent(channel, source, first):
    weights = {"model.embed_tokens.weight": first["model.embed_tokens.weight"].clone().repeat(1, 1)}
    big = {"big": torch.randn(300, 300)}
    push(channel, {**weights, **big}, 1)
    big["big"][7, 11] += 1
    push(channel, {**weights, **big}, 2)
    sizes = [sum(file.stat().st_size for file in (source / f"weight_v00000{v}").iterdir()) for v in (1, 2)]
    assert sizes[0] > 300_000 and sizes[1] < 3_000


def test_a_receiver_that_missed_versions_applies_them_in_order(pushed, local):
    assert_holds(local.pull(2).path, *pushed[:3])
    assert_holds(local.pull(3).path, *pushed)


def test_a_receiver_goes_through_all_versions_at_once(pushed, local):
    found = local.pull(3)
    assert_holds(found.path, *pushed)
    assert found.checksums == {name: tensor_checksum(tensor) for name, tensor in pushed[3].items()}
    assert local.pull(3) == found


def test_many_versions_at_once_are_written_once(pushed, local, monkeypatch):
    finished, finish = [], CheckpointWriter.finish
    monkeypatch.setattr(
        CheckpointWriter, "finish", lambda writer, **about: finished.append(finish(writer, **about)) or finished[-1]
    )
    assert finished == [local.pull(3).path]


def test_another_process_goes_on_with_the_copy_that_is_there(pushed, local, tmp_path, hf_checkpoint, source):
    one = local.pull(1)
    shutil.rmtree(source / "weight_v000001")
    again = LocalCheckpoint(tmp_path / "late", hf_checkpoint, source)
    assert again.current == one
    found = again.pull(3)
    assert_holds(found.path, *pushed)
    assert LocalCheckpoint(tmp_path / "late", hf_checkpoint, source).pull(3) == found


def test_a_copy_of_another_first_checkpoint_is_not_gone_on_with(pushed, local, tmp_path, hf_checkpoint, source):
    local.pull(3)
    other = tmp_path / "other"
    shutil.copytree(hf_checkpoint, other)
    assert LocalCheckpoint(tmp_path / "late", other, source).current.version is None
    assert not list((tmp_path / "late").iterdir())


@pytest.mark.parametrize("name", ["model.frozen", "model.norm.weight"])  # one that is never sent, and one that is
@pytest.mark.parametrize(("version", "killed"), [(1, True), (3, True), (3, False)])
def test_a_copy_that_was_altered_is_made_anew(
    channel, local, tmp_path, hf_checkpoint, source, first, step, name, version, killed
):
    layers = [first]
    for number in (1, 2, 3):
        layers.append(step(layers[-1], number))
        push(channel, layers[-1], number)
    path = local.pull(version).path
    if killed:
        local = LocalCheckpoint(tmp_path / "late", hf_checkpoint, source)
    else:
        layers.append(step(layers[-1], 4))
        push(channel, layers[-1], 4)
    tensors = held(path)
    tensors[name].view(-1)[:1] += 1
    save_file(tensors, path / "model-00001.safetensors")
    assert_holds(local.pull(len(layers) - 1).path, *layers)


def test_dtypes_and_names_that_the_first_checkpoint_has_not(channel, tmp_path, first):
    sent = {
        "model.norm.weight": torch.full((8,), 1.25),  # bfloat16 there
        "model.embed_tokens.weight": first["model.embed_tokens.weight"].bfloat16(),
        "lm_head.weight": torch.ones(4, 3).t(),
        "nan": torch.tensor([float("nan"), -0.0]),
        "empty": torch.zeros(0, 2),
    }
    push(channel, sent, 1)
    assert_holds(tmp_path / "local" / "weight_v000001", first, sent)


def test_a_flipped_byte_of_a_delta_is_an_error_and_nothing_is_left(pushed, local, source):
    local.pull(1)
    file = source / "weight_v000002" / "deltas.bin"
    content = file.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 4
        file.write_bytes(flipped)
        with pytest.raises(IntegrityError):
            local.pull(3)
        assert local.current.version == 1
        assert [entry.name for entry in local.current.path.parent.iterdir()] == ["weight_v000001"]
    file.write_bytes(content)
    assert_holds(local.pull(3).path, *pushed)


def test_a_flipped_byte_of_an_index_is_an_error(pushed, local, source):
    index = source / "weight_v000003" / "index.json"
    content = bytearray(index.read_bytes())
    content[60] ^= 1
    index.write_bytes(content)
    with pytest.raises(DamagedError, match=r"index\.json is damaged; publish version 3 again"):
        local.pull(3)


def test_a_missing_version_is_an_error(pushed, local, source):
    with pytest.raises(DamagedError, match=r"weight_v000009.index\.json cannot be read"):
        local.pull(9)
    shutil.rmtree(source / "weight_v000002")
    with pytest.raises(
        DamagedError,
        match=r"version 3 was made from version 2, and .*weight_v000002.index\.json cannot be read: .*; send the w",
    ):
        local.pull(3)


def test_a_version_of_another_run_is_no_base(pushed, local, source, channel, first, step):
    """Version 2 stands there with other contents than those that version 3 was made from."""
    kept = source.parent / "kept"
    shutil.copytree(source / "weight_v000003", kept)
    channel.close()
    push(channel, step(first, 77), 2)
    shutil.rmtree(source / "weight_v000003", ignore_errors=True)
    shutil.copytree(kept, source / "weight_v000003")
    with pytest.raises(WrongBaseError, match="version 3 was made from another version 2"):
        local.pull(3)


def test_another_first_checkpoint_is_no_base(pushed, tmp_path, source, first):
    other = tmp_path / "other"
    other.mkdir()
    save_file({name: tensor + 1 for name, tensor in first.items()}, other / "model.safetensors")
    with pytest.raises(WrongBaseError, match=r"model\.\w+"):
        LocalCheckpoint(tmp_path / "late", other, source).pull(1)
    assert not list((tmp_path / "late").iterdir())


def test_a_receiver_whose_version_is_gone_begins_anew(pushed, channel, local, first, step):
    """A new process at the sender's end knows no last version: deltas go back to the first checkpoint."""
    local.pull(3)
    fresh = pickle.loads(pickle.dumps(channel))
    four = step(pushed[3], 4)
    push(fresh, four, 4)
    assert_holds(local.pull(4).path, first, four)


def test_the_same_number_with_other_weights_is_another_version(pushed, channel, local, first, step):
    local.pull(3)
    other = step(first, 55)
    push(channel, other, 3)
    assert_holds(local.pull(3).path, first, other)


def test_a_receiver_that_is_killed_leaves_no_half_version(pushed, tmp_path, hf_checkpoint, source):
    directory = tmp_path / "late"
    command = [sys.executable, "-c", KILLED, str(directory), str(hf_checkpoint), str(source)]
    ended = subprocess.run(command, timeout=200, check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    assert [entry.name.split(".")[:2] for entry in directory.iterdir()] == [["", "weight_v000001"]]
    assert_holds(LocalCheckpoint(directory, hf_checkpoint, source).pull(2).path, *pushed[:3])
    assert [entry.name for entry in directory.iterdir()] == ["weight_v000002"]


def test_a_chain_longer_than_the_model_begins_anew_and_the_old_files_go(channel, source, tmp_path, hf_checkpoint):
    """Random weights: every delta is about as large as the model."""
    for version in range(1, 4):
        weights = {"big": torch.randn(50, 50, generator=torch.Generator().manual_seed(version))}
        push(channel, weights, version)
    kept = sorted(path.name for path in source.iterdir())
    assert kept == [KEY_FILE, "weight_v000003"]
    late = LocalCheckpoint(tmp_path / "late", hf_checkpoint, source)
    assert CheckpointReader(late.pull(3).path).read("big").equal(weights["big"])


def test_a_receivers_error_reaches_the_sender_and_engines_stay_as_they_are(
    channel, engines, receiver, tmp_path, first, step
):
    push(channel, first, 1)
    other = tmp_path / "other"
    other.mkdir()
    save_file({name: tensor + 1 for name, tensor in first.items()}, other / "model.safetensors")
    channel = DeltaWeightChannel(dataclasses.replace(channel.spec, hf_checkpoint=str(other)))
    with pytest.raises(WeightSyncError, match=r"/pull: HTTP 409: .*WrongBaseError") as caught:
        push(channel, step(first, 2), 2)
    assert caught.value.url == receiver.url
    assert [engine.version for engine in engines] == ["1", "1"]
    assert engines[0].paths().count("/pause_generation") == 1


@pytest.mark.parametrize("asked", [{}, {"version": "x"}, [1]])
def test_a_receiver_says_what_it_wants_to_be_asked(receiver, source, asked):
    publish(source)
    with pytest.raises(HttpError, match="POST /pull") as caught:
        call("POST", receiver.url + "/pull", asked, key=KEY)
    assert caught.value.status == 400


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "x"}, 400),
        ({"Content-Length": "400000000"}, 400),
        ({"Content-Length": "14", "Origin": "http://a.page"}, 403),
        ({"Content-Length": "14"}, 409),  # no such version
    ],
)
def test_a_request_is_small_and_comes_from_no_page(receiver, source, headers, status):
    """A request that announced 400 MB was read, and one from any page of a browser on this machine."""
    publish(source)
    where = urlsplit(receiver.url)
    with contextlib.closing(http.client.HTTPConnection(where.hostname, where.port, timeout=20)) as connection:
        connection.putrequest("POST", "/pull")
        for name, value in (headers | key_headers(KEY)).items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(b'{"version": 7}')
        answer = connection.getresponse()
        assert answer.status == status and answer.read()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_only_whoever_has_the_key_can_ask(engines, hf_checkpoint, source, tmp_path, first, host):
    where = {"directory": str(tmp_path / "local"), "hf_checkpoint": str(hf_checkpoint), "source": str(source)}
    with DeltaReceiver(**where, host=host, key="of-the-run") as receiver:
        for key in (None, "another", "of-the-run-"):
            with pytest.raises(HttpError, match=r"give the run the key .* SLIME_API_KEY") as caught:
                call("POST", receiver.url + "/pull", {"version": 1}, key=key)
            assert caught.value.status == 401
        channel = DeltaWeightChannel(
            ChannelSpec(
                (engines[0].url,),
                hf_checkpoint=str(hf_checkpoint),
                receivers=(receiver.url,),
                key="of-the-run",
                sync=WeightSyncConfig(update_weight_disk_dir=str(source)),
            )
        )
        push(channel, first, 1)
    assert_holds(tmp_path / "local" / "weight_v000001", first)


def test_by_default_only_the_run_that_publishes_can_ask(channel, receiver, source, tmp_path, first):
    """Whoever reached the port could ask, unless somebody had set a key on both sides."""
    keys = (None, "", "another", KEY[:-1], KEY)

    def statuses(version=1):
        found = []
        for key in keys:
            try:
                call("POST", receiver.url + "/pull", {"version": version}, key=key)
                found.append(200)
            except HttpError as error:
                found.append(error.status)
        return found

    assert statuses() == [401] * 5  # nobody has published anything
    push(channel, first, 1)
    assert statuses() == [401] * 4 + [200]
    assert_holds(tmp_path / "local" / "weight_v000001", first)
    published = source / KEY_FILE
    assert KEY not in published.read_text()
    push(
        DeltaWeightChannel(dataclasses.replace(channel.spec, key="another")), first, 2
    )  # a run that goes on has another key
    assert statuses(version=2) == [401, 401, 200, 401, 401]
    for damage in ("", "no hash", "a b c", "é " * 50, "x" * 10_000):
        published.write_text(damage)
        assert statuses() == [401] * 5
    published.unlink()
    os.mkfifo(published)
    assert statuses() == [401] * 5
    with pytest.raises(HttpError, match=r"not the key of the run that publishes in the receiver's --from"):
        call("POST", receiver.url + "/pull", {"version": 1}, key=KEY)


def test_no_key_is_asked_for_where_that_is_said(hf_checkpoint, source, tmp_path, channel, first):
    push(channel, first, 1)
    where = {"directory": str(tmp_path / "other"), "hf_checkpoint": str(hf_checkpoint), "source": str(source)}
    with DeltaReceiver(**where, key="") as receiver:
        assert call("POST", receiver.url + "/pull", {"version": 1})["checksums"]


def test_checksums_that_are_not_the_senders_are_an_error(engines, first, hf_checkpoint, source):
    lying = engines[1]
    lying.answers["/pull"] = {"path": "/somewhere", "checksums": dict.fromkeys(first, "0")}
    channel = DeltaWeightChannel(
        ChannelSpec(
            (engines[0].url,),
            hf_checkpoint=str(hf_checkpoint),
            receivers=(lying.url,),
            sync=WeightSyncConfig(update_weight_disk_dir=str(source)),
        )
    )
    with pytest.raises(WeightSyncError, match="of 6 tensors, 6 differ") as caught:
        push(channel, first, 1)
    assert caught.value.url == lying.url and engines[0].version == "0"


@pytest.mark.parametrize("answer", [{}, [], "ok", None, {"path": "/x"}, {"path": "/x", "checksums": 7}])
def test_what_is_no_receivers_answer_is_an_error_that_names_it(engines, first, hf_checkpoint, source, answer):
    engines[1].answers["/pull"] = answer
    other = (engines[1].url,)
    channel = DeltaWeightChannel(
        ChannelSpec(
            (engines[0].url,),
            hf_checkpoint=str(hf_checkpoint),
            receivers=other,
            sync=WeightSyncConfig(update_weight_disk_dir=str(source)),
        )
    )
    with pytest.raises(WeightSyncError, match=f"{engines[1].url}/pull answered .*not as a receiver does") as caught:
        push(channel, first, 1)
    assert caught.value.url == engines[1].url and engines[0].version == "0"


def test_after_an_error_the_next_version_is_whole(channel, tmp_path, first, step):
    push(channel, first, 1)
    channel.begin(WeightUpdate(version=2))
    channel.send(list(step(first, 2).items()))
    with pytest.raises(DataError, match="was sent twice"):
        channel.send(list(step(first, 2).items()))
    three = step(first, 3)
    push(channel, three, 3)
    assert_holds(tmp_path / "local" / "weight_v000003", first, three)


def test_the_first_checkpoint_is_kept_wherever_it_is(engines, source, tmp_path, hf_checkpoint, first, step):
    kept = tmp_path / "local" / "weight_v000009"
    writer = CheckpointWriter(kept, hf_checkpoint, 9)
    writer.add([(name, tensor) for name, tensor in held(hf_checkpoint).items()])
    writer.finish()
    with DeltaReceiver(directory=str(tmp_path / "local"), hf_checkpoint=str(kept), source=str(source)) as receiver:
        channel = DeltaWeightChannel(
            ChannelSpec(
                (engines[0].url,),
                hf_checkpoint=str(kept),
                receivers=(receiver.url,),
                key=KEY,
                sync=WeightSyncConfig(update_weight_disk_dir=str(source)),
            )
        )
        push(channel, step(first, 1), 1)
    assert sorted(path.name for path in kept.parent.iterdir()) == ["weight_v000001", "weight_v000009"]


def test_receivers_are_one_for_all_or_one_for_each():
    with pytest.raises(WeightSyncError, match="2 receivers for 3 engines"):
        DeltaWeightChannel(ChannelSpec(("http://a", "http://b", "http://c"), receivers=("http://r", "http://s")))


def test_killed_anywhere_it_continues(source, tmp_path, hf_checkpoint):
    """Kill -9 at each single change of the disk; the copy is the full checkpoint then, to the bit."""
    words = [str(source), str(hf_checkpoint), str(tmp_path / "whole.safetensors")]
    subprocess.run([sys.executable, "-c", PUBLISHER, *words], timeout=200, check=True)
    words.append(str(tmp_path / "places"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED_ANYWHERE, *words], timeout=250, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 15
