"""The functions of the recipes dapo, judge-reward, multi-agent and multi-set-eval."""

import asyncio
import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from slime_core.types import Drop, Keep, Sample
from slime_rollout.cli import main
from slime_rollout.config import RolloutConfig
from slime_rollout.rollout import RolloutManager

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples belong to the repository")


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sample_of(response="", label="42", **fields):
    return Sample(index=0, group_index=0, prompt="6 * 7 =", label=label, response=response, **fields)


def test_dapo_rewards_answers_and_length():
    dapo = load("dapo/dapo.py")
    args = SimpleNamespace(
        answer_rule="first_integer", overlong_buffer=4, rollout_max_response_len=10, reward_key="score"
    )
    assert [dapo.overlong_penalty(length, 10, 4) for length in (3, 6, 8, 10)] == [0, 0, 0.5, 1]
    rewards = []
    for response, length in (("42", 6), ("42", 8), ("43", 6), ("43", 10)):
        sample = sample_of(response, tokens=[1] * (length + 1), response_length=length)
        rewards.append(dapo.custom_rm(args, sample))
    assert [reward["score"] for reward in rewards] == [1, 0.5, -1, -2]
    assert [reward["acc"] for reward in rewards] == [1, 1, 0, 0]
    assert dapo.custom_rm(SimpleNamespace(**{**vars(args), "answer_rule": "dapo"}), sample_of("Answer: 42"))["acc"] == 1
    samples = [sample_of(reward=reward) for reward in rewards]
    assert dapo.keep_mixed(args, samples) == Keep()
    assert dapo.keep_mixed(args, samples[:2]) == Drop("all_right")  # though their rewards differ
    assert dapo.keep_mixed(args, samples[2:]) == Drop("all_wrong")
    failed = sample_of(reward={"score": 0.0, "acc": 0.0}, metadata={"reward_failure": "no answer"})
    assert dapo.keep_mixed(args, [failed, samples[2]]) == Drop("all_wrong")
    assert dapo.keep_mixed(args, [failed, samples[0]]) == Keep()


@pytest.mark.parametrize(
    ("written", "expected"), [("Grade: 7", 0.7), ("10", 1.0), ("0 of 10", 0.0), ("good", 0.0), ("Grade: 42", 0.0)]
)
def test_grades(written, expected):
    assert load("judge-reward/judge.py").grade(written) == expected


def test_a_judge_elsewhere_is_asked(monkeypatch):
    judge, seen = load("judge-reward/judge.py"), []

    async def answer(request):
        seen.append((request.headers.get("Authorization"), await request.json()))
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "Grade: 3, too short"}}]})

    async def ask():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{runner.addresses[0][1]}/v1/")
        monkeypatch.setenv("JUDGE_KEY", "secret")
        try:
            return await judge.custom_rm(None, sample := sample_of("It rains.")), sample
        finally:
            await runner.cleanup()

    reward, sample = asyncio.run(ask())
    assert (reward, sample.metadata["judge"]) == (0.3, "Grade: 3, too short")
    ((key, body),) = seen
    assert key == "Bearer secret" and "It rains." in body["messages"][0]["content"]


def test_the_mentions_of_a_label():
    mentions = load("multi-set-eval/mentions.py")
    assert mentions.custom_rm(None, sample_of("It is PARIS.", label="Paris")) == 1
    assert mentions.custom_rm(None, sample_of("It is Rome.", label="Paris")) == 0


def test_solvers_and_critic(engine, reply, tokenizer_dir):
    """Three samples a trajectory, with one reward; the critic has read both solutions; each agent has its own seed."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    def answer(number, body):
        asked = tokenizer.decode(body["input_ids"])
        said = "Answer: 238" if "Several people" in asked and "Solution 2:\nAnswer: 1" in asked else "Answer: 1"
        tokens = tokenizer.encode(said + "<|end|>")
        return reply(text=said, tokens=tokens)

    engine.answer = answer
    agents = str(EXAMPLES / "multi-agent" / "agents.py")
    config = RolloutConfig.of(
        hf_checkpoint=tokenizer_dir,
        prompt_data=str(EXAMPLES / "multi-agent" / "prompts.jsonl"),
        custom_generate_function_path=agents,
        custom_rm_path=agents,
        rollout_batch_size=1,
        n_samples_per_prompt=2,
    )
    samples = RolloutManager(config, router_url=engine.url, run_seed=1).generate(0).samples
    assert [sample.metadata["agent"] for sample in samples] == ["solver", "solver", "critic"] * 2
    assert [sample.reward for sample in samples] == [1.0] * 6
    assert [sample.trajectory for sample in samples] == [0] * 3 + [1] * 3
    seeds = {body["sampling_params"]["sampling_seed"] for body in engine.bodies}
    assert len(seeds) == 6


def test_the_commands_that_look_at_them(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", copy.copy(sys.path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "6 * 7 =", "label": "42"}) + "\n")
    agents = "examples/multi-agent/agents.py"
    multi_agent = ["--prompt-data", "examples/multi-agent/prompts.jsonl", "--custom-generate-function-path", agents]
    multi_agent += ["--custom-rm-path", agents, "--reply", "Answer: 238"]
    dapo = ["--prompt-data", str(rows), "--custom-rm-path", "examples/dapo/dapo.py", "--reward-key", "score"]
    dapo += ["--dynamic-sampling-filter-path", "examples/dapo/dapo.py:keep_mixed", "--reply", "42"]
    dapo += ["--custom-config-path", "examples/dapo/laptop-settings.yaml"]
    for words in (multi_agent, dapo):
        assert main(["check-hooks", "--run", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and all(line.startswith("ok ") for line in lines)
