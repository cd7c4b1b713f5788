import asyncio
import base64
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from slime_core.errors import ConfigError
from slime_core.types import Sample, Status
from slime_core.types.routed import routed_rows
from slime_rollout.config import RolloutConfig
from slime_rollout.eval_sets import read_eval_sets
from slime_rollout.generate import (
    EngineClient,
    GenerationContext,
    SamplingParams,
    generate_sample,
    sampling_seed,
    single_turn,
)

GIVEN = {
    "hf_checkpoint": "m",
    "prompt_data": "p",
    "rollout_batch_size": 1,
    "rollout_temperature": 0.7,
    "rollout_top_p": 0.9,
    "rollout_top_k": 40,
    "rollout_max_response_len": 64,
    "rollout_stop": ("\n",),
    "rollout_stop_token_ids": (7,),
}
ROLLOUT = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, max_new_tokens=64, stop=("\n",), stop_token_ids=(7,))


def evaluation(**changes):
    (held_out,) = read_eval_sets(RolloutConfig.of(**GIVEN, eval_prompt_data=("held_out.jsonl",), **changes))
    return SamplingParams.for_evaluation(held_out)


def test_rollout_and_evaluation():
    assert SamplingParams.for_rollout(RolloutConfig.of(**GIVEN)) == ROLLOUT
    assert evaluation() == ROLLOUT
    own = {"eval_temperature": 0.0, "eval_top_p": 1.0, "eval_top_k": -1, "eval_max_response_len": 8}
    assert evaluation(**own, eval_max_context_len=9, eval_min_new_tokens=2) == SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_new_tokens=8,
        max_context=9,
        stop=("\n",),
        stop_token_ids=(7,),
        min_new_tokens=2,
    )


def test_request():
    assert ROLLOUT.to_request(5) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "max_new_tokens": 64,
        "stop": ["\n"],
        "stop_token_ids": [7],
        "no_stop_trim": True,
        "skip_special_tokens": True,
        "sampling_seed": 5,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "ignore_eos": False,
    }


@pytest.mark.parametrize(
    ("given", "top_k"), [({"top_p": 0.9}, 4000), ({"min_p": 0.1}, 4000), ({"top_k": 40}, 40), ({}, None)]
)
def test_what_was_sampled_from_is_asked_for_where_it_is_trained_on(engine, reply, given, top_k):
    answer = reply(tokens=(5, 6))
    sets = {"output_token_sampling_mask": [[5, 9], [6]], "output_token_sampling_logprobs": [-0.25, 0.0]}
    answer["meta_info"] |= sets
    engine.answer = lambda number, body: answer

    async def run(stream):
        sample = Sample(index=0, group_index=0, prompt="p", tokens=[1])
        async with EngineClient(engine.url, concurrency=1, timeout=20) as client:
            context = GenerationContext(client=client, params=SamplingParams(**given), run_seed=1, stream=stream)
            await generate_sample(sample, context)
        return sample

    sample = asyncio.run(run("rollout"))
    assert sample.kept_tokens == (None if top_k is None else "5 9;6;")
    assert sample.rollout_log_probs == ([-0.5, -1.5] if top_k is None else [-0.25, 0.0])
    assert engine.bodies[-1].get("return_sampling_mask", False) is (top_k is not None)
    assert engine.bodies[-1]["sampling_params"]["top_k"] == (top_k or -1)
    sample = asyncio.run(run("eval/held"))
    assert sample.kept_tokens is None
    assert "return_sampling_mask" not in engine.bodies[-1]
    assert engine.bodies[-1]["sampling_params"]["top_k"] == given.get("top_k", -1)


def test_a_request_takes_its_former_argument_with_a_warning():
    context = GenerationContext(client=None, params=SamplingParams(), run_seed=1)
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1])
    with pytest.warns(DeprecationWarning, match="is now most="):
        assert context.request(sample, room=3) == context.request(sample, most=3)
    assert context.request(sample, most=3)["sampling_params"]["max_new_tokens"] == 3


def test_experts_are_asked_for_from_the_first_unknown_token_on(engine, reply):
    """Of samples that are trained on."""

    def answer(number, body):
        made = reply(tokens=(5, 6))
        if body.get("return_routed_experts"):
            rows = len(body["input_ids"]) + 1 - body["routed_experts_start_len"]
            numbers = np.arange(2 * rows, dtype="<i4") + 100 * number
            made["meta_info"]["routed_experts"] = base64.b64encode(numbers.tobytes()).decode()
        return made

    engine.answer = answer

    async def run(sample, stream="rollout"):
        async with EngineClient(engine.url, concurrency=1, timeout=20) as client:
            params = SamplingParams(max_new_tokens=9)
            context = GenerationContext(client=client, params=params, run_seed=1, stream=stream, with_experts=True)
            await generate_sample(sample, context)
        return engine.bodies[-1]

    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2])
    assert asyncio.run(run(sample))["routed_experts_start_len"] == 0
    assert len(routed_rows("s", sample.routed_experts)) == 3
    sample.status = Status.ABORTED
    assert asyncio.run(run(sample))["routed_experts_start_len"] == 3
    rows = routed_rows("s", sample.routed_experts).tolist()
    assert (rows[:3], len(rows)) == ([[0, 1], [2, 3], [4, 5]], len(sample.tokens) - 1)
    assert rows[3] == [100, 101]
    held_out = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2])
    assert "return_routed_experts" not in asyncio.run(run(held_out, "eval/held"))
    assert held_out.routed_experts is None


def test_special_tokens_are_left_out_of_texts_unless_flag_or_set_keep_them(tmp_path):
    plain, kept = (RolloutConfig.of(**GIVEN, no_rollout_skip_special_tokens=keep) for keep in (False, True))
    assert [SamplingParams.for_rollout(one).skip_special_tokens for one in (plain, kept)] == [True, False]
    assert [SamplingParams.for_evaluation(evaluated).skip_special_tokens for evaluated in held_out_of(tmp_path)] == [
        *(True, False),
        *(False, True),
    ]
    with pytest.raises(ConfigError, match="--no-rollout-skip-special-tokens contradict each other; give one"):
        RolloutConfig.of(**GIVEN, rollout_skip_special_tokens=True, no_rollout_skip_special_tokens=True)


def held_out_of(tmp_path):
    """Two sets of each of two runs: one as the run, the other the opposite."""
    for keep in (False, True):
        path = tmp_path / "sets.yaml"
        sets = f"[{{name: a, path: x}}, {{name: b, path: x, skip_special_tokens: {str(keep).lower()}}}]"
        path.write_text(f"eval: {{datasets: {sets}}}")
        config = RolloutConfig.of(**GIVEN, no_rollout_skip_special_tokens=keep, eval_config=str(path))
        yield from read_eval_sets(config)


def test_the_least_length_yields_to_the_longest():
    params = evaluation(eval_min_new_tokens=10)
    assert params.to_request(5)["min_new_tokens"] == 10
    assert params.to_request(5, max_new_tokens=4)["min_new_tokens"] == 4


def test_the_seed_is_what_it_was():
    assert sampling_seed(1234, 7) == 77130567019160112  # written down: must not change between versions


def test_other_processes_agree():
    code = "from slime_rollout.generate import sampling_seed; print(sampling_seed(1234, 7))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "5"},
    )
    assert int(done.stdout) == sampling_seed(1234, 7)


@given(st.integers(), st.integers(0), st.integers(0))
def test_fits_a_signed_64_bit_number(run_seed, index, turn):
    assert 0 <= sampling_seed(run_seed, index, turn) < 2**63


def test_all_parts_count():
    seeds = [
        sampling_seed(run, index, turn, stream)
        for run in range(5)
        for index in range(40)
        for turn in range(5)
        for stream in ("rollout", "eval/a")
    ]
    assert len(set(seeds)) == len(seeds)


def fresh(**changes):
    return Sample(index=3, group_index=1, prompt="p", tokens=[1, 2], **changes)


def run(engine, work, tokenizer=None, **params):
    """Do something with a context before the scripted engine."""

    async def inside():
        async with EngineClient(engine.url, concurrency=4, timeout=20.0) as client:
            settings = SamplingParams(**params)
            return await work(GenerationContext(client=client, params=settings, run_seed=5, tokenizer=tokenizer))

    return asyncio.run(inside())


def test_a_sample_is_filled_in(engine, reply):
    engine.answer = lambda number, body: reply(text="x", tokens=(7,), version="4", finish={"type": "length"})
    sample = fresh(response_length=1, session_id="s")  # whatever response it had is thrown away
    run(engine, lambda context: generate_sample(sample, context))
    assert (sample.tokens, sample.prompt_tokens, sample.response_tokens) == ([1, 7], [1], [7])
    assert (sample.response, sample.rollout_log_probs, sample.weight_versions) == ("x", [-0.5], [4])
    assert sample.status is Status.TRUNCATED
    (body,) = engine.bodies
    assert (body["input_ids"], body["sampling_params"]["sampling_seed"]) == ([1], sampling_seed(5, 3))
    assert engine.headers[0]["X-SMG-Routing-Key"] == "s"


def test_what_was_cut_off_goes_on_with_its_seed(engine, reply):
    engine.answer = lambda number, body: reply(text="b", tokens=(8,), version="6")
    sample = fresh()
    sample.append_response([7], text="a", log_probs=[-2.0], weight_version=5)
    sample.status = Status.ABORTED
    run(engine, lambda context: generate_sample(sample, context), max_new_tokens=9)
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 7, 8], "ab", 2)
    assert (sample.rollout_log_probs, sample.weight_versions) == ([-2.0, -0.5], [5, 6])
    assert sample.status is Status.COMPLETED
    (body,) = engine.bodies
    assert body["input_ids"] == [1, 2, 7]
    assert body["sampling_params"]["max_new_tokens"] == 8
    assert body["sampling_params"]["sampling_seed"] == sampling_seed(5, 3)


def test_the_last_token_before_a_cut_is_drawn_again(engine, reply, tokenizer):
    """It may end the response, which an engine that was told to abort does not look at."""
    tokens = tokenizer.encode("abc", add_special_tokens=False)
    engine.answer = lambda number, body: reply(text="abc", tokens=tokens, finish={"type": "abort"})
    sample = fresh()
    run(engine, lambda context: generate_sample(sample, context), tokenizer)
    assert (sample.tokens, sample.response, sample.status) == ([1, 2, *tokens[:2]], "ab", Status.ABORTED)
    assert sample.rollout_log_probs == [-0.5, -1.5]
    engine.answer = lambda number, body: reply(text="", tokens=[0])
    run(engine, lambda context: generate_sample(sample, context), tokenizer)
    assert (sample.tokens, sample.response, sample.status) == ([1, 2, *tokens[:2], 0], "ab", Status.COMPLETED)


def test_without_a_tokenizer_nothing_is_kept_of_what_was_cut_off(engine, reply):
    engine.answer = lambda number, body: reply(finish={"type": "abort"})
    sample = fresh()
    run(engine, lambda context: generate_sample(sample, context))
    assert (sample.tokens, sample.response, sample.status) == ([1, 2], "", Status.ABORTED)


@pytest.mark.parametrize("params", [{"max_new_tokens": 1}, {"max_context": 3}])
def test_without_room_nothing_is_asked(engine, params):
    sample = fresh()
    sample.append_response([7], text="a", log_probs=[-2.0])
    sample.status = Status.ABORTED
    run(engine, lambda context: generate_sample(sample, context), **params)
    assert (sample.status, sample.response_tokens, engine.bodies) == (Status.TRUNCATED, [7], [])


def test_the_context_limits_the_response(engine):
    run(engine, lambda context: generate_sample(fresh(), context), max_new_tokens=50, max_context=12)
    assert engine.bodies[0]["sampling_params"]["max_new_tokens"] == 10


def test_a_cut_off_response_without_log_probs_that_gets_no_tokens_stays_as_it_is(engine, reply):
    """Such as one that a custom function wrote, cut off again before the engine's first token."""
    engine.answer = lambda number, body: reply(text="", tokens=(), finish={"type": "abort", "message": "Aborted"})
    sample = fresh(status=Status.ABORTED)
    sample.append_response([9], text="9")
    run(engine, lambda context: generate_sample(sample, context))
    sample.validate()
    assert (sample.response_tokens, sample.rollout_log_probs, sample.status) == ([9], None, Status.ABORTED)


def test_a_character_on_both_sides_of_a_cut_is_whole(engine, reply, tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    tokens = tokenizer.encode("12 + é = 4", add_special_tokens=False)
    cut = next(place for place in range(len(tokens)) if "\ufffd" in tokenizer.decode(tokens[:place]))
    sample = fresh()
    sample.append_response(tokens[:cut], text=tokenizer.decode(tokens[:cut]), log_probs=[0.0] * cut)
    sample.status = Status.ABORTED
    last = tokenizer.decode(tokens[cut:])
    engine.answer = lambda number, body: reply(text=last[:-1], tokens=tokens[cut:])  # " =" was a stop string
    run(engine, lambda context: generate_sample(sample, context), tokenizer)
    assert sample.response == "12 + é = 4"
    assert sample.response_tokens == tokens


def test_of_a_group_only_what_is_unfinished_is_generated(engine):
    group = [fresh(), fresh(status=Status.TRUNCATED), fresh(status=Status.COMPLETED)]

    async def all_units(context):
        return [await unit for unit in single_turn(group, context)]

    assert run(engine, all_units) == [[sample] for sample in group]
    assert len(engine.bodies) == 1
    assert group[0].status is Status.COMPLETED
