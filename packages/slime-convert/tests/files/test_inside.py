"""Only regular files are read, and only inside a checkpoint's own directory."""

import json
import os
import socket

import pytest
import torch
from safetensors.torch import save_file

from slime_convert.cli import main
from slime_convert.errors import CheckpointError, HfConfigError
from slime_convert.files import file_inside, read_file, read_json
from support.family_models import tree

LIMIT = 20  # seconds


def test_a_file_and_links_within_the_directory(tmp_path):
    (tmp_path / "a").write_bytes(b"text")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        assert read_file(tmp_path, name, CheckpointError) == b"text"
        assert file_inside(tmp_path, name, CheckpointError) == tmp_path / "a"


def test_a_hub_caches_blobs_belong_to_it(tmp_path):
    """As huggingface_hub lays it out: links from ``snapshots/REVISION`` to ``blobs``."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1f2e", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_bytes(b"text")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    assert read_file(snapshot, "config.json", CheckpointError) == b"text"
    (tmp_path / "other").write_bytes(b"secret")
    (snapshot / "tokenizer.json").symlink_to("../../../other")
    with pytest.raises(CheckpointError, match=r"outside the checkpoint's directory"):
        read_file(snapshot, "tokenizer.json", CheckpointError)


def outside(root):
    (root.parent / "secret").write_bytes(b"secret")
    (root / "a").symlink_to("../secret")


def loop(root):
    (root / "a").symlink_to("a")


def pipe(root):
    os.mkfifo(root / "a")


def device(root):
    (root / "a").symlink_to("/dev/zero")


def directory(root):
    (root / "a").mkdir()


def unix_socket(root):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "a"))


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (outside, "leads to .*/secret, outside the checkpoint's directory .*; copy the file into it"),
        (loop, "cannot read .*/a "),
        (pipe, "is a pipe, not a regular file"),
        (device, "leads to /dev/zero, outside"),
        (directory, "is a directory, not a regular file"),
        (unix_socket, "is a socket, not a regular file"),
        (lambda root: None, r"cannot read .*/a \(No such file or directory\); use a complete copy"),
    ],
)
def test_what_is_refused(tmp_path, make, words):
    (tmp_path / "model").mkdir()
    make(tmp_path / "model")
    with pytest.raises(CheckpointError, match=words):
        read_file(tmp_path / "model", "a", CheckpointError)


@pytest.mark.parametrize("name", ["../a", "/etc/hostname", "b/../../a", "\0"])
def test_names_that_lead_elsewhere(tmp_path, name):
    (tmp_path / "a").touch()
    (tmp_path / "model" / "b").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"outside|cannot read"):
        file_inside(tmp_path / "model", name, CheckpointError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"is not valid JSON .*; do this"),
        ("[" * 10**5, r"is not valid JSON \(maximum recursion.*\); do this"),
        ("[]", "holds a JSON list, not an object; do this"),
        ("9" * 10**5, "is not valid JSON"),
    ],
)
def test_what_is_not_a_json_object(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(HfConfigError, match=words):
        read_json(tmp_path, "a.json", HfConfigError, "do this")


def with_pipe(root, name):
    (root / name).unlink(missing_ok=True)
    os.mkfifo(root / name)


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"])
def test_a_pipe_in_a_model_does_not_stall_a_command(tmp_path, capsys, name):
    model = tmp_path / "model"
    model.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(4, 128)}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with_pipe(model, name)
    before = tree(model)
    for words in (
        ["inspect", model],
        ["verify", model, model],
        ["hf-to-fp8", "--hf-checkpoint", model, "--save", tmp_path / "out"],
        ["hf-to-torch-dist", "--hf-checkpoint", model, "--save", tmp_path / "out"],
    ):
        code = main([str(word) for word in words])
        line = capsys.readouterr().err
        assert (code == 2 and line.count("\n") == 1) or (name == "tokenizer.json" and words[0] in ("inspect", "verify"))
    assert tree(model) == before and not (tmp_path / "out").exists()


@pytest.mark.timeout(LIMIT)
@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json", "__0_0.distcp"])
def test_a_pipe_in_a_checkpoint_does_not_stall_a_command(one_origin, one_converted, tmp_path, capsys, name):
    import shutil

    td = shutil.copytree(one_converted, tmp_path / "td")
    with_pipe(td / "release", name)
    for words in (
        ["inspect", td],
        ["verify", td, one_origin],
        ["torch-dist-to-hf", "--input-dir", td, "--output-dir", tmp_path / "out", "--origin-hf-dir", one_origin],
    ):
        assert main([str(word) for word in words]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["td"]
