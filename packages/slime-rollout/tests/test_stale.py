"""Samples that came back finished and are older than allowed: generated again, from their row's prompt."""

import json
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from slime_core.types import Status
from slime_rollout.generate import TurnLog


def test_finished_surplus_that_became_old_is_generated_anew(manager, engine, reply):
    version = {"now": "0"}
    engine.answer = lambda number, body: reply(text="1", version=version["now"])
    given_ = manager(over_sampling_batch_size=2, max_weight_staleness=1)
    (group,) = given_.source.get_samples(1)
    for sample in group:
        sample.append_response([9], text="1", log_probs=[-0.5], weight_version=0)
        sample.status, sample.reward = Status.COMPLETED, 1.0
    group[0].metadata["reward_failure"], group[0].remove_sample = "it hung", True  # of a response that is no more
    given_.source.add_samples([group])
    version["now"] = "2"
    batch = given_.generate(2)
    ours = [sample for sample in batch.samples if sample.group_index == 0]
    assert [sample.weight_versions for sample in ours] == [[2, 2]] * 3
    assert not any(sample.remove_sample or "reward_failure" in sample.metadata for sample in ours)
    assert batch.metrics["stale_samples"] == 3


HELD = """
import asyncio
version, held = [0], [False]

async def custom_generate(args, sample, sampling_params):
    while held[0]:
        await asyncio.sleep(0.01)
    sample.append_response([7], text="1", log_probs=[-1.0], weight_version=version[0])
    sample.status = "completed"
    return sample
"""


def test_a_manager_that_goes_back_with_its_trainers_trains_on_each_sample_once_and_on_no_old_token(manager, tmp_path):
    """Trainers are lost while a rollout is generated; then rollouts 0, 1 and 2 are read, each with its state."""
    (tmp_path / "own.py").write_text(HELD)
    given_ = manager(async_buffer_size=3, max_weight_staleness=1, custom_generate_function_path=f"{tmp_path}/own.py")
    own = given_._collector._pipeline._generate._function.__globals__
    trained, states = [], []
    for number in range(3):
        own["version"][0] = number
        batch = given_.generate(number)
        trained += [sample.index for sample in batch.samples]
        states.append(json.loads(json.dumps(given_.state_dict())))
    own["held"][0], own["version"][0] = True, 9
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(given_.generate, 5)  # nothing that waits is young enough
        while not given_._collector._running:
            time.sleep(0.01)
        given_.cancel()
        with pytest.raises(CancelledError):
            lost.result(20)
    for state in states:
        given_.load_state_dict(state)
    own["held"][0], own["version"][0] = False, 3
    batch = given_.generate(3)
    assert batch.metrics["staleness/max"] <= 1
    assert {version for sample in batch.samples for version in sample.weight_versions} <= {2, 3}
    trained += [sample.index for sample in batch.samples]
    assert len(trained) == len(set(trained)) == given_.source.ledger.counts["trained"] == 24


OTHER_PROMPT = """
import copy
version, seen = [0], []

async def custom_generate(args, sample, sampling_params):
    seen.append((sample.index, sample.prompt, list(sample.tokens)))
    first = copy.deepcopy(sample)
    first.prompt, first.tokens = "you are a robot; " + sample.prompt, [9, *sample.tokens]
    parts = [first, copy.deepcopy(first)]
    for part in parts:
        part.append_response([7], text="1", log_probs=[-1.0], weight_version=version[0])
        part.status = "completed"
    return parts
"""


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_generated_anew_begins_with_the_rows_prompt_not_with_a_functions(manager, tmp_path, restart):
    """Or whatever the function puts before it would be there twice."""
    (tmp_path / "own.py").write_text(OTHER_PROMPT)
    changes = {
        "over_sampling_batch_size": 3,
        "max_weight_staleness": 0,
        "custom_generate_function_path": f"{tmp_path}/own.py",
    }
    given_ = manager(**changes)
    batch = given_.generate(0)
    (surplus,) = given_.source._buffer
    assert [sample.status for sample in surplus] == [Status.COMPLETED] * 6
    if restart:
        state = given_.state_dict()
        given_ = manager(**changes)
        given_.load_state_dict(json.loads(json.dumps(state)))
    own = given_._collector._pipeline._generate._function.__globals__
    own["version"][0] = 1
    samples = [sample for sample in given_.generate(1).samples if sample.group_index == surplus[0].group_index]
    row = "say a number: 2"
    tokens = given_._collector._context.tokenizer(row)["input_ids"]
    assert {(prompt, *given) for index, prompt, given in own["seen"] if index in {6, 7, 8}} == {(row, *tokens)}
    assert [(sample.prompt, sample.tokens) for sample in samples] == [(f"you are a robot; {row}", [9, *tokens, 7])] * 6
    assert {version for sample in samples for version in sample.weight_versions} == {1}
    assert not any("rows_prompt" in sample.metadata for sample in [*batch.samples, *samples])


TURNS = """
from slime_rollout import Trajectory, call_tool
calls = []

def tool(index):
    calls.append(index)
    return index

async def custom_generate(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    await trajectory.generate(max_new_tokens=2)
    trajectory.observe([int(await call_tool(tool, sample.index)) + 20])
    await trajectory.generate(max_new_tokens=2)
    return sample
"""


@pytest.fixture
def turns(tmp_path):
    log = TurnLog(tmp_path / "turns.jsonl")
    yield log
    log.close()


def test_a_rollout_that_is_generated_again_calls_no_tool_again_and_a_written_one_is_forgotten(
    manager, engine, reply, tmp_path, turns
):
    (tmp_path / "own.py").write_text(TURNS)
    flags = {"custom_generate_function_path": f"{tmp_path}/own.py", "rollout_max_response_len": 20}
    engine.answer = lambda number, body: reply(text="1", version="0")
    first = manager(**flags, turns=turns)
    whole = first.generate(0)
    own = first._collector._pipeline._generate._function.__globals__["calls"]
    asked, count = len(engine.bodies), len(own)
    assert count == len(whole.samples) and asked == 2 * count
    again = manager(**flags, turns=turns)  # as after a kill before the rollout was written down
    own = again._collector._pipeline._generate._function.__globals__["calls"]
    own.clear()
    assert list(map(repr, again.generate(0).samples)) == list(map(repr, whole.samples))
    assert len(engine.bodies) == asked and own == []
    engine.answer = lambda number, body: reply(text="1", version="1")
    again.generate(1)
    assert len(engine.bodies) == 2 * asked
    assert not {sample.index for sample in whole.samples} & turns._entries.keys()


def test_turns_that_are_too_old_are_asked_again(manager, engine, reply, tmp_path, turns):
    (tmp_path / "own.py").write_text(TURNS)
    flags = {"custom_generate_function_path": f"{tmp_path}/own.py", "rollout_max_response_len": 20}
    engine.answer = lambda number, body: reply(text="1", version="0")
    manager(**flags, turns=turns).generate(0)
    engine.answer = lambda number, body: reply(text="1", version="1")
    batch = manager(**flags, turns=turns).generate(0, weight_version=1)
    assert {version for sample in batch.samples for version in sample.weight_versions} == {1, -1}
