import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slime_convert import ModelShape
from slime_convert.cli import main
from slime_convert.convert import hf_to_torch_dist

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


def test_termination_leaves_nothing(one_origin, tmp_path):
    """SIGTERM arrives while weights are written."""
    slow = (
        "import slime_convert.convert as c, slime_convert.cli as cli, sys, time\n"
        "load = c.HfReader.load\n"
        "def wait(self, name):\n"
        "    print('loading', flush=True); time.sleep(60); return load(self, name)\n"
        "c.HfReader.load = wait\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    words = ["hf-to-torch-dist", "--hf-checkpoint", one_origin, "--save", tmp_path / "td"]
    process = subprocess.Popen(
        [sys.executable, "-c", slow, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "loading\n"
        assert any(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and told == "slime-convert: interrupted; nothing was written\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["hf-to-torch-dist", "--save", "x"], "required: --hf-checkpoint"),
        (["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--num-layer", "2"], "--num-layer"),
        (
            ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--num-layers", "two"],
            "invalid int value: 'two'",
        ),
        (
            ["hf-to-torch-dist", "--hf-checkpoint", "x", "--save", "y", "--make-vocab-size-divisible-by", "0"],
            "0 must be at least 1",
        ),
    ],
)
def test_wrong_words_are_told_in_one_line(capsys, words, told):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1


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
