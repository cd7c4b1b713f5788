"""Engines that follow what is published, and the command that has them do so."""

import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

from slime_core.errors import DamagedError, IntegrityError
from slime_core.integrity import tensor_checksum
from slime_rollout.cli import main
from slime_rollout.engine.errors import WeightSyncError
from slime_rollout.http import call
from slime_rollout.weights import DeltaWeightChannel, Follower, LocalCheckpoint, follow
from slime_rollout.weights.checkpoint import CheckpointReader
from slime_rollout.weights.control import Engines
from slime_rollout.weights.follow import Patience
from slime_rollout.weights.publication import newest_version

pytestmark = pytest.mark.timeout(120)

# A publisher; and receivers, each killed at another one of the calls that change the disk, and then started once more.
# They are forked, for it takes long to import torch.
PUBLISHER = """
import sys, torch
from safetensors.torch import load_file, save_file
from slime_rollout.weights import DeltaWeightChannel
source, hf_checkpoint, whole = sys.argv[1:]
channel = DeltaWeightChannel((), directory=source, hf_checkpoint=hf_checkpoint)
weights = load_file(hf_checkpoint + "/model.safetensors")
for version in (1, 2, 3):
    torch.manual_seed(version)
    channel.begin(version)
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
from slime_rollout.cli import main
from slime_rollout.weights import LocalCheckpoint, checkpoint, verify_checkpoint
from slime_rollout.weights import local
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
    local.FILE_BYTES = 20_000
    words = ["--from", str(source), "--to", str(directory), "--hf-checkpoint", str(hf_checkpoint)]
    os._exit(main(["receive-weights", *words, "--once"]))

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
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def publish(source, hf_checkpoint, first, step):
    """Publish the next version; returns all versions' weights."""
    channel = DeltaWeightChannel((), directory=str(source), hf_checkpoint=str(hf_checkpoint), check=True)
    layers = [first]

    def publish():
        version = len(layers)
        layers.append(step(layers[-1], version))
        channel.begin(version)
        channel.send(list(layers[-1].items()))
        channel.end()
        return layers

    return publish


@pytest.fixture
def follower(tmp_path, source, hf_checkpoint, engines):
    checkpoint = LocalCheckpoint(tmp_path / "local", hf_checkpoint, source)
    return Follower(checkpoint, source, tuple(engine.url for engine in engines), pause_mode="in_place")


@pytest.fixture
def words(tmp_path, source, hf_checkpoint):
    return ["--from", str(source), "--to", str(tmp_path / "local"), "--hf-checkpoint", str(hf_checkpoint)]


def loads(engine):
    return [body["model_path"].rpartition("/")[2] for path, body in engine.asked if path.endswith("_from_disk")]


def assert_holds(path, layers):
    expected = {name: tensor for layer in layers for name, tensor in layer.items()}
    reader = CheckpointReader(path)
    found = {name: tensor_checksum(reader.read(name)) for name in reader.names}
    assert found == {name: tensor_checksum(tensor) for name, tensor in expected.items()}


def test_engines_follow_what_is_published(publish, follower, engines):
    assert follower.step() is None
    layers = publish()
    assert follower.step().version == 1
    assert follower.step() is None
    publish()
    publish()
    assert_holds(follower.step().path, layers)
    for engine in engines:
        assert loads(engine) == ["weight_v000001", "weight_v000003"] and engine.version == "3"
        assert engine.asked[0] == ("/pause_generation", {"mode": "in_place"})
        assert engine.paths()[-1] == "/continue_generation"


def test_an_engine_that_was_started_anew_loads_the_version_again(publish, follower, engines):
    publish()
    follower.step()
    engines[1].version = "default"
    assert follower.step().version == 1
    assert [len(loads(engine)) for engine in engines] == [1, 2]


def test_an_engine_that_refuses_is_named_and_the_next_step_repairs_it(publish, follower, engines):
    publish()
    engines[0].refuse["/update_weights_from_disk"] = "no room"
    for _ in range(2):
        with pytest.raises(WeightSyncError, match=r"weight version 1: .*no room") as caught:
            follower.step()
        assert caught.value.url == engines[0].url
        assert [engine.version for engine in engines] == ["incomplete", "1"]
    del engines[0].refuse["/update_weights_from_disk"]
    assert follower.step().version == 1
    assert [engine.version for engine in engines] == ["1", "1"] and len(loads(engines[1])) == 1


@pytest.fixture
def hang(engines, monkeypatch):
    """Engines that load nothing until the event of theirs is set; nobody waits for them for long."""
    monkeypatch.setattr(follow, "LATE_SECONDS", 0.3)
    events = [threading.Event() for _ in engines]

    def hang(*numbers):
        for number in numbers:
            engines[number].hold["/update_weights_from_disk"] = events[number]
        return events

    yield hang
    for event in events:
        event.set()


def test_an_engine_that_hangs_keeps_no_other_from_the_new_version(publish, follower, engines, hang, tmp_path):
    publish()
    (event, _) = hang(0)
    assert follower.step().version == 1 and follower.late == (engines[0].url,)
    for version in (2, 3):
        publish()
        assert follower.step().version == version and follower.late == (engines[0].url,)
        assert [engine.version for engine in engines] == ["incomplete", str(version)]
        # It may yet read the copy that it was told of.
        assert {path.name for path in (tmp_path / "local").iterdir()} == {"weight_v000001", f"weight_v00000{version}"}
    event.set()
    assert follower.step(wait_for_all=True).version == 3 and follower.late == ()
    assert [engine.version for engine in engines] == ["3", "3"]
    assert loads(engines[0]) == ["weight_v000001", "weight_v000003"]
    assert follower.step() is None
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["weight_v000003"]


def test_engines_that_hang_with_different_versions_do_not_fill_the_disk(
    publish, source, hf_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "LATE_SECONDS", 0.1)
    hang = {}
    monkeypatch.setattr(Follower, "_update", lambda self, url, local: url not in hang or hang[url].wait(60))
    checkpoint = LocalCheckpoint(tmp_path / "local", hf_checkpoint, source)
    follower = Follower(checkpoint, source, ("a", "b", "c"))
    try:
        for late in ("a", "b"):
            hang[late] = threading.Event()
            publish()
            follower.step()
        for _ in (3, 4):
            publish()
            follower.step()
            copies = sorted(path.name for path in (tmp_path / "local").iterdir())
            assert copies == ["weight_v000001", "weight_v000002", "weight_v000003"]
        hang["a"].set()
        deadline = time.monotonic() + 60
        while checkpoint.current.version != 4:
            assert time.monotonic() < deadline
            follower.step()
        assert follower.late == ("b",)
    finally:
        for event in hang.values():
            event.set()


def test_an_engine_that_failed_is_told_until_it_has_a_version(publish, follower, engines, hang):
    publish()
    engines[0].refuse["/update_weights_from_disk"] = "no room"
    with pytest.raises(WeightSyncError, match="no room"):
        follower.step()
    hang(0)
    publish()
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="no room"):
            follower.step()
        assert follower.late == (engines[0].url,) and engines[1].version == "2"
    del engines[0].refuse["/update_weights_from_disk"]
    hang()[0].set()
    assert follower.step(wait_for_all=True).version == 2
    assert [engine.version for engine in engines] == ["2", "2"]


def test_with_once_the_command_waits_for_all(publish, words, engines, hang, tmp_path, monkeypatch, capsys):
    publish()
    event = hang(0)[0]
    monkeypatch.setattr(follow, "LATE_SECONDS", 0.0)

    def go_on():
        deadline = time.monotonic() + 60
        while engines[1].version != "1" and time.monotonic() < deadline:
            time.sleep(0.01)
        event.set()

    other = threading.Thread(target=go_on)
    other.start()
    assert main(["receive-weights", *words, "--once", "--url", engines[0].url, "--url", engines[1].url]) == 0
    other.join()
    path = tmp_path / "local" / "weight_v000001"
    assert capsys.readouterr().out == f"weight version 1 is in {path}, and in {engines[0].url}, {engines[1].url}\n"
    assert [engine.version for engine in engines] == ["1", "1"]


def test_the_command_says_who_is_late(publish, words, engines, hang, tmp_path):
    publish()
    event = hang(0)[0]
    urls = [word for engine in engines for word in ("--url", engine.url)]
    command = [sys.executable, "-m", "slime_rollout", "receive-weights", *words, *urls]
    program = "import sys; from slime_rollout.weights import follow; follow.LATE_SECONDS = 0.3; "
    program += "from slime_rollout.cli import main; sys.exit(main(sys.argv[1:]))"
    following = subprocess.Popen([sys.executable, "-c", program, *command[3:]], stdout=subprocess.PIPE, text=True)
    try:
        path = tmp_path / "local" / "weight_v000001"
        line = f"weight version 1 is in {path}, and in {engines[1].url}; not waiting for {engines[0].url}\n"
        assert following.stdout.readline() == line
        event.set()
        assert following.stdout.readline() == f"weight version 1 is in {path}, and in {urls[1]}, {urls[3]}\n"
    finally:
        following.kill()
        following.wait()
        following.stdout.close()


def test_the_same_number_with_other_weights_is_loaded(publish, follower, engines, source, hf_checkpoint, first, step):
    publish()
    publish()
    follower.step()
    other = DeltaWeightChannel((), directory=str(source), hf_checkpoint=str(hf_checkpoint), keep_files=True)
    other.begin(1)  # a run that went back to an earlier checkpoint
    other.send(list(step(first, 9).items()))
    other.end()
    assert newest_version(source) == 1
    local = follower.step()
    assert_holds(local.path, [first, step(first, 9)])
    assert [engine.version for engine in engines] == ["1", "1"]


def test_a_version_that_goes_when_the_next_one_comes_is_no_error(publish, follower, source, monkeypatch):
    publish()
    pulled, pull = [], LocalCheckpoint.pull

    def gone(checkpoint, version, **more):
        pulled.append(version)
        if version == 1:
            publish()
            raise DamagedError("version 1 is gone")
        return pull(checkpoint, version, **more)

    monkeypatch.setattr(LocalCheckpoint, "pull", gone)
    assert follower.step().version == 2 and pulled == [1, 2]


def test_errors_are_told_once_and_endured_for_a_while(monkeypatch):
    told, now = [], [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    patience = Patience(10.0, told.append)

    def fail_at(seconds, text="gone"):
        now[0] = seconds
        with patience:
            raise DamagedError(text)

    for seconds in (0, 5, 9):
        fail_at(seconds)
    fail_at(9.5, "another")
    assert told == ["gone", "another"] and patience.failures == 4
    with patience:
        pass
    assert patience.failures == 0
    fail_at(15)
    with pytest.raises(DamagedError):
        fail_at(25)
    with pytest.raises(ValueError, match="not ours"), patience:
        raise ValueError("not ours")
    with pytest.raises(IntegrityError), Patience(0.0, told.append):
        raise IntegrityError("at once")


def test_the_command_brings_a_checkpoint_to_the_newest_version(publish, words, tmp_path, engines, capsys):
    publish()
    layers = publish()
    urls = [word for engine in engines for word in ("--url", engine.url + "/")]
    assert main(["receive-weights", *words, "--once", *urls]) == 0
    path = tmp_path / "local" / "weight_v000002"
    assert capsys.readouterr().out == f"weight version 2 is in {path}, and in {urls[1]}, {urls[3]}\n"
    assert_holds(path, layers)
    assert [engine.version for engine in engines] == ["2", "2"]


def test_a_large_model_is_given_its_time(publish, words, engines, monkeypatch, capsys):
    limits, post = {}, Engines.post

    def asked(update, url, path, payload, **more):
        limits[path] = (update.timeout, update.load_timeout)
        return post(update, url, path, payload, **more)

    monkeypatch.setattr(Engines, "post", asked)
    publish()
    assert main(["receive-weights", *words, "--once", "--url", engines[0].url, "--timeout", "900"]) == 0
    assert engines[0].version == "1" and set(limits.values()) == {(900.0, 900.0)}


def test_a_gap_damage_and_a_foreign_base_are_one_clear_line(publish, words, source, hf_checkpoint, capsys, tmp_path):
    def line(*more):
        code = main(["receive-weights", *words, "--once", *more])
        (text,) = capsys.readouterr().err.splitlines()
        return code, text

    assert line() == (
        2,
        f"slime-rollout: {source} holds no deltas; a run with --update-weight-mode delta publishes them",
    )
    for _ in range(3):
        publish()
    data = source / "weight_v000003" / "delta-00001.safetensors"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, text = line()
    assert code == 2 and "model." in text
    data.write_bytes(content)
    (source / "weight_v000002").rename(tmp_path / "aside")
    code, text = line()
    assert code == 2 and "version 3 was made from version 2, and" in text and "send the weights again" in text
    (tmp_path / "aside").rename(source / "weight_v000002")
    model = hf_checkpoint / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    code, text = line()
    assert code == 2 and "the tensor has the checksum" in text and "model." in text
    assert not list((tmp_path / "local").iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--listen", "9000"], "--listen 9000 is no address; give HOST:PORT, such as 0.0.0.0:9000"),
        (["--listen", "127.0.0.1:65536"], "--listen 127.0.0.1:65536 is no address"),
        (["--listen", "127.0.0.1:0", "--hf-checkpoint", "/nowhere"], "/nowhere holds neither"),
        (["--listen", "127.0.0.1:1", "--once"], "--once means nothing with --listen"),
        (["--pause-mode", "in_place"], "--pause-mode is for the engines of --url; give both"),
        (["--timeout", "60"], "--timeout is for the engines of --url; give both"),
        (["--listen", "127.0.0.1:1", "--timeout", "60"], "--timeout means nothing with --listen"),
        (["--url", "http://e", "--timeout", "0"], "--timeout 0 is no time limit; give seconds, above 0"),
        (["--patience", "-1"], "--patience -1 is no time limit"),
        (["--to", "{source}"], "--to must be another directory than --from"),
        (["--to", "{source}/../{source.name}"], "--to must be another directory than --from"),
        (["--to", "/dev/null/local"], "--to /dev/null/local cannot be used: "),
        (["--from", "/nowhere"], "--from /nowhere is no directory that this machine sees"),
        (["--hf-checkpoint", "/nowhere"], "/nowhere holds neither model.safetensors.index.json nor"),
    ],
)
def test_what_cannot_work_is_said_at_once(words, source, capsys, more, said):
    assert main(["receive-weights", *words, *(word.format(source=source) for word in more)]) == 2
    assert f"slime-rollout: {said}" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_nothing_is_left(publish, words, tmp_path):
    publish()
    small = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    small += "from slime_rollout.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", small, "receive-weights", *words, "--once"]
    done = subprocess.run(command, timeout=60, check=False, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"slime-rollout: {tmp_path / 'local'}")
    assert "model-00001.safetensors cannot be written: " in line
    assert not list((tmp_path / "local").iterdir())


def test_a_copy_of_a_version_under_another_name_is_none(publish, source):
    publish()
    shutil.copytree(source / "weight_v000001", source / "weight_v000001.bak", copy_function=shutil.copy)
    assert newest_version(source) == 1


def test_a_directory_that_goes_is_no_silence(publish, follower, source):
    publish()
    follower.step()
    shutil.rmtree(source)
    with pytest.raises(DamagedError, match="shared is gone"):
        follower.step()


def test_killed_anywhere_it_goes_on(source, tmp_path, hf_checkpoint):
    """Kill -9 at each single change of the disk; the copy is the full checkpoint then, to the bit."""
    words = [str(source), str(hf_checkpoint), str(tmp_path / "whole.safetensors")]
    subprocess.run([sys.executable, "-c", PUBLISHER, *words], timeout=60, check=True)
    words.append(str(tmp_path / "places"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED_ANYWHERE, *words], timeout=100, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 15


def test_a_trainer_tells_a_receiver_that_listens(words, source, engines, hf_checkpoint, first, step, tmp_path):
    command = [sys.executable, "-m", "slime_rollout", "receive-weights", *words]
    listening = subprocess.Popen([*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        url = listening.stdout.readline().split()[-1]
        second = subprocess.run([*command, "--once"], timeout=60, check=False, capture_output=True, text=True)
        assert (second.returncode, second.stderr.count("another receiver writes to")) == (2, 1)
        channel = DeltaWeightChannel(
            tuple(engine.url for engine in engines),
            directory=str(source),
            hf_checkpoint=str(hf_checkpoint),
            receivers=(url,),
        )
        channel.begin(1)
        channel.send(list(step(first, 1).items()))
        channel.end()
        assert_holds(tmp_path / "local" / "weight_v000001", [first, step(first, 1)])
        assert [engine.version for engine in engines] == ["1", "1"]
        assert call("POST", f"{url}/pull", {"version": 1})["path"] == str(tmp_path / "local" / "weight_v000001")
        listening.send_signal(signal.SIGINT)
        assert listening.wait(20) == 130
    finally:
        listening.kill()
        listening.wait()
        listening.stdout.close()
