import base64
import dataclasses

import numpy as np
import orjson
import pytest

from slime_core.types import Status
from slime_rollout.errors import GenerationError
from slime_rollout.generate import Completion, SamplingParams


def read(reply):
    return Completion.from_json(orjson.dumps(reply))


def test_reads_a_reply(reply):
    done = read(reply(text="42", tokens=(5, 6), version="3"))
    assert (done.text, done.tokens, done.log_probs) == ("42", [5, 6], [-0.5, -1.5])
    assert done.weight_versions == [3, 3]


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ({"type": "stop", "matched": 0}, Status.COMPLETED),
        ({"type": "length", "length": 2}, Status.TRUNCATED),
        ({"type": "abort", "message": "Aborted by request"}, Status.ABORTED),
    ],
)
def test_status(reply, finish, status):
    assert read(reply(finish=finish)).status is status


def test_an_abort_before_the_first_token(reply):
    empty = reply(text="", tokens=(), finish={"type": "abort", "message": "Aborted"})
    empty["meta_info"]["output_token_logprobs"] = None
    done = read(empty)
    assert (done.tokens, done.log_probs, done.weight_versions, done.reason) == ([], [], [], "Aborted")


def test_weights_that_changed_midway(reply):
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 9}]
    done = read(reply(tokens=(5, 6, 7), version="2", weight_versions=spans))
    assert done.weight_versions == [0, 2, 2]


def test_a_version_that_slime_did_not_give(reply):
    with pytest.raises(GenerationError, match="names its weight version 'nightly'"):
        read(reply(version="nightly"))


def test_tokens_without_log_probs(reply):
    with pytest.raises(GenerationError, match="gave 2 log-probs for 3 tokens"):
        read(reply(tokens=(5, 6)) | {"output_ids": [5, 6, 7]})


def test_log_probs_of_other_tokens(reply):
    with pytest.raises(GenerationError, match=r"gave the log-prob of token 6 for token 9 \(place 1\)"):
        read(reply(tokens=(5, 6)) | {"output_ids": [5, 9]})


def with_kept(answer, kept, log_probs):
    answer["meta_info"] |= {"output_token_sampling_mask": kept, "output_token_sampling_logprobs": log_probs}
    return Completion.from_json(orjson.dumps(answer), with_kept=True)


def test_kept_tokens_and_log_probs_over_them(reply):
    done = with_kept(reply(tokens=(5, 6)), [[5, 9], [6]], [-0.25, 0.0])
    assert (done.kept_tokens, done.log_probs) == ("5 9;6;", [-0.25, 0.0])
    assert done.certain({}).kept_tokens == "5 9;"
    assert read(reply(tokens=(5, 6))).kept_tokens is None
    assert with_kept(reply(tokens=(), finish={"type": "abort"}), None, None).kept_tokens == ""


@pytest.mark.parametrize(
    ("kept", "log_probs", "message"),
    [
        (None, None, r"said of 0 of 2 tokens what they were sampled from, .*\(return_sampling_mask of SGLang 0.5.23\)"),
        ([[5, 9]], [-0.25], "said of 1 of 2 tokens"),
        ([[5, 9], [7]], [-0.25, 0.0], r"sampled token 6 \(place 1\) from tokens without it: \[7\]"),
    ],
)
def test_an_engine_that_does_not_say_what_it_sampled_from(reply, kept, log_probs, message):
    with pytest.raises(GenerationError, match=message):
        with_kept(reply(tokens=(5, 6)), kept, log_probs)


def test_logits_that_were_no_numbers(reply):
    """SGLang ends such a response with an end-of-text token in the last one's place, and calls it stopped."""
    with pytest.raises(GenerationError, match=r"logits were not numbers \(NaN\); look at the last weight update"):
        read(reply(tokens=(5, -1), finish={"type": "stop", "matched": "NaN happened"}) | {"output_ids": [5, 0]})


def test_a_reply_without_a_version_is_not_taken_for_version_zero(reply):
    unversioned = reply()
    del unversioned["meta_info"]["weight_version"]
    with pytest.raises(GenerationError, match="unknown form"):
        read(unversioned)


@pytest.mark.parametrize("body", [[], {}, {"text": "a"}, {"text": "a", "meta_info": {"completion_tokens": 0}}, None])
def test_something_else(body):
    with pytest.raises(GenerationError, match="unknown form"):
        read(body)


def test_an_unknown_finish_reason(reply):
    with pytest.raises(GenerationError, match="unknown form"):
        read(reply(finish={"type": "boredom"}))


def with_experts(answer, numbers, rows):
    answer["meta_info"]["routed_experts"] = base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()
    return Completion.from_json(orjson.dumps(answer), expert_rows=rows)


def test_experts_are_a_row_for_each_token_but_the_last(reply):
    done = with_experts(reply(tokens=(5, 6)), range(12), 1)
    assert done.experts_TW.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert done.certain({}).experts_TW.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert done.certain({"stop": "abc"}).experts_TW is None
    assert read(reply(tokens=(5, 6))).experts_TW is None
    unanswered = reply(tokens=(), finish={"type": "abort"})
    assert Completion.from_json(orjson.dumps(unanswered), expert_rows=1).experts_TW is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], r"gave 0 numbers of experts for 3 tokens, .* \(return_routed_experts of SGLang 0.5.23"),
        (range(7), "gave 7 numbers of experts for 3 tokens"),
        ([0, -1, 2], "gave 3 numbers of experts for 3 tokens"),
    ],
)
def test_an_engine_that_does_not_say_which_experts_it_chose(reply, numbers, message):
    with pytest.raises(GenerationError, match=message):
        with_experts(reply(tokens=(5, 6)), numbers, 1)


@pytest.mark.parametrize("given", ["no base64", "AAA="])
def test_experts_that_cannot_be_read(reply, given):
    answer = reply(tokens=(5, 6))
    answer["meta_info"]["routed_experts"] = given
    with pytest.raises(GenerationError, match="an engine's routed_experts are invalid"):
        Completion.from_json(orjson.dumps(answer), expert_rows=1)


@pytest.mark.parametrize(
    ("sampling_params", "kept"),
    [
        ({}, 7),
        ({"stop": []}, 7),
        ({"stop": "é!"}, 5),  # three bytes: as many tokens may have begun it
        ({"stop": ["x", "</a>"]}, 4),
        ({"stop": ["a stop that is longer"]}, 0),
        ({"stop_regex": "a+"}, 0),
        ({"json_schema": '{"type": "object"}'}, 0),  # the rest would have to be an object of its own
        ({"min_new_tokens": 4}, 0),
        ({"repetition_penalty": 1.1}, 0),
        (SamplingParams().to_request(1) | {"regex": None, "stop_regex": []}, 7),
    ],
)
def test_what_is_certain_of_an_aborted_response(reply, sampling_params, kept):
    tokens = list(range(11, 19))
    done = Completion.from_json(orjson.dumps(reply(tokens=tokens, finish={"type": "abort"}))).certain(sampling_params)
    assert (done.tokens, done.text, done.status) == (tokens[:kept], "", Status.ABORTED)
    assert len(done.log_probs) == len(done.weight_versions) == kept


def test_a_stop_text_that_begins_before_a_request_went_on_ends_what_several_sampled():
    parts = [
        Completion(
            text="",
            tokens=tokens,
            log_probs=[-0.5] * len(tokens),
            weight_versions=[version] * len(tokens),
            status=Status.ABORTED,
            reason="aborted",
            kept=[[token] for token in tokens],
            experts_TW=np.full((len(tokens), 1), version, np.int32),
        )
        for version, tokens in enumerate([[ord("a"), ord("<")], [ord("b"), ord("<")], [ord("e"), ord(">"), ord("c")]])
    ]
    done = parts[0].followed_by(parts[1]).followed_by(dataclasses.replace(parts[2], status=Status.TRUNCATED))
    assert done.cuts == [2, 4]

    ended = done.up_to_stop([], ["<e>", "<ex"], lambda tokens: "".join(map(chr, tokens)))
    assert (ended.text, ended.status, ended.weight_versions) == ("a<b<e>", Status.COMPLETED, [0, 0, 1, 1, 2, 2])
    assert len(ended.log_probs) == len(ended.kept) == len(ended.tokens) == 6
    assert ended.experts_TW.tolist() == [[0], [0], [1], [1], [2], [2]]
    assert done.up_to_stop([], ["<b"], lambda tokens: "".join(map(chr, tokens))).tokens == [*b"a<b"]
    assert done.up_to_stop([], ["<ec"], lambda tokens: "".join(map(chr, tokens))) == done
