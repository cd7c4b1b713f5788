import asyncio
import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime_core.errors import DataError
from slime_core.types import Status
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.errors import GenerationError, RewardError
from slime_rollout.generate import EngineClient, sampling_seed
from slime_rollout.rewards.scorers import Scorer
from slime_rollout.rollout import RolloutData, RolloutManager

ROWS = [{"prompt": f"say a number: {number}", "label": str(number)} for number in range(6)]


def test_a_rollout(manager, engine, reply):
    progress = []
    given = manager(on_progress=lambda done, total: progress.append((done, total)))
    one = reply(text="1", version="3")
    engine.answer = lambda number, body: one
    batch = given.generate(4)
    assert (batch.rollout_id, [len(group) for group in batch.groups]) == (4, [3, 3])
    assert [sample.index for sample in batch.samples] == list(range(6))
    assert [sample.reward for sample in batch.samples] == [0, 0, 0, 1, 1, 1]
    assert all(
        sample.status is Status.COMPLETED and sample.response_tokens == one["output_ids"] for sample in batch.samples
    )
    assert progress == [(done, 6) for done in range(1, 7)]
    assert batch.metrics["raw_reward"] == 0.5
    assert batch.metrics["zero_std/count"] == 2
    assert batch.metrics["response_tokens"] == 12
    assert (batch.metrics["weight_version/min"], batch.metrics["weight_version/max"]) == (3, 3)
    assert batch.seconds.keys() == {"generate", "reward"}
    assert batch.columns().batch() == batch


def test_a_token_outside_the_models_vocabulary_becomes_no_sample(manager, engine, reply, tiny_model):
    """It trained a row of padding, or ended the trainer."""
    engine.answer = lambda number, body: reply(text="42", tokens=(5, 300, 0))
    said = f"{engine.url}/generate: an engine gave the token 300, outside the model's vocabulary of 300"
    with pytest.raises(GenerationError, match=re.escape(said)):
        manager(hf_checkpoint=tiny_model).generate(0)


def test_data_that_was_read_before_is_not_read_again(tokenizer_dir, write_rows, engine):
    path = Path(write_rows(ROWS))
    config = RolloutConfig.of(
        hf_checkpoint=tokenizer_dir,
        prompt_data=str(path),
        eval_prompt_data=("held out", str(path)),
        rollout_batch_size=2,
        rm_type="exact",
    )
    data = RolloutData.load(config)
    path.unlink()
    client = EngineClient.of(config, engine.url, cache_namespace=lambda: "7")
    given = RolloutManager(config, client=client, run_seed=5, data=data)
    assert given.source is data.source
    assert given.evaluate(0).scores.keys() == {"held out"}
    given.generate(0)
    assert {body["extra_key"] for body in engine.bodies} == {"7"}
    with pytest.warns(DeprecationWarning, match=r"takes cache_namespace, key in client=EngineClient.of"):
        RolloutManager(config, router_url=engine.url, run_seed=5, data=data, cache_namespace=lambda: "7", key="k")


def test_weighted_data_sets_with_template_arguments(manager, tokenizer_dir, write_rows):
    sums = write_rows([{"prompt": f"{place} + 1 =", "label": "1"} for place in range(3)], "sums.jsonl")
    changes = {
        "prompt_data": (sums, write_rows([{"prompt": "say 1", "label": "1"}], "say.jsonl")),
        "prompt_data_weights": (1.0, 3.0),
        "rollout_batch_size": 4,
        "apply_chat_template": True,
        "apply_chat_template_kwargs": '{"add_generation_prompt": false}',
    }
    given = manager(**changes)
    first, second = ([group[0].prompt for group in given.generate(number).groups] for number in (0, 1))
    assert first == ["say 1", "0 + 1 =", "say 1", "say 1"]
    assert second == ["say 1", "1 + 1 =", "say 1", "say 1"]
    (group,) = given.source.get_samples(1)
    assert AutoTokenizer.from_pretrained(tokenizer_dir).decode(group[0].tokens) == "<|start|>user:say 1<|end|>"
    with pytest.raises(DataError, match="other prompts or another order"):
        manager(**{**changes, "prompt_data_weights": (1.0, 1.0)}).load_state_dict(given.state_dict())


def test_every_sample_has_its_own_seed(manager, engine):
    given = manager()
    given.generate(0)
    given.generate(1)
    seeds = {body["sampling_params"]["sampling_seed"] for body in engine.bodies}
    assert seeds == {sampling_seed(5, index) for index in range(12)}


def test_the_state_after_a_rollout_continues_with_the_next(manager):
    first = manager()
    first.generate(0)
    second = manager()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == first.state_dict()
    prompts = [[sample.prompt for sample in given.generate(1).samples] for given in (first, second)]
    assert prompts[0] == prompts[1]


def test_a_rollout_that_fails_takes_no_prompts(manager, engine, reply):
    given = manager()
    before = given.state_dict()
    engine.answer = lambda number, body: 400 if number == 4 else reply()
    with pytest.raises(GenerationError, match="refused a request"):
        given.generate(0)
    assert given.state_dict() == before
    engine.answer = lambda number, body: reply()
    assert [sample.index for sample in given.generate(0).samples] == list(range(6))


BUFFERED = {"data_source_path": "slime_rollout.data.RolloutDataSourceWithBuffer"}


def test_groups_given_back_are_finished_and_trained_on_once(manager, engine):
    given = manager(**BUFFERED)
    done, begun = given.source.get_samples(2)
    for sample in done:
        sample.append_response([9], text="9", log_probs=[-0.5], weight_version=1)
        sample.status, sample.reward = Status.COMPLETED, 0.25
    begun[0].append_response([9], text="9", log_probs=[-0.5], weight_version=1)
    begun[0].status = Status.ABORTED
    given.source.add_samples([done, begun])
    given.load_state_dict(json.loads(json.dumps(given.state_dict())))
    batch = given.generate(0)
    assert [sample.index for sample in batch.samples] == list(range(6))
    assert [(sample.response_tokens, sample.reward) for sample in batch.samples[:3]] == [([9], 0.25)] * 3
    assert [sample.response_tokens for sample in batch.samples[3:]] == [[9, 5, 6], [5, 6], [5, 6]]
    assert len(engine.bodies) == 3
    with pytest.raises(DataError, match="sample 0 cannot be given back: it is not out, so it was trained on"):
        given.source.add_samples(batch.groups[:1])
    assert [sample.index for sample in given.generate(1).samples] == list(range(6, 12))
    assert given.source.ledger.counts["trained"] == 12


def test_a_filter_that_fails_ends_the_rollout_and_loses_nothing(manager, tmp_path):
    (tmp_path / "own.py").write_text("def pick(args, buffer, num_samples): raise ValueError('no')\n")
    given = manager(**BUFFERED, buffer_filter_path=f"{tmp_path}/own.py:pick")
    given.source.add_samples(given.source.get_samples(1))
    before = given.state_dict()
    with pytest.raises(DataError, match="--buffer-filter-path raised ValueError: no"):
        given.generate(0)
    assert given.state_dict() == before


def test_a_ledger_that_does_not_balance_is_printed_in_every_step(manager, tmp_path, caplog):
    (tmp_path / "own.py").write_text(
        "from slime_rollout.data import RolloutDataSource\n"
        "class Loses(RolloutDataSource):\n"
        "    def get_samples(self, num_groups):\n"
        "        return super().get_samples(num_groups + (self.epoch == 0))[:num_groups]\n"
    )
    given = manager(data_source_path=f"{tmp_path}/own.py:Loses")
    given.generate(0)
    given.generate(1)
    lost = [record.message for record in caplog.records if "does not balance" in record.message]
    assert [text.partition(":")[0] for text in lost] == ["rollout 0", "rollout 1"]
    assert "out, neither trained on nor given back: 3 (samples 6, 7, 8)" in lost[0]
    caplog.clear()
    manager().generate(0)
    assert not caplog.records


def test_an_aborted_sample_ends_the_rollout(manager, engine, reply):
    engine.answer = lambda number, body: reply(finish={"type": "abort", "message": "Aborted"})
    with pytest.raises(GenerationError, match=r"aborted sample \d after 1 tokens"):
        manager().generate(0)


def test_a_reward_by_name_needs_its_key(manager, tmp_path):
    (tmp_path / "own.py").write_text(
        "def score(args, sample): return {'right': sample.index % 2, 'n': args.rm_timeout}\n"
    )
    own = {"rm_type": None, "custom_rm_path": f"{tmp_path}/own.py:score", "rm_timeout": 7.0}
    batch = manager(**own, reward_key="right").generate(0)
    assert [sample.reward for sample in batch.samples] == [{"right": float(i % 2), "n": 7.0} for i in range(6)]
    assert batch.metrics["raw_reward"] == 0.5
    with pytest.raises(DataError, match=r"the reward has the entries \['n', 'right'\]; choose one with --reward-key"):
        manager(**own).generate(0)


@pytest.mark.parametrize("group", [False, True])
def test_a_reward_that_fails_costs_its_samples(manager, tmp_path, group):
    (tmp_path / "own.py").write_text(
        "def score(args, sample): return {'right': 1 / (sample.index - 4)}\n"
        "def together(args, samples): return [score(args, sample) for sample in samples]\n"
    )
    path = f"{tmp_path}/own.py:{'together' if group else 'score'}"
    given = manager(rm_type=None, custom_rm_path=path, group_rm=group, reward_key="right", rm_on_failure="drop")
    batch = given.generate(0)
    failed = [
        sample for sample in batch.samples if "raised ZeroDivisionError" in sample.metadata.get("reward_failure", "")
    ]
    assert [sample.index for sample in failed] == ([3, 4, 5] if group else [4])
    assert batch.metrics["reward_failures"] == len(failed)
    assert all(sample.reward == {"right": 0.0} and sample.remove_sample for sample in failed)
    assert not any(sample.remove_sample for sample in batch.samples if sample not in failed)
    assert batch.columns().batch() == batch


@pytest.mark.parametrize("group", [False, True])
def test_no_reward_arises_from_a_failure(manager, tmp_path, group):
    """Of a judge that fails at random, none of its failures is a reward: groups are scored again, and stay whole."""
    (tmp_path / "own.py").write_text(
        "import random\nchance, calls = random.Random(7), []\n"
        "def score(args, sample):\n"
        "    calls.append(sample.index)\n"
        "    if chance.random() < 0.5 or sample.index == 4:\n        raise ConnectionError('the judge was killed')\n"
        "    return 2.0\n"
        "def together(args, samples): return [score(args, sample) for sample in samples]\n"
    )
    path = f"{tmp_path}/own.py:{'together' if group else 'score'}"
    given = manager(rm_type=None, custom_rm_path=path, group_rm=group)
    replaced = 0
    for number in range(2):
        batch = given.generate(number)
        assert [len(members) for members in batch.groups] == [3, 3]
        assert {sample.reward for sample in batch.samples} == {2.0}
        assert not any({"reward_failure", "reward_unreadable"} & {*sample.metadata} for sample in batch.samples)
        assert "reward_failures" not in batch.metrics and 4 not in {sample.index for sample in batch.samples}
        replaced += batch.metrics.get("dynamic_filter/drop_reward_failure", 0)
    counts = given.source.ledger.counts
    assert replaced >= 1 and counts["filtered"] == 3 * replaced and counts["trained"] == 12
    assert given.source.check_ledger() is None


def test_a_grader_that_is_killed_gives_no_reward(manager, engine, reply, caplog):
    """The process that scores is killed twice while a score is awaited: that is scored again."""
    given, killed = manager(rm_type="math", rm_workers=1, rm_timeout=60.0), []
    engine.answer = lambda number, body: reply(text=rf"{number} \boxed{{{number % 2}}}")
    pipeline = given._collector._pipeline
    plain, turn, scored = pipeline._scorer.reward, asyncio.Lock(), []

    async def reward(sample):
        async with turn:
            asked = asyncio.create_task(plain(sample))
            if scored and len(killed) < 2:
                await asyncio.sleep(0)
                killed.extend(kill_keepers())
            scored.append(await asked)
            return scored[-1]

    pipeline._scorer = Scorer(reward)
    batch = given.generate(0)
    assert len(killed) == 2 and "ended with exit code" in caplog.text
    for sample in batch.samples:
        assert "reward_failure" not in sample.metadata
        assert sample.reward == float(sample.response.endswith(rf"\boxed{{{sample.group_index}}}"))


def kill_keepers():
    """Kill the processes of this one that keep verifiers; their numbers."""
    tasks = Path("/proc/self/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    keepers = [pid for pid in children if b"slime_rollout.rewards.pool" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    return keepers


def test_held_out_prompts_that_cannot_be_scored_are_left_out(manager, tmp_path, write_rows, caplog):
    (tmp_path / "own.py").write_text(
        "def score(args, sample):\n"
        "    if sample.label in 'bx':\n        raise ConnectionError('the judge was killed')\n"
        "    return 1.0\n"
    )
    mixed = write_rows([{"prompt": one, "label": one} for one in "abc"], "mixed.jsonl")
    own = {"rm_type": None, "custom_rm_path": f"{tmp_path}/own.py:score"}
    report = manager(**own, eval_prompt_data=("mixed", mixed)).evaluate(0)
    assert report.scores == {"mixed": 1.0} and len(report.samples["mixed"]) == 2
    assert "held-out set mixed: 1 of 3 prompts could not be scored" in caplog.text
    broken = write_rows([{"prompt": "x", "label": "x"}], "broken.jsonl")
    with pytest.raises(
        RewardError, match=r"held-out set .*none of its 1 prompts could be scored: .*the judge was kill"
    ):
        manager(**own, eval_prompt_data=("broken", broken)).evaluate(0)


def test_a_reward_that_never_works_ends_the_run(manager, tmp_path):
    (tmp_path / "own.py").write_text("def score(args, sample): raise ValueError('no')\n")
    given = manager(rm_type=None, custom_rm_path=f"{tmp_path}/own.py:score")
    with pytest.raises(RewardError, match=r"own\.py:score has failed 64 times in a row .*raised ValueError for sample"):
        for number in range(64):
            given.generate(number)


def test_a_function_scores_whole_groups(manager, tmp_path, write_rows):
    (tmp_path / "own.py").write_text(
        "async def ranks(args, samples):\n"
        "    assert len({sample.group_index for sample in samples}) == 1\n"
        "    return [len(samples) + place / 10 for place in range(len(samples))]\n"
    )
    held_out = write_rows([{"prompt": "a"}, {"prompt": "b"}], "held_out.jsonl")
    given = manager(
        rm_type=None,
        custom_rm_path=f"{tmp_path}/own.py:ranks",
        group_rm=True,
        eval_prompt_data=("one", held_out, "two", held_out),
        n_samples_per_eval_prompt=2,
    )
    assert [sample.reward for sample in given.generate(0).samples] == [3.0, 3.1, 3.2] * 2
    report = given.evaluate(0)
    assert {name: [one.reward for one in scored] for name, scored in report.samples.items()} == {
        "one": [2.0, 2.1] * 2,
        "two": [2.0, 2.1] * 2,
    }


def test_a_rollout_ends_although_a_verifier_does_not(manager, engine, reply):
    given = manager(rm_type="math", rm_timeout=2.0, rm_workers=2)
    answers = [r"\boxed{10000000!}", r"\boxed{0.0}", r"\boxed{\frac{3}{3}}"]
    engine.answer = lambda number, body: reply(text=answers[number % 3])
    batch = given.generate(0)
    right = {r"\boxed{0.0}": 0, r"\boxed{\frac{3}{3}}": 1}  # by group
    assert [sample.reward for sample in batch.samples] == [
        float(right.get(sample.response) == sample.group_index) for sample in batch.samples
    ]
    failed = [sample for sample in batch.samples if "reward_failure" in sample.metadata]
    assert [sample.response for sample in failed] == [answers[0]] * 2
    assert batch.columns().batch() == batch


def test_works_in_a_thread(manager):
    given, batches = manager(), []
    thread = threading.Thread(target=lambda: batches.append(given.generate(0)))
    thread.start()
    thread.join(30)
    assert len(batches[0].samples) == 6


def test_ctrl_c_stops_a_rollout_and_the_position_stays(engine, tokenizer_dir, write_rows):
    asked = threading.Event()

    async def never(number, body):
        asked.set()
        await asyncio.sleep(120)

    engine.answer = never
    code = f"""
from slime_rollout.config import RolloutConfig
from slime_rollout.rollout import RolloutManager
config = RolloutConfig.of(hf_checkpoint={tokenizer_dir!r}, prompt_data={write_rows(ROWS)!r}, rollout_batch_size=2)
manager = RolloutManager(config, router_url={engine.url!r}, run_seed=0)
try:
    manager.generate(0)
except KeyboardInterrupt:
    print("position", manager.state_dict()["position"])
"""
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert asked.wait(120)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    assert (child.returncode, out, err) == (0, b"position 0\n", b"")


def test_the_example_of_the_readme_runs(engine, reply, tokenizer_dir, tmp_path, monkeypatch, capsys):
    engine.answer = lambda number, body: reply(text="42")

    def start(*args, **kwargs):
        real.bind(*args, **kwargs)
        return contextlib.nullcontext(types.SimpleNamespace(router_url=engine.url))

    real = inspect.signature(EngineFleet.start)
    monkeypatch.setattr(EngineFleet, "start", start)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "path/to/model" in example
    exec(compile(example.replace("path/to/model", tokenizer_dir), "README.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(engine.bodies) == 4 * 8
    assert lines[0] == "'10 + 26 =42' 0.0 -2.0"
