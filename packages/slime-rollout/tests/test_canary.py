"""What engines are asked about fixed tokens, and what counts as an answer. Real engines are asked in the root's
`integration_tests/test_canary.py`.
"""

import math

import pytest

import slime_rollout.canary
from slime_rollout.canary import LENGTH, SEQUENCES, CanaryError, EngineCanary, canary_rows, distance
from slime_rollout.http import HttpError

ROWS = [[5, 6, 7], [8, 9]]
URL = "http://engine"


def answer(rows, values=-1.5):
    return [
        {"meta_info": {"input_token_logprobs": [[None, row[0]], *([values, one] for one in row[1:])]}} for row in rows
    ]


@pytest.fixture
def engine(monkeypatch):
    """Scripted answers by path, and the requests."""
    answers, asked = {"/server_info": {"disaggregation_mode": "null"}, "/generate": answer(ROWS)}, []

    def call(method, url, payload=None, **more):
        asked.append((url, payload, more.get("key")))
        given = answers[url.removeprefix(URL)]
        if isinstance(given, Exception):
            raise given
        return given

    monkeypatch.setattr(slime_rollout.canary, "call", call)
    return answers, asked


def ask():
    return EngineCanary(key="k", timeout=1.0)([URL], ROWS)


def test_tokens_are_fixed_and_more_where_there_are_many_experts():
    rows = canary_rows(1000)
    assert rows == canary_rows(1000) and [len(row) for row in rows] == [LENGTH] * SEQUENCES
    assert all(0 <= token < 999 for row in rows for token in row)
    experts = canary_rows(1000, experts=256, chosen=8)
    assert experts[:SEQUENCES] == rows and len(experts) * LENGTH * 8 >= 4 * 256


def test_one_request_asks_about_all_tokens(engine):
    _, asked = engine
    canary = EngineCanary(key="k", timeout=1.0)
    for _ in range(2):
        assert canary([URL], ROWS) == {URL: [-1.5] * 3}
    assert [url.removeprefix(URL) for url, _, _ in asked] == ["/server_info", "/generate", "/generate"]
    assert asked[1][1]["input_ids"] == ROWS and asked[1][1]["logprob_start_len"] == 0 and asked[1][2] == "k"


def test_half_an_engine_is_not_asked(engine):
    engine[0]["/server_info"] = {"disaggregation_mode": "prefill"}
    assert ask() == {} and len(engine[1]) == 1


def test_an_engine_that_is_gone_is_left_to_those_who_watch_it(engine):
    engine[0]["/generate"] = HttpError("POST", URL, None, "refused")
    assert ask() == {}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (HttpError("POST", URL, 400, "no log-probs here"), "gives no log-probs of tokens: .*no log-probs here"),
        ([{"meta_info": {}}] * 2, "gives no log-probs of tokens"),
        (answer([[5, 6, 8], [8, 9]]), "of other tokens than it was asked about"),
    ],
)
def test_what_is_no_answer(engine, given, problem):
    engine[0]["/generate"] = given
    with pytest.raises(CanaryError, match=problem):
        ask()


def test_what_is_not_finite_is_infinitely_far(engine):
    engine[0]["/generate"] = answer(ROWS, None)
    assert all(math.isnan(value) for value in ask()[URL])
    assert distance([-1.0] * 3, ask()[URL]) == math.inf
    assert distance([-1.0, -2.0], [-1.5, -1.5]) == 0.5
    assert distance([-1.0], [-1.0, -2.0]) == distance([], []) == math.inf
