import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert.cli import main
from slime_convert.files.reading import TensorReader

COMMAND = Path(sys.executable).with_name("slime-convert")
NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def hf(tmp_path):
    torch.manual_seed(0)
    (tmp_path / "hf").mkdir()
    tensors = {NAME: torch.randn(130, 128).bfloat16(), "model.norm.weight": torch.ones(128).bfloat16()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text('{"dtype": "bfloat16"}')
    return tmp_path / "hf"


def command(name, source, target, *words):
    return [name, "--hf-checkpoint", str(source), "--save", str(target), *words]


@pytest.mark.parametrize(
    ("there", "back", "names"),
    [
        (["hf-to-fp8"], "fp8-to-bf16", {NAME, f"{NAME}_scale_inv"}),
        (["hf-to-int4"], "int4-to-bf16", {f"{NAME}_packed", f"{NAME}_scale", f"{NAME}_shape"}),
        (["hf-to-int4", "--group-size", "128", "--ignore", "lm_head"], "int4-to-bf16", {f"{NAME}_packed"}),
    ],
    ids=" ".join,
)
def test_there_and_back(hf, tmp_path, capfd, there, back, names):
    assert main(command(there[0], hf, tmp_path / "small", *there[1:])) == 0
    assert names <= load_file(tmp_path / "small" / "model.safetensors").keys()
    assert main(command(back, tmp_path / "small", tmp_path / "back", "--max-shard-gib", "1")) == 0
    restored, original = (load_file(path / "model.safetensors") for path in (tmp_path / "back", hf))
    assert restored.keys() == original.keys() and {t.dtype for t in restored.values()} == {torch.bfloat16}
    assert (restored[NAME] - original[NAME]).norm() < 0.15 * original[NAME].norm()
    assert main(command(back, tmp_path / "small", tmp_path / "back")) == 2
    assert main(command(back, tmp_path / "small", tmp_path / "back", "--force")) == 0
    told = capfd.readouterr()
    assert told.err.count("\n") == 1 and "replace it with --force" in told.err
    assert [line.split(",")[0] for line in told.out.splitlines()[1:]] == ["wrote 2 weights"] * 2


def test_group_size_arrives(hf, tmp_path):
    main(command("hf-to-int4", hf, tmp_path / "out", "--group-size", "128"))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{NAME}_scale"].shape == (130, 1)


def test_as_a_user_types_it(hf, tmp_path):
    words = [COMMAND, *command("hf-to-fp8", hf, tmp_path / "out")]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    # On a slow machine there is time for a line of progress.
    assert all(re.match(r" *\d+ %, ", line) for line in result.stderr.splitlines())
    assert re.fullmatch(r"wrote 3 weights, 16\.5 KiB, in \d+\.\d s, .*/s: .*/out\n", result.stdout)
    result = subprocess.run([COMMAND, *words[1:2], "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "blocks of 128 by 128" in result.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (command("hf-to-fp8", "none", "out"), "cannot read none/config.json (No such file or directory); give a"),
        (command("fp8-to-bf16", "hf", "out"), "hf/config.json has no quantization_config; give a quantized model"),
        (command("int4-to-bf16", "hf", "out"), "hf/config.json has no quantization_config; give a quantized model"),
        (command("hf-to-int4", "hf", "out", "--ignore", "re:.*"), "--ignore re:.* leaves nothing to quantize"),
        (command("hf-to-int4", "hf", "out", "--ignore", "re:["), "--ignore re:[ is not a regular expression"),
        (command("hf-to-fp8", "hf", "hf"), "is or holds the input hf; choose another directory"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(hf, tmp_path, monkeypatch, capfd, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    line = capfd.readouterr().err
    assert line.startswith("slime-convert: ") and told in line and line.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("settings", [{"quant_method": "awq"}, {"quant_method": "fp8"}])
def test_a_config_of_another_kind_is_told(hf, tmp_path, capfd, settings):
    (hf / "config.json").write_text(json.dumps({"quantization_config": settings}))
    for name in ("hf-to-fp8", "fp8-to-bf16", "hf-to-int4", "int4-to-bf16"):
        assert main(command(name, hf, tmp_path / "out")) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4 and all("is not supported; allowed: " in line for line in lines)


def test_missing_scales_are_told(hf, tmp_path, capfd):
    main(command("hf-to-fp8", hf, tmp_path / "fp8"))
    shutil.copytree(tmp_path / "fp8", tmp_path / "cut")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    del tensors[f"{NAME}_scale_inv"]
    save_file(tensors, tmp_path / "cut" / "model.safetensors")
    assert main(command("fp8-to-bf16", tmp_path / "cut", tmp_path / "out")) == 2
    assert f"cut lacks {NAME}_scale_inv" in capfd.readouterr().err
    assert main(command("hf-to-fp8", tmp_path / "fp8", tmp_path / "out")) == 2
    assert (
        "fp8 is quantized already (fp8, fmt e4m3, weight_block_size [128, 128]); use slime-convert fp8-to-bf16 first"
        in capfd.readouterr().err
    )


@pytest.mark.parametrize("words", [["--group-size", "64"], ["--group-size", "x"]])
def test_group_sizes_are_two(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(command("hf-to-int4", "a", "b", *words))
    assert caught.value.code == 2 and "--group-size" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hf-to-fp8", "hf-to-int4"])
def test_a_stop_leaves_what_the_next_run_continues(hf, tmp_path, monkeypatch, capfd, name):
    monkeypatch.setattr(TensorReader, "load", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert main(command(name, hf, tmp_path / "out" / "model")) == 130
    partial = tmp_path / "out" / ".model.partial"
    told = f"slime-convert: interrupted; run the same command again to continue, or delete {partial}\n"
    assert capfd.readouterr().err == told and list((tmp_path / "out").iterdir()) == [partial]
