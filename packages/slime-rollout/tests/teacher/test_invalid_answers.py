"""Answers of a teacher that are invalid, one thing at a time: none gives log-probs, none hangs, each is said."""

import asyncio
import json
import random

import pytest
from aiohttp import web

from slime_core.types import Sample, Status
from slime_rollout.errors import TeacherError
from slime_rollout.teacher import TeacherLogProbs, TeacherVocabulary

pytestmark = pytest.mark.timeout(120)

FIRST, REST = 1000, [6, 7, 8, 9]  # the first token of a sample is its case
FORM = "answered in an unknown form"
VALUE, TOKEN, COUNT = "as the log-prob of token", "in the place of token", "instead of 4"


def right(tokens=REST):
    """As SGLang 0.5.23 answers, about the tokens from the last one of the prompt on."""
    entries = [[None if place == 0 else -4.25 - place, token, None] for place, token in enumerate(tokens)]
    meta = {
        "id": "0d36",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 5,
        "weight_version": "0",
        "input_token_logprobs": entries,
        "output_token_logprobs": [],
        "completion_tokens": 0,
        "cached_tokens": 1,
        "e2e_latency": 0.0333,
    }
    return {"text": "", "output_ids": [], "meta_info": meta}


def body_of(entries):
    """The right answer with other entries."""
    answer = right()
    answer["meta_info"]["input_token_logprobs"] = entries
    return json.dumps(answer).encode()


def with_part(place, part, value):
    entries = right()["meta_info"]["input_token_logprobs"]
    entries[place][part] = value
    return body_of(entries)


def all_cases():
    """Bodies, each with a part of what is said about it."""
    dice, whole = random.Random(49), json.dumps(right()).encode()
    no_json = [float("nan"), float("inf"), -float("inf"), 1e999, 10**400]
    cases = [(with_part(dice.randrange(1, 4), 0, value), FORM) for value in no_json]
    values = [None, True, "-1", [], [-1.0], {}, 0.5, 12.0, 1e300, -1e300, -1e30]
    cases += [(with_part(dice.randrange(1, 4), 0, value), VALUE) for value in values]
    tokens = [-1, 0, 10, 10**12, 6.0, 6.5, "6", None, True, [6], {}]
    cases += [(with_part(dice.randrange(4), 1, token), TOKEN) for token in tokens]
    entries = right()["meta_info"]["input_token_logprobs"]
    counts = [entries[1:], entries[:-1], [*entries, entries[-1]], entries * 2, [], {}, ""]
    cases += [(body_of(other), COUNT) for other in counts]
    cases.append((body_of(entries[::-1]), TOKEN))
    others = [None, 4, True, "abcd", [entries], [[]] * 4, [[-1.0]] * 4, [None] * 4, [-1.0] * 4, {"a": 1}]
    cases += [(body_of(other), COUNT if other == [entries] else FORM) for other in [*others, [{"token": 6}] * 4]]
    cases.append((whole.replace(b"input_token_logprobs", b"logprobs"), FORM))
    simple = [b"", b"null", b"[]", b"{}", b"7", b'"busy"', b"OK\n", b"<html>502</html>", b'{"error": "busy"}']
    simple += [b'{"error": {"message": "no", "code": 500}}', b'{"meta_info": null}', b'{"meta_info": []}']
    more = [b"[" + whole + b"]", whole + whole, b"data: " + whole, json.dumps(whole.decode()).encode(), bytes(900)]
    more += [whole.decode().encode("utf-16"), b"[" * 100_000, b'{"meta_info":' * 50_000, whole[:-1] + b",}"]
    more += [whole.replace(b"0.0333", b"NaN"), *(whole[:cut] for cut in dice.sample(range(1, len(whole)), 8))]
    return cases + [(body, FORM) for body in simple + more]


def teach(engine, bodies, **settings):
    """What asking a teacher that answers so raises, or ``None``, for one sample each; and the samples."""
    engine.answer = lambda number, body: web.Response(body=bodies[body["input_ids"][0] - FIRST])
    tokens = [[FIRST + number, *REST] for number in range(len(bodies))]
    samples = [
        Sample(index=number, group_index=0, prompt="p", tokens=own, response_length=3, status=Status.COMPLETED)
        for number, own in enumerate(tokens)
    ]

    async def run():
        teacher = TeacherLogProbs(engine.url, timeout=10.0, vocabulary=TeacherVocabulary(largest=9999), **settings)
        return await asyncio.gather(*map(teacher, samples), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(run(), 100)), samples


def test_the_right_answer_of_a_teacher_is_taken(engine):
    outcomes, (sample,) = teach(engine, [json.dumps(right()).encode()])
    assert (outcomes, sample.teacher_log_probs) == ([None], [-5.25, -6.25, -7.25])


def test_no_invalid_answer_gives_log_probs_and_each_is_an_error_that_names_the_teacher(engine):
    cases = all_cases()
    outcomes, samples = teach(engine, [body for body, _ in cases])
    assert len(cases) >= 50
    wrong = []
    for (body, said), outcome, sample in zip(cases, outcomes, samples, strict=True):
        start = f"sample {sample.index} of 5 tokens: the teacher at {engine.url}/generate "
        words = str(outcome)
        if type(outcome) is not TeacherError or not words.startswith(start) or said not in words or "\n" in words:
            wrong.append(f"{body[:400]!r} (expected: {said}): {outcome!r}"[:700])
        assert sample.teacher_log_probs is None or outcome is None
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])
