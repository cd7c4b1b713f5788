"""Turns and tools' results survive a kill: what was written down is not asked again, nor taken for something else."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.types import Sample, Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate import Completion, TurnLog

LOOP = """
from pathlib import Path
from slime_rollout import Trajectory, call_tool

async def tool(number, *, name):
    calls = Path(__file__).with_name("calls.txt")
    calls.write_text((calls.read_text() if calls.exists() else "") + f"{name}{number} ")
    return {"name": name, "number": number}

async def custom_generate(args, sample, sampling_params):
    trajectory = Trajectory.start(sample)
    while not trajectory.done:
        turn = await trajectory.generate()
        if "=" not in turn:
            break
        for _ in range(2):
            found = await call_tool(tool, 42, name="a")
        trajectory.observe(f"<{found['number']}>")
    return sample
"""


def completion(**changes):
    values = {"text": "6", "tokens": [3, 4], "log_probs": [-0.1, -2.3456789012345678e-5], "weight_versions": [2, 2]}
    return Completion(**values, status=Status.COMPLETED, reason="stop", **changes)


def sample(index=10, tokens=(1, 2)):
    return Sample(index=index, group_index=0, prompt="p", tokens=list(tokens))


@pytest.fixture
def log(tmp_path):
    """A log, and the same after a kill."""
    opened = []

    def again():
        opened.append(TurnLog(tmp_path / "save" / "turns.jsonl"))
        return opened[-1]

    yield again
    for one in opened:
        one.close()


REQUEST = {"sampling_params": {"sampling_seed": 7, "stop": ["!"]}, "session_id": "s", "with_kept": False}


def test_a_turn_comes_back_as_it_was(log):
    kept, experts = [[3, 5], [4]], np.arange(6, dtype=np.int32).reshape(3, 2)
    done = completion(kept=kept, experts_TW=experts)
    first = log()
    assert first.turn(sample(), REQUEST) is None
    first.add_turn(sample(), REQUEST, done)
    found = log().turn(sample(), REQUEST | {"session_id": "another engine"})
    assert found == done and found.kept == kept
    np.testing.assert_array_equal(found.experts_TW, experts)
    assert found.experts_TW.dtype == np.int32


@pytest.mark.parametrize(
    ("other", "request_"),
    [
        (sample(index=11), REQUEST),
        (sample(tokens=(1, 3)), REQUEST),
        (sample(), REQUEST | {"sampling_params": {"sampling_seed": 8, "stop": ["!"]}}),
    ],
)
def test_what_was_asked_otherwise_is_asked(log, other, request_):
    log().add_turn(sample(), REQUEST, completion())
    assert log().turn(other, request_) is None


def test_only_complete_turns_of_allowed_weights_count(log):
    log().add_turn(sample(), REQUEST, dataclasses.replace(completion(), status=Status.ABORTED))
    assert log().turn(sample(), REQUEST) is None
    log().add_turn(sample(), REQUEST, completion())
    again = log()
    for versions, known in ((None, True), ((2, 2), True), ((0, 1), False), ((3, 5), False)):
        again.versions = versions
        assert (again.turn(sample(), REQUEST) is not None) == known


def test_a_line_that_a_kill_cut_off_is_left_out(log, tmp_path):
    log().add_turn(sample(), REQUEST, completion())
    path = tmp_path / "save" / "turns.jsonl"
    path.write_bytes(path.read_bytes() + b'{"sample": 11, "key": "a", "val')
    again = log()
    assert again.turn(sample(), REQUEST) == completion()
    again.add_turn(sample(11), REQUEST, completion())
    assert log().turn(sample(11), REQUEST) == completion()


def test_what_is_settled_is_forgotten(log, tmp_path):
    first = log()
    for index in range(4):
        first.add_tool(sample(index), ["t", [], {}, 0], "x" * 900_000)
    first.forget([0, 1, 2])
    assert first.tool(sample(0), ["t", [], {}, 0]) is None and first.tool(sample(3), ["t", [], {}, 0]) is not None
    assert (tmp_path / "save" / "turns.jsonl").stat().st_size < 1_000_000
    assert log().tool(sample(3), ["t", [], {}, 0]) == ["x" * 900_000]


def test_after_a_restart_what_the_first_rollout_did_not_ask_for_goes(log):
    first = log()
    for index in (2, 5, 6, 9):
        first.add_tool(sample(index), ["t", [], {}, 0], index)
    again = log()
    again.tool(sample(5), ["t", [], {}, 0])
    again.tool(sample(6), ["t", [], {}, 0])
    again.forget([5])
    assert [again.tool(sample(index), ["t", [], {}, 0]) for index in (2, 5, 6, 9)] == [None, None, [6], [9]]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(result=JSON)
def test_any_json_comes_back(tmp_path_factory, result):
    path = tmp_path_factory.mktemp("log") / "turns.jsonl"
    first = TurnLog(path)
    first.add_tool(sample(), ["t", [], {}, 0], result)
    again = TurnLog(path)
    assert again.tool(sample(), ["t", [], {}, 0]) == [result]
    first.close()
    again.close()


def test_numbers_of_numpy_come_back_plain(log):
    log().add_tool(sample(), ["t", [], {}, 0], {"a": np.float32(0.5), "b": np.arange(2)})
    assert log().tool(sample(), ["t", [], {}, 0]) == [{"a": 0.5, "b": [0, 1]}]


def test_a_tool_may_be_asked_for_any_text(log):
    log().add_tool(sample(), ["t", ["a\ud83d"], {}, 0], "found")
    assert log().tool(sample(), ["t", ["a\ud83d"], {}, 0]) == ["found"]
    assert log().tool(sample(), ["t", ["a\ud83e"], {}, 0]) is None


def test_what_is_no_json_is_refused(log):
    with pytest.raises(GenerationError, match="sample 10: a tool's result must be JSON"):
        log().add_tool(sample(), ["t", [], {}, 0], {1, 2})


@pytest.fixture
def answers(engine, reply, tokenizer, chat):
    """An engine whose answers depend on what it is asked alone."""
    [prompt] = chat()

    def answer(number, body):
        text = "say 42<|end|>" if len(body["input_ids"]) > len(prompt.tokens) else "6 * 7 =<|end|>"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return reply(text=text.removesuffix("<|end|>"), tokens=tokens, version="1", finish={"type": "stop"})

    engine.answer = answer
    return engine


def test_a_function_that_was_killed_goes_on_where_it_was(generate, custom, chat, answers, log, tmp_path):
    """Each of its turns and calls is the last one before a kill, once; the same call twice is two calls."""
    make, calls, path = custom(LOOP), tmp_path / "calls.txt", tmp_path / "save" / "turns.jsonl"
    ((whole,),) = generate(make, chat(), turns=log())
    assert len(answers.bodies) == 2 and calls.read_text() == "a42 a42 "
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    for known in range(len(lines) + 1):
        path.write_bytes(b"".join(lines[:known]))
        calls.write_text("")
        answers.bodies.clear()
        ((again,),) = generate(make, chat(), turns=log())
        assert again == whole
        assert len(answers.bodies) == 2 - (known >= 1) - (known >= 4)
        assert len(calls.read_text().split()) == 2 - (known >= 2) - (known >= 3)


def test_without_a_log_everything_is_asked(generate, custom, chat, answers, tmp_path):
    for times in (1, 2):
        generate(custom(LOOP), chat())
        assert len(answers.bodies) == 2 * times and (tmp_path / "calls.txt").read_text() == "a42 a42 " * times


def test_a_tool_without_json_ends_the_rollout(generate, custom, chat, answers):
    source = LOOP.replace('return {"name": name, "number": number}', "return object()")
    with pytest.raises(GenerationError, match=r"sample 10, .*tool: a tool's result must be JSON"):
        generate(custom(source), chat())


@pytest.mark.parametrize("name", ["turns.jsonl", "turns.tmp"])
def test_no_planted_link_is_followed(tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / name).symlink_to(tmp_path / "mine")
    TurnLog(tmp_path / "log" / "turns.jsonl").close()
    assert (tmp_path / "mine").read_text() == "mine"
