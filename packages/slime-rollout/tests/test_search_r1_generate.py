"""The example's generate function before the scripted engine and its real search server."""

import asyncio
import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime_core.types import Sample, Status
from slime_rollout.cli import main
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import GenerationError
from slime_rollout.rollout import RolloutManager

DIRECTORY = Path(__file__).parents[3] / "examples" / "search-r1"
pytestmark = [
    pytest.mark.skipif(not (DIRECTORY / "search_server.py").exists(), reason="the examples belong to the repository"),
    pytest.mark.skipif(importlib.util.find_spec("bm25s") is None, reason="the search server needs bm25s"),
]


@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen(
        [sys.executable, str(DIRECTORY / "search_server.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@pytest.fixture
def example(server, monkeypatch):
    monkeypatch.setenv("SEARCH_R1_URL", server)
    spec = importlib.util.spec_from_file_location("search_r1", DIRECTORY / "search_r1.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rollout(example, engine, reply, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    def answer(number, body):
        asked = tokenizer.decode(body["input_ids"])
        if asked.endswith("</information>\n\n"):
            said = f"<answer>{'Lake Baikal' if 'Lake Baikal' in asked else 'it is unknown'}</answer>"
        else:
            said = "<search>deepest lake on Earth</search>"
        tokens = tokenizer.encode(said)
        return reply(text=said.rpartition("</")[0], tokens=tokens)  # stopped by a string, which the text leaves out

    engine.answer = answer
    config = RolloutConfig.of(
        hf_checkpoint=tokenizer_dir,
        prompt_data=f"{DIRECTORY / 'train.jsonl'}@[2:3]",
        custom_generate_function_path=str(DIRECTORY / "search_r1.py"),
        custom_rm_path=str(DIRECTORY / "search_r1.py"),
        rollout_batch_size=1,
        n_samples_per_prompt=2,
        rollout_max_response_len=4096,
    )
    samples = RolloutManager(config, router_url=engine.url, run_seed=1).generate(0).samples
    for sample in samples:
        assert sample.prompt == "What is the deepest lake on Earth?"
        assert "Answer the question." in tokenizer.decode(sample.prompt_tokens)
        assert (sample.reward, sample.status, sample.metadata["turns"]) == (1.0, Status.COMPLETED, 2)
        assert sample.metadata["queries"] == ["deepest lake on Earth"]
        written = [token for token, mask in zip(sample.response_tokens, sample.loss_mask, strict=True) if mask]
        assert tokenizer.decode(written) == "<search>deepest lake on Earth</search><answer>Lake Baikal</answer>"
        assert 'Doc 1 (Title: "Lake Baikal") ' in sample.response


def test_the_reward_is_that_of_the_models_own_answer(example):
    for answer, expected in (("the Lake Baikal.", 1.0), ("Baikal", 0.0), (None, 0.0)):
        metadata = {"answer": answer}
        sample = Sample(index=0, group_index=0, prompt="p", label="Lake Baikal", metadata=metadata)
        assert asyncio.run(example.custom_rm(None, sample)) == expected


def test_a_search_that_finds_nothing_or_nobody(example, monkeypatch):
    assert asyncio.run(example.search("zzz qqq")) == "Nothing was found."
    monkeypatch.setenv("SEARCH_R1_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(example, "ATTEMPTS", 1)
    with pytest.raises(GenerationError, match=r"POST http://127.0.0.1:9/retrieve failed"):
        asyncio.run(example.search("lake"))


def test_the_command_that_looks_at_it(example, capsys, monkeypatch):
    page = (DIRECTORY / "README.md").read_text(encoding="utf-8")
    command = page.partition("slime-rollout check")[2].partition("\n```")[0].replace("\\\n", " ")
    monkeypatch.chdir(DIRECTORY.parents[1])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(shlex.split("check" + command)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith("ok ") for line in lines)
    assert "4 samples became 4 with 8 requests" in lines[0]
