"""The search server of examples/search-r1 and its data: really started, asked over HTTP."""

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from slime_rollout.config import RolloutConfig
from slime_rollout.data import check_prompt_data

EXAMPLE = Path(__file__).parents[3] / "examples" / "search-r1"
CORPUS, TRAIN, EVAL = (EXAMPLE / f"{name}.jsonl" for name in ("corpus", "train", "eval"))

pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples belong to the repository, not to the package"),
    pytest.mark.timeout(120),
]


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def command(*flags):
    return [sys.executable, EXAMPLE / "search_server.py", *map(str, flags)]


@pytest.fixture(scope="module")
def server():
    """Address of a server over the shipped corpus, which ends in order on SIGTERM."""
    process = subprocess.Popen(command("--port", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        greeting = process.stdout.readline()
        address = re.fullmatch(r"(\d+) documents; listening on (http://127\.0\.0\.1:\d+)\n", greeting)
        assert address, (greeting, process.stderr.read())
        assert int(address[1]) == len(rows(CORPUS))
        yield address[2]
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def post(server, body, content_type="application/json"):
    """Status and parsed answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{server}/retrieve", data, {"Content-Type": content_type})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def search(server, queries, topk=3, **more):
    status, answer = post(server, {"queries": queries, "topk": topk, **more})
    assert status == 200, answer
    return answer["result"]


def test_the_shipped_questions_find_their_documents(server):
    """A question names its documents look-up by look-up: for most the first hit is one, and for each look-up too."""
    questions = [*rows(TRAIN), *rows(EVAL)]
    wanted = [question["metadata"]["documents"] for question in questions]
    top = [found[0]["document"]["id"] for found in search(server, [question["prompt"] for question in questions])]
    right = sum(found in {name for each in names for name in each} for found, names in zip(top, wanted, strict=True))
    searches = [query for question in questions for query in question["metadata"]["searches"]]
    found = [hits[0]["document"]["id"] for hits in search(server, searches)]
    steps = [names for question in wanted for names in question]
    right_steps = sum(name in names for name, names in zip(found, steps, strict=True))
    print(f"first hit right: {right} of {len(questions)} questions, {right_steps} of {len(searches)} look-ups")
    assert right >= 0.9 * len(questions)
    assert right_steps >= 0.9 * len(searches)


def test_hits_are_ranked_and_have_scores(server):
    (hits,) = search(server, ["Who discovered penicillin in London?"], topk=5)
    assert hits[0]["document"] == next(row for row in rows(CORPUS) if row["id"] == "fleming")
    assert len(hits) == 5
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True) and scores[-1] > 0
    assert search(server, ["wilhelm rontgen"], topk=1)[0][0]["document"]["id"] == "rontgen"
    first, again = search(server, ["the Moon", "the Moon"])
    assert first == again


def test_without_scores_and_without_topk(server):
    (hits,) = search(server, ["deepest lake"], return_scores=False)
    assert hits[0]["id"] == "lake-baikal" and hits[0]["contents"].startswith('"Lake Baikal"\n')
    status, answer = post(server, {"queries": ["lake"]})
    assert (status, len(answer["result"][0])) == (200, 3)


@pytest.mark.parametrize("query", ["zzyzx", "", "the of and", "\ud800", "?!"])
def test_a_query_that_matches_nothing_has_no_hits(server, query):
    assert search(server, [query, "lake"])[0] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"\xff\xfe{}", "codec can't decode"),
        (b"[" * 100_000, "no JSON"),
        ([], "must be an object"),
        ({}, "queries must be a list of strings"),
        ({"queries": []}, "queries must be a list of strings"),
        ({"queries": "lake"}, "queries must be a list of strings"),
        ({"queries": ["lake", 3]}, "queries must be a list of strings"),
        ({"queries": ["lake"] * 257}, "256 at most"),
        ({"queries": ["a" * 4097]}, "4096 characters"),
        ({"queries": ["lake"], "topk": 0}, "topk must be a whole number from 1 to 100, got 0"),
        ({"queries": ["lake"], "topk": 101}, "got 101"),
        ({"queries": ["lake"], "topk": True}, "got true"),
        ({"queries": ["lake"], "topk": 2.5}, "got 2.5"),
        ({"queries": ["lake"], "return_scores": "yes"}, "return_scores must be true or false"),
    ],
)
def test_a_malformed_request_is_answered_with_a_line(server, body, words):
    status, answer = post(server, body)
    assert status == 400
    error = json.loads(answer)["error"]
    assert words in error and "\n" not in error
    assert search(server, ["lake"])  # and it still serves


def test_other_addresses_methods_and_sizes(server):
    assert post(server, b"x" * 2**21)[0] == 413
    assert post(server, {"queries": ["lake"]}, "application/json; charset=martian")[0] == 400
    with urllib.request.urlopen(f"{server}/health", timeout=20) as answer:
        assert json.loads(answer.read()) == {"documents": len(rows(CORPUS))}
    for path, status in (("/retrieve", 405), ("/nothing", 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server + path, timeout=20)
        with caught.value as error:
            assert error.code == status


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "has no documents"),
        ('{"id": "a", "contents": "b"}\n{"id": "b"}\n', ":2: no document with id and contents (KeyError"),
        ('{"id": 1, "contents": 2}', ":1: contents must be a string"),
        ("[]", ":1: no document"),
    ],
)
def test_a_corpus_that_is_none_is_told_in_a_line(tmp_path, text, words):
    path = tmp_path / "corpus.jsonl"
    if text is not None:
        path.write_text(text)
    assert words in refused("--corpus", path, "--port", 0)


def test_a_port_that_is_taken_is_told_in_a_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "address already in use" in refused("--port", taken.getsockname()[1])


def refused(*flags):
    """What the server says when it does not start."""
    done = subprocess.run(command(*flags), capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("search_server: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_the_corpus_is_small_and_has_every_answer():
    documents = {row["id"]: row["contents"] for row in rows(CORPUS)}
    assert len(documents) == len(rows(CORPUS)) > 150
    assert CORPUS.stat().st_size < 300_000
    assert all(re.fullmatch(r'"[^"\n]+"\n[^\n]+\.', contents) for contents in documents.values())
    for row in [*rows(TRAIN), *rows(EVAL)]:
        *_, last = row["metadata"]["documents"]
        assert any(row["label"].lower() in documents[name].lower() for name in last), row["prompt"]
        assert len(row["metadata"]["searches"]) == len(row["metadata"]["documents"])


def test_questions_to_train_and_to_evaluate_on():
    config = RolloutConfig.of(
        hf_checkpoint="x", prompt_data=str(TRAIN), eval_prompt_data=(str(EVAL),), rollout_batch_size=1, rm_type="f1"
    )
    counts = check_prompt_data(config)
    assert (counts[str(TRAIN)] > 40, counts[str(EVAL)] > 15) == (True, True)
    questions = [row["prompt"] for path in (TRAIN, EVAL) for row in rows(path)]
    assert len(set(questions)) == len(questions)
    for path in (TRAIN, EVAL):
        assert sum(len(row["metadata"]["searches"]) == 2 for row in rows(path)) >= 4
