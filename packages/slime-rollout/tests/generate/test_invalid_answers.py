"""Answers of an engine that are invalid, one thing at a time: none becomes a sample, none hangs, each is said.

Begins with what SGLang 0.5.23 answers. `test_client_fuzz.py` has answers at random.
"""

import asyncio
import base64
import contextlib
import copy
import gzip
import json
import random
from typing import NamedTuple

import numpy as np
import pytest
from aiohttp import web

from slime_rollout.errors import GenerationError
from slime_rollout.generate import EngineClient

pytestmark = pytest.mark.timeout(120)

VOCABULARY, PROMPT, MOST = 300, [5, 6, 7], 5
TOKENS, LOG_PROBS = [139, 222, 255, 2, 28], [-2.3427, -3.0911, -0.0004, -7.25, -1.5]
KEPT = [[139, 4], [222], [255, 9, 12], [2, 1], [28, 299]]
DELETED = object()
PLAIN, WITH_KEPT, WITH_EXPERTS = {}, {"with_kept": True}, {"experts_from": 0}
EXPERTS = np.arange((len(PROMPT) - 1 + len(TOKENS)) * 4, dtype="<i4") % 8
SECONDS = 2.0  # of a request whose answer never ends; the others have more, for a busy machine
LATE = f"no answer within {SECONDS:g} s"


def right(asked=PLAIN):
    """As SGLang 0.5.23 answers on a CPU."""
    meta = {
        "id": "7f6c",
        "finish_reason": {"type": "length", "length": MOST},
        "prompt_tokens": len(PROMPT),
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[value, token, None] for value, token in zip(LOG_PROBS, TOKENS, strict=True)],
        "reasoning_tokens": 0,
        "completion_tokens": len(TOKENS),
        "cached_tokens": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 5}],
        "e2e_latency": 0.0413,
    }
    if asked is WITH_KEPT:
        meta["output_token_sampling_mask"] = copy.deepcopy(KEPT)
        meta["output_token_sampling_logprobs"] = [value / 2 for value in LOG_PROBS]
    if asked is WITH_EXPERTS:
        meta["routed_experts"] = base64.b64encode(EXPERTS.tobytes()).decode()
    return {"text": "a 42", "output_ids": list(TOKENS), "meta_info": meta}


class Case(NamedTuple):
    """What is answered to a request for what is ``asked``, and a part of what is said about it."""

    name: str
    asked: dict
    answer: object  # bytes, or what makes a response of an aiohttp server
    said: str


def changed(*path, to, asked=PLAIN):
    """The right answer with another value at a place, or without it."""
    answer = right(asked)
    place = answer
    for key in path[:-1]:
        place = place[key]
    if to is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(answer).encode()


def replaced(cases, what, values, said, *path, asked=PLAIN):
    """Cases with each of these values at a place."""
    for value in values:
        shown = "nothing" if value is DELETED else json.dumps(value)[:40]
        cases.append(Case(f"{what} {len(cases)}: {shown}", asked, changed(*path, to=value, asked=asked), said))


WRONG_TOKENS = [-1, VOCABULARY, 2**31 - 1, 2**31, 2**63, 10**30, 5.0, 5.5, 1e400, True, "5", "", None, [5], {}]
WRONG_LOG_PROBS = [float("nan"), float("inf"), -float("inf"), -1e300, 0.5, 7.25, 1e300, "-0.5", True, None, [], {}]
FORM = "unknown form"


def token_cases(dice):
    cases = []
    for value in WRONG_TOKENS:
        place = dice.randrange(len(TOKENS))
        for where in ("ids", "log-probs", "both"):
            answer = right()
            if where != "log-probs":
                answer["output_ids"][place] = value
            if where != "ids":
                answer["meta_info"]["output_token_logprobs"][place][1] = value
            if where == "log-probs":
                said = "the log-prob of token" if type(value) is int else FORM
            else:
                said = "vocabulary of 300" if type(value) is int and 0 <= value < 2**31 else FORM
            name = f"token in {where} at {place}: {json.dumps(value)}"
            cases.append(Case(name, PLAIN, json.dumps(answer).encode(), said))
    for value in WRONG_LOG_PROBS:
        place = dice.randrange(len(TOKENS))
        replaced(cases, f"log-prob at {place}", [value], FORM, "meta_info", "output_token_logprobs", place, 0)
    return cases


def list_cases(dice):
    cases = []
    swapped = dice.sample(TOKENS, len(TOKENS))
    entries = right()["meta_info"]["output_token_logprobs"]
    ids = [TOKENS[:-1], TOKENS[1:]]
    replaced(cases, "fewer ids", ids, "5 log-probs for 4 tokens", "output_ids")
    ids = [[], [*TOKENS, 28], [*TOKENS, *TOKENS]]
    replaced(cases, "more ids, or none", ids, "weight versions of other tokens", "output_ids")
    replaced(cases, "ids in another order", [TOKENS[::-1], swapped], "the log-prob of token", "output_ids")
    others = [DELETED, None, {}, "139", 139, [TOKENS], {"0": 139}, True]
    replaced(cases, "ids that are no list", others, FORM, "output_ids")
    place = "meta_info", "output_token_logprobs"
    lengths = [entries[:-1], entries[1:], [*entries, entries[0]], [], None, DELETED]
    replaced(cases, "log-probs of another length", lengths, "log-probs for 5 tokens", *place)
    replaced(cases, "log-probs in another order", [entries[::-1]], "the log-prob of token", *place)
    others = [{}, "x", -0.5, LOG_PROBS, [[]] * 5, [[-0.5]] * 5, [entries], [None] * 5, [[*entries[0], 1]] * 5, [{}] * 5]
    replaced(cases, "log-probs that are no list of them", others, FORM, *place)
    for count in (MOST + 1, MOST + 50):
        answer = right()
        more = [dice.randrange(VOCABULARY) for _ in range(count)]
        answer["output_ids"], answer["meta_info"]["completion_tokens"] = more, count
        answer["meta_info"]["output_token_logprobs"] = [[-0.5, token, None] for token in more]
        answer["meta_info"]["weight_versions"][-1]["end"] = count
        cases.append(
            Case(f"{count} tokens", PLAIN, json.dumps(answer).encode(), f"{count} tokens where at most {MOST}")
        )
    for kind in ("stop", "length"):
        answer = right()
        answer["output_ids"], answer["meta_info"]["completion_tokens"] = [], 0
        answer["meta_info"] |= {"finish_reason": {"type": kind}, "output_token_logprobs": [], "weight_versions": []}
        cases.append(Case(f"{kind} without a token", PLAIN, json.dumps(answer).encode(), "without a token"))
    for count in (1, 4, 6, 10**6):
        replaced(cases, "count of tokens", [count], f"says that it sampled {count}", "meta_info", "completion_tokens")
    replaced(cases, "count of tokens", [-5, "5", 5.5, [5]], FORM, "meta_info", "completion_tokens")
    return cases


def field_cases():
    cases = []
    finish = [
        DELETED,
        None,
        "stop",
        "",
        0,
        True,
        [],
        {},
        {"type": "bored"},
        {"type": None},
        {"type": 1},
        {"type": ["stop"]},
    ]
    finish += [{"type": "STOP"}, {"type": ""}, {"type": "abort", "message": 5}, {"type": "abort", "message": ["x"]}]
    replaced(cases, "end", finish, FORM, "meta_info", "finish_reason")
    nan = {"type": "stop", "matched": "NaN happened"}
    replaced(cases, "end", [nan], "were not numbers", "meta_info", "finish_reason")
    versions = [DELETED, None, 17, 1.0, True, [], {}, ["1"]]
    replaced(cases, "version", versions, FORM, "meta_info", "weight_version")
    versions = ["", "nightly", "-1", "1.0", " 1", "1_0", "٣", "9" * 19, "1" * 5000, "v1", "null"]
    replaced(cases, "version", versions, "names its weight version", "meta_info", "weight_version")
    replaced(cases, "version", ["incomplete"], "an update that failed", "meta_info", "weight_version")
    spans = [{}, "3", 3, True, [None], ["3"], [{}], [[0, 5]], [{"version": 3, "start": 0, "end": 5}]]
    spans += [
        [{"version": "3", "start": start, "end": end}]
        for start, end in ((-1, 5), (0, -1), (0, 5.5), ("0", 5), (None, 5))
    ]
    replaced(cases, "spans", spans, FORM, "meta_info", "weight_versions")
    for places in ([(0, 4)], [(1, 5)], [(0, 2), (3, 5)], [(0, 3), (2, 5)], [(2, 5), (0, 2)], [(3, 1), (1, 5)], []):
        value = [{"version": str(at), "start": start, "end": end} for at, (start, end) in enumerate(places)]
        replaced(cases, "spans", [value], "names weight versions of other tokens", "meta_info", "weight_versions")
    replaced(cases, "text", [DELETED, None, 42, ["a"], {}], FORM, "text")
    replaced(cases, "meta_info", [DELETED, None, [], {}, "x", 1, [right()["meta_info"]]], FORM, "meta_info")
    return cases


def kept_cases(dice):
    cases = []
    mask, log_probs = ("meta_info", "output_token_sampling_mask"), ("meta_info", "output_token_sampling_logprobs")
    lengths = [DELETED, None, [], KEPT[:-1], [*KEPT, [1]]]
    replaced(cases, "kept", lengths, "what they were sampled from", *mask, asked=WITH_KEPT)
    lengths = [DELETED, None, [], LOG_PROBS[1:], [*LOG_PROBS, -1.0]]
    replaced(cases, "kept log-probs", lengths, "what they were sampled from", *log_probs, asked=WITH_KEPT)
    place = dice.randrange(len(TOKENS))
    lacking = [[], [1], [token for token in range(9) if token != TOKENS[place]]]
    replaced(cases, f"kept at {place}", lacking, "from tokens without it", *mask, place, asked=WITH_KEPT)
    others = [None, 5, "5", {}, [None], ["5"], [5.0], [True], [-1], [2**31], [[5]]]
    replaced(cases, f"kept at {place}", others, FORM, *mask, place, asked=WITH_KEPT)
    beyond = [[TOKENS[place], VOCABULARY], [2**31 - 1, TOKENS[place]]]
    replaced(cases, f"kept at {place}", beyond, "vocabulary of 300", *mask, place, asked=WITH_KEPT)
    replaced(cases, f"kept at {place}", [[TOKENS[place]] * 2], "twice", *mask, place, asked=WITH_KEPT)
    replaced(cases, "kept log-prob", WRONG_LOG_PROBS, FORM, *log_probs, place, asked=WITH_KEPT)
    return cases


def expert_cases():
    def coded(numbers, kind="<i4"):
        return base64.b64encode(np.array(numbers, kind).tobytes()).decode()

    cases, field = [], ("meta_info", "routed_experts")
    row = list(EXPERTS)
    texts = [DELETED, None, "", coded([]), coded(row[:-1]), coded([*row, 1]), coded([*row[:-1], -1]), coded([3] * 6)]
    replaced(cases, "experts", [*texts, coded(row[:-4])], "numbers of experts for 7 tokens", *field, asked=WITH_EXPERTS)
    huge = [coded([*row[:-1], 65536]), coded([*row[:-1], 2**31 - 1]), coded(row, "<f4")]
    replaced(cases, "experts", huge, "numbers of experts for 7 tokens", *field, asked=WITH_EXPERTS)
    texts = ["no base64", coded(row)[:-3], coded(row) + "=", "AAA=", "é" * 8]
    replaced(cases, "experts", texts, "routed_experts are invalid", *field, asked=WITH_EXPERTS)
    replaced(cases, "experts", [row[0].item(), EXPERTS.tolist(), {}, True], FORM, *field, asked=WITH_EXPERTS)
    return cases


def body_cases(dice):
    whole = json.dumps(right()).encode()
    bodies = {
        "empty": b"",
        "HTML": b"<html><body><h1>502 Bad Gateway</h1></body></html>",
        "words": b"OK\n",
        "an error": b'{"error": {"message": "out of memory", "code": 500}}',
        "an error as text": b'{"error": "busy"}',
        "refused": b'{"success": false, "message": "no"}',
        "null": b"null",
        "a number": b"42",
        "a list": b"[]",
        "a list with it": b"[" + whole + b"]",
        "it twice": whole + whole,
        "as events": b"data: " + whole + b"\n\ndata: [DONE]\n\n",
        "as text": json.dumps(whole.decode()).encode(),
        "OpenAI's": b'{"id": "1", "object": "text_completion", "choices": [{"text": "42", "finish_reason": "stop"}]}',
        "UTF-16": whole.decode().encode("utf-16"),
        "UTF-8 cut": whole.replace(b"a 42", b"\xe2\x82"),
        "zeros": bytes(5000),
        "deep": b"[" * 100_000,
        "deep in a field": whole.replace(b'"7f6c"', b"[" * 50_000 + b"]" * 50_000),
        "Python's": repr(right()).encode(),
        "comments": whole[:-1] + b"// the end\n}",
        "comma": whole[:-1] + b",}",
        "NaN among what is skipped": whole.replace(b"0.0413", b"NaN"),
        "half": gzip.compress(whole),
    }
    cases = [Case(f"body: {name}", PLAIN, body, FORM) for name, body in bodies.items()]
    cuts = sorted(dice.sample(range(1, len(whole)), 20))
    return cases + [Case(f"body: the first {cut} bytes", PLAIN, whole[:cut], FORM) for cut in cuts]


async def in_drops(request):
    """A space each 50 ms, which JSON may begin with."""
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)
    return response


async def never(request):
    await asyncio.sleep(60)


def broken_off(part):
    async def answer(request):
        response = web.StreamResponse(headers={"Content-Length": "5000"})
        await response.prepare(request)
        await response.write(json.dumps(right()).encode()[:part])
        request.transport.close()
        return response

    return answer


def unpacked(body, encoding):
    async def answer(request):
        return web.Response(body=body, headers={"Content-Encoding": encoding})

    return answer


def status(number, **headers):
    async def answer(request):
        return web.Response(status=number, body=json.dumps(right()).encode(), headers=headers)

    return answer


def wire_cases():
    whole = json.dumps(right()).encode()
    cases = {
        "in drops": (in_drops, LATE),
        "never": (never, LATE),
        "closed at once": (broken_off(0), "failed 1 times, at last with"),
        "closed halfway": (broken_off(200), "failed 1 times, at last with"),
        "closed after it": (broken_off(5000), "failed 1 times, at last with"),
        "not packed": (unpacked(whole, "gzip"), "not of the Content-Encoding gzip"),
        "cut while packed": (unpacked(gzip.compress(whole)[:-9], "gzip"), "is cut off"),
        "packed otherwise": (unpacked(whole, "br"), "Content-Encoding br"),
        "packed twice": (unpacked(gzip.compress(gzip.compress(whole)), "gzip"), FORM),
        "too large": (unpacked(whole + b" " * 3 * 2**20, "identity"), "an answer of more than"),
        "unpacks to too much": (unpacked(gzip.compress(whole + b" " * 2**26), "gzip"), "an answer of more than"),
        "201": (status(201), "HTTP 201"),
        "204": (status(204), "HTTP 204"),
        "206": (status(206), "HTTP 206"),
        "redirected": (status(307, Location="/generate"), "HTTP 307"),
    }
    return [Case(f"answer: {name}", PLAIN, answer, said) for name, (answer, said) in cases.items()]


def all_cases():
    dice = random.Random(49)
    made = [*token_cases(dice), *list_cases(dice), *field_cases(), *kept_cases(dice), *expert_cases()]
    return [*made, *body_cases(dice), *wire_cases()]


async def what_comes_of(cases):
    """What the client gives for each case, asked at once, and the address that it asks."""

    async def answer(request):
        case = cases[int((await request.json())["rid"].rpartition("-")[2])]
        return web.Response(body=case.answer) if isinstance(case.answer, bytes) else await case.answer(request)

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        how = {"concurrency": 16, "retry_delays": (), "vocab_size": VOCABULARY}
        quick, patient = (EngineClient(url, timeout=seconds, **how) for seconds in (SECONDS, 60.0))
        async with quick, patient:

            async def ask(number, case):
                params = {"max_new_tokens": MOST, "top_k": 64}
                client = quick if case.said == LATE else patient
                try:
                    return await client.generate(PROMPT, params, rid=f"case-{number:04}", **case.asked)
                except Exception as error:
                    return error

            return url, await asyncio.gather(*(ask(number, case) for number, case in enumerate(cases)))
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("asked", [PLAIN, WITH_KEPT, WITH_EXPERTS], ids=["plain", "kept", "experts"])
def test_the_right_answer_is_taken(asked):
    """What all cases begin with, so that each is refused for what was changed."""
    _, (done,) = asyncio.run(what_comes_of([Case("right", asked, json.dumps(right(asked)).encode(), "")]))
    assert (done.tokens, done.weight_versions, done.text) == (TOKENS, [0, 0, 3, 3, 3], "a 42")
    assert done.log_probs == ([value / 2 for value in LOG_PROBS] if asked is WITH_KEPT else LOG_PROBS)
    assert done.kept == (KEPT if asked is WITH_KEPT else None)
    assert (done.experts_TW is not None) == (asked is WITH_EXPERTS)


def test_no_invalid_answer_is_taken_and_each_is_an_error_that_names_the_engine():
    cases = all_cases()
    assert len(cases) >= 200 and len({case.name for case in cases}) == len(cases)
    url, found = asyncio.run(asyncio.wait_for(what_comes_of(cases), 100))
    wrong = []
    for case, outcome in zip(cases, found, strict=True):
        words = str(outcome) if type(outcome) is GenerationError else None
        if words is None or not words.startswith(f"{url}/generate") or case.said not in words:
            wrong.append(f"{case.name} (expected: {case.said}): {outcome!r}"[:300])
        elif "\n" in words or len(words) > 1500:
            wrong.append(f"{case.name}: not one line of a length to be read: {words[:300]!r}")
    print(f"{len(cases)} invalid answers, {len(wrong)} taken or not said")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}:", *wrong])
