"""The command ``slime-rollout receive-weights``."""

import os
import signal
import subprocess
import sys

import pytest

from slime_core.types import WeightUpdate
from slime_rollout.cli import main
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.http import HttpError, call
from slime_rollout.weights import DeltaWeightChannel
from slime_rollout.weights.checkpoint import CheckpointReader, tensor_checksum

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.fixture
def words(tmp_path, source, hf_checkpoint):
    return ["--from", str(source), "--to", str(tmp_path / "local"), "--hf-checkpoint", str(hf_checkpoint)]


@pytest.fixture
def listen(words):
    """Start the command, with a program that prepares the process; returns it and its address."""
    started = []

    def listen(prepare="", where="127.0.0.1:0", key=None, said=None):
        program = f"import sys; {prepare}from slime_rollout.cli import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", program, "receive-weights", *words, "--listen", where]
        env = os.environ if key is None else os.environ | {"SLIME_API_KEY": key}
        pipes = {"stdout": subprocess.PIPE, "stderr": said or None}
        started.append(subprocess.Popen(command, env=env, text=True, **pipes))
        return started[-1], started[-1].stdout.readline().split()[-1]

    yield listen
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def push(engines, source, hf_checkpoint, first, step):
    """Send one version to a receiver."""

    def push(url, key="of-the-run"):
        urls = tuple(engine.url for engine in engines)
        channel = DeltaWeightChannel(
            ChannelSpec(
                urls,
                hf_checkpoint=str(hf_checkpoint),
                receivers=(url,),
                key=key,
                sync=WeightSyncConfig(update_weight_disk_dir=str(source), check_weight_update_equal=False),
            )
        )
        channel.begin(WeightUpdate(version=1))
        channel.send(list(step(first, 1).items()))
        channel.end()

    return push


def test_a_trainer_updates_its_engines_through_a_receiver_that_listens(
    listen, push, words, engines, first, step, tmp_path
):
    listening, url = listen()
    command = [sys.executable, "-m", "slime_rollout", "receive-weights", *words, "--listen", "127.0.0.1:0"]
    second = subprocess.run(command, timeout=240, check=False, capture_output=True, text=True)
    assert (second.returncode, second.stderr.count("another receiver writes to")) == (2, 1)
    push(url)
    path = tmp_path / "local" / "weight_v000001"
    reader = CheckpointReader(path)
    found = {name: tensor_checksum(reader.read(name)) for name in reader.names}
    assert found == {name: tensor_checksum(tensor) for name, tensor in (first | step(first, 1)).items()}
    assert [engine.version for engine in engines] == ["1", "1"]
    with pytest.raises(HttpError, match="not the key of the run that publishes"):
        call("POST", f"{url}/pull", {"version": 1})
    assert call("POST", f"{url}/pull", {"version": 1}, key="of-the-run")["path"] == str(path)
    listening.send_signal(signal.SIGINT)
    assert listening.wait(120) == 130


def test_it_listens_on_ipv6_and_takes_its_key_from_the_environment(listen):
    _, url = listen(where="[::1]:0", key="of-the-run")
    assert url.startswith("http://[::1]:")
    for key, status in ((None, 401), ("of-the-run", 409)):  # nothing is published yet
        with pytest.raises(HttpError) as caught:
            call("POST", f"{url}/pull", {"version": 1}, key=key)
        assert caught.value.status == status


def test_an_empty_key_is_none_and_is_warned_of(listen, push, tmp_path):
    with (tmp_path / "said").open("w") as said:
        _, url = listen(key="", said=said)
    push(url, key=None)
    assert call("POST", f"{url}/pull", {"version": 1})["path"]
    assert "SLIME_API_KEY is empty: whoever reaches --listen" in (tmp_path / "said").read_text()


def test_a_full_disk_is_an_error_that_names_the_file_and_nothing_is_left(listen, push, tmp_path):
    small = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); "
    _, url = listen(small)
    with pytest.raises(WeightSyncError, match=r"HTTP 409: .*model-00001.safetensors cannot be written: ") as caught:
        push(url)
    assert caught.value.url == url and not list((tmp_path / "local").iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--listen", "9000"], "--listen 9000 is not an address; give HOST:PORT, such as 0.0.0.0:9000"),
        (["--listen", "127.0.0.1:65536"], "--listen 127.0.0.1:65536 is not an address"),
        (["--hf-checkpoint", "/nowhere"], "/nowhere holds neither model.safetensors.index.json nor"),
        (["--to", "{source}"], "--to must be another directory than --from"),
        (["--to", "{source}/../{source.name}"], "--to must be another directory than --from"),
        (["--to", "/dev/null/local"], "--to /dev/null/local cannot be used: "),
        (["--from", "/nowhere"], "--from /nowhere is not a directory that this machine sees"),
    ],
)
def test_what_cannot_work_is_said_at_once(words, source, capsys, more, said):
    more = ["--listen", "127.0.0.1:0", *(word.format(source=source) for word in more)]
    assert main(["receive-weights", *words, *more]) == 2
    assert f"slime-rollout: {said}" in capsys.readouterr().err


def test_a_port_that_is_taken_is_named(words, engines, capsys):
    address = engines[0].url.removeprefix("http://")
    assert main(["receive-weights", *words, "--listen", address]) == 2
    assert f"slime-rollout: --listen {address} cannot be used: " in capsys.readouterr().err
