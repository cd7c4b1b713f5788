"""What engines are asked about fixed tokens, and what counts as an answer. Real engines are asked in the root's
`integration_tests/test_canary.py`.
"""

import math

import pytest

import slime_rollout.canary
from slime_rollout.canary import LENGTH, SEQUENCES, CanaryError, CanaryTokens, EngineCanary
from slime_rollout.http import HttpError

ROWS = [[5, 6, 7], [8, 9]]
TOKENS = CanaryTokens(rows=ROWS, decoded=3, pair=(1, 4))
URL = "http://engine"


def answer(rows, values=-1.5, taken=3, pair=-42.0):
    decoded = {
        "output_token_logprobs": [[-0.1, taken], *[[-0.1, 3]] * 3],
        "output_token_ids_logprobs": [[[-1.0, 1], [-1.0, 4]], *[[[pair, 1], [-41.0, 4]]] * 3],
    }
    return [
        {"meta_info": {"input_token_logprobs": [[None, row[0]], *([values, one] for one in row[1:])]} | decoded}
        for row in rows
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
    return EngineCanary(key="k", timeout=1.0)([URL], TOKENS)


def test_tokens_are_fixed_and_more_where_there_are_many_experts():
    tokens = CanaryTokens.of(1000)
    assert tokens == CanaryTokens.of(1000) and [len(row) for row in tokens.rows] == [LENGTH] * SEQUENCES
    assert all(0 <= token < 999 for row in (*tokens.rows, *tokens.continuations) for token in row)
    assert len({tokens.decoded, *tokens.pair}) == 3
    assert tokens.continuations[2] == [tokens.decoded, tokens.decoded, tokens.pair[0]]
    experts = CanaryTokens.of(1000, experts=256, chosen=8)
    assert experts.rows[:SEQUENCES] == tokens.rows and len(experts.rows) * LENGTH * 8 >= 4 * 256


def test_one_request_asks_about_all_tokens(engine):
    _, asked = engine
    canary = EngineCanary(key="k", timeout=1.0)
    for _ in range(2):
        assert canary([URL], TOKENS) == {URL: [-1.5] * 3 + [-42.0, -41.0] * 3}
    assert [url.removeprefix(URL) for url, _, _ in asked] == ["/server_info", "/generate", "/generate"]
    body = asked[1][1]
    assert body["input_ids"] == ROWS and body["logprob_start_len"] == 0 and asked[1][2] == "k"
    assert body["token_ids_logprob"] == [1, 4] and [*body["sampling_params"]["logit_bias"]] == ["3"]


def test_an_engine_that_decodes_speculatively_only_reads(engine):
    answers, asked = engine
    answers["/server_info"]["speculative_algorithm"] = "EAGLE"
    assert ask() == {URL: [-1.5] * 3}
    assert asked[1][1]["sampling_params"]["max_new_tokens"] == 0


def test_decoding_is_left_out_where_the_bias_is_too_small(engine):
    engine[0]["/generate"] = answer(ROWS, taken=8)
    assert ask() == {URL: [-1.5] * 3}
    engine[0]["/generate"] = answer(ROWS, pair=-1e38)
    assert ask() == {URL: [-1.5] * 3}


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
        *((given, "gives no log-probs of tokens") for given in (None, 7, "<html>", [], [{}], {"error": "busy"})),
    ],
)
def test_what_is_no_answer(engine, given, problem):
    engine[0]["/generate"] = given
    with pytest.raises(CanaryError, match=problem):
        ask()


def test_what_is_not_finite_is_infinitely_far(engine):
    ours = [-1.5] * 3 + [-3.0, -2.0] * 3
    assert TOKENS.distance(ours, ask()[URL]) == (0.0, "reading")
    engine[0]["/generate"] = answer(ROWS, None)
    assert all(math.isnan(value) for value in ask()[URL][:3])
    assert TOKENS.distance(ours, ask()[URL]) == (math.inf, "reading")
    for wrong in ({"pair": None}, {"pair": None, "taken": 8}, {"pair": math.nan}, {"pair": -math.inf}):
        engine[0]["/generate"] = answer(ROWS, **wrong)
        assert TOKENS.distance(ours, ask()[URL]) == (math.inf, "decoding")


def test_read_and_decoded_tokens_are_apart():
    """Reading counts by its mean. Decoding counts by its median, and only by how far the tokens of a pair are apart."""
    read, decoded = [-1.0, -2.0, -3.0], [-5.0, -7.0] * 3
    far = [-1.0, -2.0, -3.75]
    assert TOKENS.distance(read + decoded, [*far, *[-9.0, -11.0] * 2, -9.0, -20.0]) == (0.25, "reading")
    assert TOKENS.distance(read + decoded, [*far, -9.0, -11.0, *[-9.0, -12.0] * 2]) == (0.5, "decoding")
    assert TOKENS.distance(read + decoded, far) == (0.25, "reading")
    assert TOKENS.distance(read + decoded, read + decoded[:-1])[0] == math.inf
    assert TOKENS.distance(read + decoded, read[:2])[0] == math.inf
