"""The workspace's ``scripts/convert_*.py``, as people type them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime_convert import ModelShape
from support.family_models import assert_same_weights, without_progress

ROOT = next((root for root in Path(__file__).parents if (root / "scripts/convert_to_hf.py").is_file()), None)
pytestmark = pytest.mark.skipif(ROOT is None, reason="outside the workspace there are no scripts")

# What a training command line holds besides: of the parallel layout, of the optimizer, of the rollout.
TRAINING = [
    "--tensor-model-parallel-size",
    "2",
    "--sequence-parallel",
    "--lr",
    "1e-6",
    "--sglang-mem-fraction-static=0.8",
]
LEFT_OUT = "--tensor-model-parallel-size --sequence-parallel --lr --sglang-mem-fraction-static"


def run(script, *words, **environment):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def told(command, flags=LEFT_OUT):
    return f"slime-convert {command}: left out, as they do not concern the conversion: {flags}\n"


def test_there_and_back(one_origin, tmp_path):
    flags = ModelShape.from_hf_config(one_origin).to_megatron_flags()
    there = run(
        "convert_hf_to_torch_dist", *flags, *TRAINING, "--hf-checkpoint", one_origin, "--save", tmp_path / "torch_dist"
    )
    assert (there.returncode, without_progress(there.stderr)) == (0, told("hf-to-torch-dist"))
    assert there.stdout.startswith("wrote 27 weights, ") and there.stdout.endswith(f": {tmp_path}/torch_dist\n")
    origin = tmp_path / "origin"
    shutil.copytree(one_origin, origin)
    (origin / "model.safetensors.index.json").unlink()
    save_file({"visual.proj.weight": torch.ones(2, 3)}, origin / "visual.safetensors")
    words = ["--input-dir", tmp_path / "torch_dist" / "release", "--output-dir", tmp_path / "hf"]
    words += ["--origin-hf-dir", origin, "--force", "--add-missing-from-origin-hf", "--model-name", "qwen3"]
    back = run("convert_torch_dist_to_hf", *flags, *words)
    assert (back.returncode, without_progress(back.stderr)) == (0, told("torch-dist-to-hf", "--model-name"))
    assert back.stdout.startswith(f"copied from {origin}: visual.proj.weight\nwrote 37 weights, ")
    assert_same_weights(tmp_path / "hf", origin)


def test_any_megatron_checkpoint(legacy_runs, tmp_path):
    run_ = legacy_runs["qwen3-untied"]
    flags = ModelShape.from_hf_config(run_.origin).to_megatron_flags()
    words = ["--load", run_.save, "--hf-checkpoint", run_.origin, "--save", run_.save, "--ckpt-format", "torch"]
    result = run("convert_to_hf", *flags, *words, *TRAINING, "--output-dir", tmp_path / "hf")
    assert result.returncode == 0 and result.stdout.startswith("wrote 36 weights, ")
    assert without_progress(result.stderr) == told("megatron-to-hf", f"--save {LEFT_OUT}")
    assert_same_weights(tmp_path / "hf", run_.origin)


WORDS = {
    "convert_hf_to_torch_dist": ["--hf-checkpoint", "origin", "--save", "out"],
    "convert_torch_dist_to_hf": ["--origin-hf-dir", "origin", "--output-dir", "out", "--input-dir", "td"],
    "convert_to_hf": ["--hf-checkpoint", "origin", "--output-dir", "out", "--load", "in"],
}


@pytest.fixture
def words(one_origin, one_converted, tmp_path):
    """The words of a script, with the places of a model and its checkpoint, and places in an empty directory."""
    places = {"origin": one_origin, "td": one_converted, "out": tmp_path / "out", "in": tmp_path / "in"}
    return lambda script: [places.get(word, word) for word in WORDS[script]]


@pytest.mark.parametrize("script", WORDS)
def test_another_models_flags_are_refused_in_one_line(words, tmp_path, script):
    line = f'source {ROOT}/scripts/models/qwen3-4B.sh && exec "$@" "${{MODEL_ARGS[@]}}"'
    command = ["bash", "-euc", line, "bash", sys.executable, ROOT / "scripts" / f"{script}.py", *words(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--num-layers 36 is given, but the config says 3; --hidden-size 2560" in result.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", WORDS)
def test_further_processes_of_torchrun_do_nothing(words, tmp_path, script):
    result = run(script, *words(script), RANK="1", WORLD_SIZE="2")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("rank", ["0", ""])
def test_the_first_process_converts(words, rank):
    result = run("convert_to_hf", *words("convert_to_hf"), RANK=rank)
    assert (result.returncode, result.stdout) == (2, "") and "there is no " in result.stderr


@pytest.mark.parametrize(
    ("script", "more", "line"),
    [
        ("convert_to_hf", [], "slime-convert: there is no "),
        ("convert_to_hf", ["--num-layer", "3", "--lr", "1"], "unknown flag --num-layer; did you mean --num-layers?"),
        ("convert_to_hf", ["stray"], "slime-convert megatron-to-hf: unrecognized arguments: stray; see"),
        ("convert_to_hf", ["--ckpt-format", "zarr"], "argument --ckpt-format: invalid choice: 'zarr'"),
    ],
)
def test_a_mistake_is_one_line(words, tmp_path, script, more, line):
    result = run(script, *words(script), *more)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert line in result.stderr
    assert not any(tmp_path.iterdir())


def test_what_is_needed_is_told():
    result = run("convert_to_hf", "--load", "in", "--output-dir", "out")
    assert result.returncode == 2 and "arguments are required: --origin-hf-dir/--hf-checkpoint" in result.stderr
