"""The examples of the README and of the pages on this package work, and what they list is all that there is."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import slime_convert
from slime_convert import errors, fp8_to_bf16, hf_to_fp8, hf_to_torch_dist, int4_to_bf16, torch_dist_to_hf, verify
from slime_convert.check.tiny import build, quiet, tiny_config
from slime_convert.cli import main
from slime_convert.commands import COMMANDS
from slime_convert.conversions.quantized import projections
from slime_convert.families import FAMILIES
from slime_convert.formats.hf import HfWeights
from slime_convert.quantize import Int4Format
from slime_convert.quantize.numbers import quantize_int4
from support import families_page
from support.family_models import (
    add_prediction_module,
    assert_same_weights,
    change_config,
    make_model,
    tree,
    weights_of,
    write_adapter,
)
from support.gguf_files import SIZES, tensors_of, write_gguf

README = Path(__file__).parents[1] / "README.md"
HOW_TO, REFERENCE, NEW_FAMILY = (
    families_page.find_page(name) for name in ("how-to/convert.md", "reference/convert.md", "how-to/new-family.md")
)
in_workspace = pytest.mark.skipif(HOW_TO is None, reason="outside the workspace the pages are not there")
QUANTIZABLE = [name for name in FAMILIES if families_page.is_quantizable(name)]
PACKAGE = Path(slime_convert.__file__).parent


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A directory with what the pages' commands read: tiny models. Not to be changed."""
    root = tmp_path_factory.mktemp("inputs")
    origin = make_model("qwen3-untied", root / "Qwen3-4B", hidden_size=64, intermediate_size=96, head_dim=16)
    add_prediction_module(make_model("deepseek", root / "DeepSeek-V3"))
    write_adapter(origin, root / "my-adapter")
    for name in ("runs/qwen3", "megatron"):
        hf_to_torch_dist(origin, root / name)
    return root


def run_commands(page):
    """Every line that is a command of ours; returns their names."""
    named = set()
    for line in (line for block in blocks(page, "bash") for line in block.splitlines()):
        if line.startswith("slime-convert "):
            words = shlex.split(line.replace("$MODEL", "Qwen3-4B"), comments=True)[1:]
            assert main(words) == 0, line
            named.add(words[0])
    return named


def test_commands_of_the_readme_work(inputs, tmp_path, monkeypatch, capsys):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert run_commands(README) == {"hf-to-torch-dist", "verify", "inspect", "torch-dist-to-hf"}
    assert "wrote 36 weights, " in capsys.readouterr().out


@in_workspace
def test_commands_of_the_how_to_work(inputs, tmp_path, monkeypatch):
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    write_gguf(tmp_path / "model.gguf", model.config, tensors_of(model))
    monkeypatch.chdir(tmp_path)
    assert run_commands(HOW_TO) == {command.name for command in COMMANDS} - {"inspect", "list-models"}


def run_python(page, inputs, directory, monkeypatch):
    """The page's one block of Python; returns its names."""
    shutil.copytree(inputs / "Qwen3-4B", directory / "Qwen3-4B")
    monkeypatch.chdir(directory)
    namespace = {}
    [block] = blocks(page, "python")
    exec(compile(block, str(page), "exec"), namespace)
    return namespace


def test_the_python_example_of_the_readme_works(inputs, tmp_path, monkeypatch):
    assert run_python(README, inputs, tmp_path, monkeypatch)["comparison"].equal
    assert (tmp_path / "out" / "back" / "model.safetensors").is_file()


@in_workspace
def test_the_python_example_of_the_how_to_works(inputs, tmp_path, monkeypatch):
    namespace = run_python(HOW_TO, inputs, tmp_path, monkeypatch)
    assert (tmp_path / "out" / "again" / "model.safetensors").is_file()
    assert [namespace[part][0].split(".")[-2] for part in ("query", "key", "value")] == ["q_proj", "k_proj", "v_proj"]


@in_workspace
def test_the_table_of_families_is_up_to_date():
    text = families_page.PAGE.read_text(encoding="utf-8")
    assert text == families_page.with_table(text), f"write it with `{families_page.COMMAND}`"


def test_every_command_is_named():
    text = README.read_text(encoding="utf-8")
    assert not [command.name for command in COMMANDS if f"`{command.name}`" not in text]


@in_workspace
def test_every_error_is_named():
    text = REFERENCE.read_text(encoding="utf-8")
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert not [name for name in names if f"`{name}`" not in text]


def int4(origin, path):
    """A model in packed INT4, in groups of two columns, which divide any tiny size."""
    model, form = HfWeights(origin), Int4Format(2)
    chosen = set(projections({name: info.shape for name, info in model.tensors.items()}))
    packed = {}
    for name, tensor in weights_of(origin).items():
        if name not in chosen:
            packed[name] = tensor
            continue
        words, scale = quantize_int4(tensor, 2, name=name)
        packed |= {
            f"{name}_packed": words,
            f"{name}_scale": scale,
            f"{name}_shape": tensor.new_tensor(tensor.shape).long(),
        }
    path.mkdir()
    save_file(packed, path / "model.safetensors")
    shutil.copy(origin / "config.json", path)
    change_config(path, quantization_config=form.to_config([]))
    return path


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in ("qwen3", "deepseek_v3") else pytest.mark.full) for name in QUANTIZABLE],
)
def test_the_families_of_which_fp8_and_int4_are_read(family, tmp_path):
    """Their checkpoints are those of the models that were expanded before."""
    with quiet():
        build(tiny_config(families_page.configs_of(family)[0]), tmp_path / "float32").save_bfloat16(tmp_path / "hf")
    hf_to_fp8(tmp_path / "hf", tmp_path / "fp8")
    int4(tmp_path / "hf", tmp_path / "int4")
    for kind, expand in (("fp8", fp8_to_bf16), ("int4", int4_to_bf16)):
        expand(tmp_path / kind, tmp_path / f"{kind}_bf16")
        for name in (kind, f"{kind}_bf16"):
            hf_to_torch_dist(tmp_path / name, tmp_path / f"{name}_td")
        ours, theirs = (tree(tmp_path / f"{name}_td") for name in (kind, f"{kind}_bf16"))
        assert ours == theirs and ours


@pytest.mark.parametrize("family", [name for name in FAMILIES if families_page.has_experts_in_one_tensor(name)])
def test_the_families_of_which_mxfp4_is_read(family, tmp_path):
    """The way back has what transformers makes of the blocks."""
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    with quiet():
        build(tiny_config(families_page.configs_of(family)[0]) | sizes, tmp_path / "float32").save_bfloat16(
            tmp_path / "hf"
        )
    stored, expanded = weights_of(tmp_path / "hf"), {}
    for name in [name for name, tensor in stored.items() if tensor.dim() == 3]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expanded[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    change_config(tmp_path / "hf", quantization_config={"quant_method": "mxfp4"})
    hf_to_torch_dist(tmp_path / "hf", tmp_path / "td")
    torch_dist_to_hf(tmp_path / "td", tmp_path / "back", tmp_path / "hf")
    others = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    assert expanded
    assert_same_weights(tmp_path / "back", others | expanded)
    assert verify(tmp_path / "hf", tmp_path / "td").equal


@in_workspace
@pytest.mark.parametrize("megatron", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_new_family_is_a_file(tmp_path, megatron):
    """As the page has it, in a copy of the package in which the two families of its examples are not there."""
    shutil.copytree(PACKAGE, tmp_path / "slime_convert", ignore=shutil.ignore_patterns("__pycache__"))
    families = tmp_path / "slime_convert" / "families"
    codes = blocks(NEW_FAMILY, "python")
    for name, relatives, code in zip(("qwen3", "mistral"), ("qwen", "llama"), codes, strict=True):
        (families / f"{name}.py").write_text(code)
        file = families / f"{relatives}.py"
        file.write_text(re.sub(rf"(FAMILIES = .*) {name.upper()},", r"\1", file.read_text()))
    program = """
import json, sys
from slime_convert.check import check_models
from slime_convert.families import FAMILIES, mistral, qwen3
assert FAMILIES["qwen3"] is qwen3.QWEN3 and FAMILIES["mistral"] is mistral.MISTRAL
for result in check_models(json.loads(sys.argv[1]), megatron=bool(sys.argv[2:])):
    print(json.dumps(result.to_json()))
"""
    configs = [*families_page.configs_of("qwen3"), *families_page.configs_of("mistral")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(configs), *["megatron"] * megatron],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    outcomes = [[row["outcome"] for row in result["rows"]] for result in results]
    assert outcomes == [["passed"] * 5 if megatron else ["passed"] * 3 + ["not run"] * 2] * len(configs), results
