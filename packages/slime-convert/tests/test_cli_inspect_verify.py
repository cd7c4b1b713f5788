"""``slime-convert inspect`` and ``slime-convert verify`` as a user types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.cli import main
from support.family_models import without_progress

COMMAND = Path(sys.executable).with_name("slime-convert")


@pytest.fixture
def td(one_converted):
    return one_converted


@pytest.fixture
def changed(one_origin, tmp_path):
    """The sign of one element is another."""
    path = tmp_path / "changed"
    shutil.copytree(one_origin, path)
    shard = sorted(path.glob("*.safetensors"))[0]
    weights = load_file(shard)
    name = next(name for name in weights if "down_proj" in name)
    weights[name].view(-1)[5] *= -1
    save_file(weights, shard)
    return path, name


def test_exit_codes(one_origin, td, changed, tmp_path):
    path, name = changed
    words = [COMMAND, "verify", one_origin, path]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (result.returncode, without_progress(result.stderr)) == (1, "")
    assert name in result.stdout and result.stdout.splitlines()[-1].startswith("different: 35 equal, 1 values (")
    assert main(["verify", str(td), str(one_origin)]) == 0
    assert main(["verify", str(td), str(tmp_path / "none")]) == 2


def test_verify_as_json(td, changed, capsys):
    path, name = changed
    assert main(["verify", str(td), str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["equal"], told["counts"]["values"], told["counts"]["equal"]) == (False, 1, 35)
    (difference,) = told["differences"]
    assert (difference["name"], difference["num_differing"]) == (name, 1)
    tolerance = str(difference["max_abs_diff"])
    assert main(["verify", str(td), str(path), "--tolerance", tolerance]) == 0
    assert "equal: 35 equal, 1 within tolerance (" in capsys.readouterr().out
    assert main(["verify", str(td), str(path), "--tolerance", "inf", "--json"]) == 0
    assert '"tolerance": "inf"' in capsys.readouterr().out


def test_the_origin_may_give_the_shape(one_origin, td, tmp_path, capsys):
    assert main(["verify", str(td), str(one_origin), "--origin-hf-dir", str(one_origin)]) == 0
    assert main(["verify", str(td), str(one_origin), "--origin-hf-dir", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_inspect_as_table_and_json(one_origin, td, capsys):
    assert main(["inspect", str(one_origin)]) == 0
    assert capsys.readouterr().out.startswith("format        hf\n")
    assert main(["inspect", str(td), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["iteration"]) == ("torch_dist", "release")


@pytest.mark.parametrize("which", ["hf", "torch_dist"])
def test_inspect_imports_no_torch(one_origin, td, which):
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), HEAVY & set(sys.modules))"
    code = code.replace("HEAVY", "{'torch', 'numpy', 'safetensors'}")
    words = ["inspect", one_origin if which == "hf" else td]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines()[-1] == "0 set()"


def test_verify_tells_the_likely_mistakes_before_torch_is_imported(one_origin, tmp_path):
    code = "import sys; from slime_convert.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["verify", one_origin, tmp_path / "none"]
    result = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240)
    assert result.stdout == "2 False\n" and result.stderr.startswith("slime-convert: there is no ")


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("shard cut off", "is cut off"),
        ("shard gone", "are missing, such as"),
        ("metadata", "the checkpoint is damaged, use another"),
        ("distcp cut off", "is cut off"),
        ("distcp gone", "are missing, such as"),
        ("common", "it must be a whole file of torch.save in its zip format, use another checkpoint"),
        ("format", "metadata.json is missing or names no format; use a complete"),
        ("nothing", "is not a checkpoint of a known format"),
    ],
)
def test_damage_is_one_line_that_says_what_to_do(one_origin, td, tmp_path, capsys, command, damage, told):
    broken = tmp_path / "broken"
    shutil.copytree(one_origin if damage.startswith("shard") else td, broken)
    release = broken / "release"
    target = {
        "shard": sorted(broken.glob("*.safetensors"))[-1:],
        "metadata": [release / ".metadata"],
        "distcp": [release / "__0_0.distcp"],
        "common": [release / "common.pt"],
        "format": [release / "metadata.json"],
    }.get(damage.split()[0])
    if target is None:
        shutil.rmtree(broken)
        broken.mkdir()
    elif damage.endswith("gone"):
        target[0].unlink()
    else:
        target[0].write_bytes(target[0].read_bytes()[:-40])
    words = [command, str(broken)] + ([str(one_origin)] if command == "verify" else [])
    assert main(words) == 2
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1 and line.startswith("slime-convert: ")


def with_stdout(stdout, *words, **env):
    return subprocess.run(
        [COMMAND, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
    )


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_output_that_cannot_be_written_is_told(one_origin, command):
    """Exit code 1 would say that two checkpoints differ."""
    words = [command, one_origin] + [one_origin] * (command == "verify")
    with Path("/dev/full").open("w") as full:
        result = with_stdout(full, *words)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("slime-convert: cannot write the output (No space left on device); ")


def test_output_that_nobody_reads_is_no_mistake(one_origin):
    read, write = os.pipe()
    os.close(read)
    try:
        result = with_stdout(write, "inspect", one_origin)
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_terminal_of_few_characters(one_origin):
    result = subprocess.run(
        [COMMAND, "inspect", one_origin],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0 and r"101\xd724" in result.stdout


def test_names_of_weights_command_no_terminal(tmp_path, capsys):
    save_file({"a\x1b[2J": torch.ones(1)}, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    assert main(["verify", str(tmp_path), str(tmp_path)]) == 0
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "\x1b[2J"}}))
    assert main(["fp8-to-bf16", "--hf-checkpoint", str(tmp_path), "--save", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert r"a\x1b[2J" in told.out and "\x1b" not in told.out + told.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["inspect", "x" * 5000], "(File name too long); correct this"),
        (["hf-to-fp8", "--hf-checkpoint", "HERE", "--save", "y"], "config.json is not valid JSON (maximum recursion"),
        (["hf-to-torch-dist", "--hf-checkpoint", "HERE", "--save", "y"], "config.json is not valid JSON (maximum rec"),
        (["verify", "HERE", "HERE"], "config.json is not valid JSON (maximum recursion"),
    ],
)
def test_what_the_system_and_the_parsers_refuse_is_one_line(tmp_path, capsys, words, told):
    (tmp_path / "config.json").write_text("[" * 100_000)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert main([word.replace("HERE", str(tmp_path)) for word in words]) == 2
    line = capsys.readouterr().err
    assert told in line and line.count("\n") == 1
