import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import slime_convert.gguf
from slime_convert import ModelShape
from slime_convert.cli import main
from slime_convert.convert import hf_to_torch_dist
from slime_convert.hf import HfReader
from slime_convert.torch_dist import TorchDistReader

COMMAND = Path(sys.executable).with_name("slime-convert")


def run(*words, **kwargs):
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=120, **kwargs)


def test_there_and_back_as_a_user_types_it(one_origin, tmp_path):
    flags = ModelShape.from_hf_config(one_origin).to_megatron_flags()
    there = run("hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "td", *flags)
    assert (there.returncode, there.stdout, there.stderr) == (0, "", "")
    words = ["--input-dir", tmp_path / "td", "--output-dir", tmp_path / "hf", "--origin-hf-dir", one_origin]
    back = run("torch-dist-to-hf", *words)
    assert (back.returncode, back.stdout, back.stderr) == (0, "", "")
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    result = run("hf-to-torch-dist", "--hf-checkpoint", tmp_path / "none", "--save", tmp_path / "td")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("slime-convert: cannot read ")
    assert not any(tmp_path.iterdir())


FORK = multiprocessing.get_context("fork")  # a fresh process would import torch for seconds


def wait_at_the_first_weight(words, ready):
    def wait(*_, **__):
        ready.set()
        time.sleep(60)

    HfReader.load = TorchDistReader.load = slime_convert.gguf._load = wait
    sys.exit(main(words))


@contextmanager
def under_way(words):
    """A process that has made its output directory and is about to fill it."""
    ready = FORK.Event()
    process = FORK.Process(target=wait_at_the_first_weight, args=([str(word) for word in words], ready))
    process.start()
    try:
        assert ready.wait(30)
        yield process
    finally:
        process.kill()
        process.join(30)


@pytest.fixture(scope="module")
def commands(one_origin, tmp_path_factory):
    """The words of each command but its output, and the flag that names the output."""
    inputs = tmp_path_factory.mktemp("inputs")
    hf_to_torch_dist(one_origin, inputs / "td")
    (inputs / "a.gguf").touch()
    return {
        "gguf-to-hf": (["gguf-to-hf", "--gguf", inputs / "a.gguf"], "--save"),
        "hf-to-torch-dist": (["hf-to-torch-dist", "--hf-checkpoint", one_origin], "--save"),
        "torch-dist-to-hf": (
            ["torch-dist-to-hf", "--input-dir", inputs / "td", "--origin-hf-dir", one_origin],
            "--output-dir",
        ),
        "megatron-to-hf": (["megatron-to-hf", "--load", inputs / "td", "--hf-checkpoint", one_origin], "--output-dir"),
    }


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("gguf-to-hf", signal.SIGTERM),
        ("hf-to-torch-dist", signal.SIGINT),
        ("torch-dist-to-hf", signal.SIGHUP),
        ("megatron-to-hf", signal.SIGTERM),
    ],
)
def test_a_stop_leaves_what_the_next_run_continues(commands, tmp_path, capfd, name, stop):
    words, output = commands[name]
    with under_way([*words, output, tmp_path / "out"]) as process:
        assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
        os.kill(process.pid, stop)
        process.join(30)
        assert process.exitcode == 130
    partial = tmp_path / ".out.partial"
    told = f"slime-convert: interrupted; run the same command again to continue, or delete {partial}\n"
    assert capfd.readouterr().err == told
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]


def test_a_second_interrupt_does_not_keep_the_earlier_output_from_coming_back(tmp_path, monkeypatch):
    rename, renamed = Path.rename, []

    def interrupted(self, target):
        renamed.append(self.name)
        if self.name == "output":
            signal.raise_signal(signal.SIGTERM)
        elif self.name == ".hf.old":
            signal.raise_signal(signal.SIGINT)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    monkeypatch.setattr("slime_convert.gguf._load", lambda *_: (None, SimpleNamespace(save_pretrained=lambda _: None)))
    monkeypatch.setattr("slime_convert.gguf._weights", lambda *_: {})
    monkeypatch.setattr("slime_convert.gguf._save_settings", lambda *_: None)
    (tmp_path / "a.gguf").touch()
    (tmp_path / "out" / "hf").mkdir(parents=True)
    (tmp_path / "out" / "hf" / "config.json").write_text("old")
    assert main(["gguf-to-hf", "--gguf", str(tmp_path), "--save", str(tmp_path / "out" / "hf"), "--force"]) == 130
    assert renamed == ["record", "hf", "output", ".hf.old"]
    assert (tmp_path / "out" / "hf" / "config.json").read_text() == "old"
    with pytest.raises(KeyboardInterrupt):  # the caller's own handling is back
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    "words",
    [
        ["hf-to-torch-dist", "--save", "out", "--hf-checkpoint"],
        ["torch-dist-to-hf", "--input-dir", "in", "--output-dir", "out", "--origin-hf-dir"],
        ["megatron-to-hf", "--load", "in", "--output-dir", "out", "--origin-hf-dir"],
    ],
    ids=lambda words: words[0],
)
def test_the_likely_mistakes_are_told_before_torch_is_imported(one_origin, words):
    code = (
        "import sys; from slime_convert.cli import main; code = main(sys.argv[1:]); print(code, 'torch' in sys.modules)"
    )
    words = [*words, one_origin, "--num-layers", "9"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 False\n" and "--num-layers 9" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["hf-to-torch-dist", "--save", "x"], "required: --hf-checkpoint"),
        (
            ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--num-layer", "2"],
            "unrecognized arguments: --num-layer 2; did you mean --num-layers?",
        ),
        (["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--zzzz=1"], "arguments: --zzzz=1; see"),
        (
            ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--num-layers", "two"],
            "invalid int value: 'two'",
        ),
        (
            ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--make-vocab-size-divisible-by", "0"],
            "'0' must be a whole number of 1 or more",
        ),
        (["torch-dist-to-hf", "--max-shard-gib", "many"], "'many' must be a whole number of 1 or more"),
    ],
)
def test_wrong_words_are_told_in_one_line(capsys, words, told):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1


def test_a_mistake_without_a_stderr_to_tell_it_is_exit_code_2(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["verify", str(tmp_path), str(tmp_path)]) == 2


def test_contradicting_flags_are_told_together(one_origin, tmp_path, capsys):
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(tmp_path / "td")]
    assert main([*words, "--num-layers", "9", "--hidden-size", "10"]) == 2
    line = capsys.readouterr().err
    assert "--num-layers 9" in line and "--hidden-size 10" in line and line.count("\n") == 1


def test_existing_output_needs_force(one_origin, tmp_path, capsys):
    converted = tmp_path / "converted"
    hf_to_torch_dist(one_origin, converted)
    words = ["hf-to-torch-dist", "--hf-checkpoint", str(one_origin), "--save", str(converted)]
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    shutil.rmtree(converted / "release")
    assert main([*words, "--force"]) == 0
    assert (converted / "release" / ".metadata").is_file()


def test_a_mistake_of_ours_is_no_difference(monkeypatch, capsys):
    def broken(path):
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr("slime_convert.inspection.inspect_checkpoint", broken)
    assert main(["inspect", "x"]) == 2
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[-1] == "RuntimeError: what nobody thought of" and "report it with the lines above" in line
