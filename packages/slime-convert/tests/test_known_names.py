"""The workspace's ``scripts/convert_*.py``, as people type them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_convert import ModelShape

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
LEFT_ALONE = "--tensor-model-parallel-size --sequence-parallel --lr --sglang-mem-fraction-static"


def run(script, *words, **environment):
    command = [sys.executable, ROOT / "scripts" / f"{script}.py", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def told(command, flags=LEFT_ALONE):
    return f"slime-convert {command}: left alone, as they do not concern the conversion: {flags}\n"


def weights_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_equal_bits(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_there_and_back(one_origin, tmp_path):
    flags = ModelShape.from_hf_config(one_origin).to_megatron_flags()
    there = run(
        "convert_hf_to_torch_dist", *flags, *TRAINING, "--hf-checkpoint", one_origin, "--save", tmp_path / "torch_dist"
    )
    assert (there.returncode, there.stdout, there.stderr) == (0, "", told("hf-to-torch-dist"))
    origin = tmp_path / "origin"
    shutil.copytree(one_origin, origin)
    (origin / "model.safetensors.index.json").unlink()
    save_file({"visual.proj.weight": torch.ones(2, 3)}, origin / "visual.safetensors")
    words = ["--input-dir", tmp_path / "torch_dist" / "release", "--output-dir", tmp_path / "hf"]
    words += ["--origin-hf-dir", origin, "--force", "--add-missing-from-origin-hf", "--model-name", "qwen3"]
    back = run("convert_torch_dist_to_hf", *flags, *words)
    assert (back.returncode, back.stderr) == (0, told("torch-dist-to-hf", "--model-name"))
    assert back.stdout == f"copied from {origin}: visual.proj.weight\n"
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(origin))


def test_any_megatron_checkpoint(legacy_runs, tmp_path):
    run_ = legacy_runs["qwen3-untied"]
    flags = ModelShape.from_hf_config(run_.origin).to_megatron_flags()
    words = ["--load", run_.save, "--hf-checkpoint", run_.origin, "--save", run_.save, "--ckpt-format", "torch"]
    result = run("convert_to_hf", *flags, *words, *TRAINING, "--output-dir", tmp_path / "hf")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == told("megatron-to-hf", f"--save {LEFT_ALONE}")
    assert_equal_bits(weights_of(tmp_path / "hf"), weights_of(run_.origin))


WORDS = {
    "convert_hf_to_torch_dist": ["--hf-checkpoint", "origin", "--save", "out"],
    "convert_torch_dist_to_hf": ["--origin-hf-dir", "origin", "--output-dir", "out", "--input-dir", "in"],
    "convert_to_hf": ["--hf-checkpoint", "origin", "--output-dir", "out", "--load", "in"],
}


@pytest.fixture
def words(one_origin, tmp_path):
    """The words of a script, with the original model's place and places in an empty directory."""
    places = {"origin": one_origin, "out": tmp_path / "out", "in": tmp_path / "in"}
    return lambda script: [places.get(word, word) for word in WORDS[script]]


@pytest.mark.parametrize("script", WORDS)
def test_another_models_flags_are_refused_in_one_line(words, tmp_path, script):
    line = f'source {ROOT}/scripts/models/qwen3-4B.sh && exec "$@" "${{MODEL_ARGS[@]}}"'
    command = ["bash", "-euc", line, "bash", sys.executable, ROOT / "scripts" / f"{script}.py", *words(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
        ("convert_to_hf", ["--num-layer", "3", "--lr", "1"], "--num-layer 3 --lr 1; did you mean --num-layers?"),
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
