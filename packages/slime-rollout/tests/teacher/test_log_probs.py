import asyncio
import logging
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import DataError
from slime_core.types import Sample, Status
from slime_rollout.errors import TeacherError
from slime_rollout.teacher import TeacherLogProbs, TeacherVocabulary, generate_url, read_log_probs, request

VOCABULARY = TeacherVocabulary(largest=9999, shown_as_zero=9999)


def make_sample(tokens=(5, 6, 7, 8, 9), response=3, index=0, **more):
    more = {"status": Status.COMPLETED, **more}
    return Sample(index=index, group_index=0, prompt="p", tokens=list(tokens), response_length=response, **more)


def ask(url, *samples, timeout=10.0, drop=False, vocabulary=VOCABULARY):
    """What the teacher at ``url`` does to the samples, all at once; what each call raised, or ``None``."""
    teacher = TeacherLogProbs(url, timeout=timeout, vocabulary=vocabulary, drop=drop)

    async def run():
        return await asyncio.gather(*map(teacher, samples), return_exceptions=True)

    return asyncio.run(asyncio.wait_for(run(), 60))


def failure(url, sample, **settings):
    (error,) = ask(url, sample, **settings)
    assert isinstance(error, TeacherError), error
    assert "\n" not in str(error)
    assert sample.teacher_log_probs is None
    return str(error)


def test_every_token_of_the_response_gets_its_own(engine, answers, expected):
    engine.answer = answers()
    sample = make_sample(tokens=[5, 6, 7, 7, 9, 9999, 1], response=5, loss_mask=[1, 0, 0, 1, 1])
    assert ask(engine.url, sample) == [None]
    assert sample.teacher_log_probs == expected(sample.tokens, 5)
    sample.validate()
    (body,) = engine.bodies
    assert (body["input_ids"], body["logprob_start_len"], body["return_logprob"]) == (sample.tokens, 1, True)
    assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}


def test_a_prompt_of_one_token(engine, answers, expected):
    engine.answer = answers()
    sample = make_sample(tokens=[5, 6], response=1)
    ask(engine.url, sample)
    assert sample.teacher_log_probs == expected([5, 6], 1)


@pytest.mark.parametrize("end", ["", "/", "/generate", "/generate/"])
def test_the_address_may_name_the_endpoint(end):
    assert generate_url(f"http://host:1{end}") == "http://host:1/generate"


def test_nothing_is_asked_without_need(engine):
    done, failed = make_sample(teacher_log_probs=[-1.0] * 3), make_sample(status=Status.FAILED)
    empty = make_sample(response=0)
    assert ask(engine.url, done, failed, empty) == [None] * 3
    assert (done.teacher_log_probs, failed.teacher_log_probs, empty.teacher_log_probs) == ([-1.0] * 3, None, [])
    assert engine.bodies == []


def test_a_response_without_a_prompt_has_nothing_before_its_first_token(engine):
    (error,) = ask(engine.url, make_sample(tokens=[5, 6], response=2, index=4), drop=True)
    assert isinstance(error, DataError) and "sample 4 of 2 tokens" in str(error)
    assert engine.bodies == []


def test_a_token_that_the_teacher_lacks_is_not_sent(engine):
    words = failure(engine.url, make_sample(tokens=[5, 6, 10000, 7], response=2))
    assert "sample 0 of 4 tokens has the token 10000, and the teacher knows none above 9999" in words
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entries: entries[1:], "answered about 3 tokens instead of 4"),
        (lambda entries: [*entries, [-1.0, 3, None]], "answered about 5 tokens instead of 4"),
        (lambda entries: [entries[0], entries[2], entries[1], entries[3]], "token 8 in the place of token 7 (1 from"),
        (lambda entries: [[None, 4, None], *entries[1:]], "token 4 in the place of token 6 (0 from"),
        (lambda entries: [*entries[:3], [-1.0, 0, None]], "token 0 in the place of token 9 (3 from"),
        (lambda entries: [*entries[:3], [None, 9, None]], "gave None as the log-prob of token 9 (2 of the response)"),
        (lambda entries: [*entries[:3], ["-1", 9, None]], "gave '-1' as the log-prob of token 9"),
        (lambda entries: [*entries[:3], [1e999, 9, None]], "answered in an unknown form"),
        (lambda entries: [*entries[:3], [-1.0, "9", None]], "token '9' in the place of token 9"),
        (lambda entries: [*entries[:3], [True, 9, None]], "gave True as the log-prob of token 9"),
        (lambda entries: [*entries[:3], [-1.0]], "answered in an unknown form (IndexError"),
        (lambda entries: None, "answered in an unknown form (TypeError"),
        (lambda entries: [], "answered about 0 tokens"),
    ],
)
def test_an_answer_about_anything_else_is_an_error_that_names_the_sample(engine, answers, change, words):
    def answer(number, body):
        reply = answers()(number, body)
        reply["meta_info"]["input_token_logprobs"] = change(reply["meta_info"]["input_token_logprobs"])
        return reply

    engine.answer = answer
    said = failure(engine.url, make_sample(index=11))
    assert said.startswith(f"sample 11 of 5 tokens: the teacher at {engine.url}/generate ")
    assert words in said


@pytest.mark.parametrize("garbage", ["", "null", "[]", '"x\\ny"', "a\nb", "<html>", "{}", '{"meta_info": 3}', "1"])
def test_garbage_is_an_unknown_form(engine, garbage):
    engine.answer = lambda number, body: garbage
    assert "unknown form" in failure(engine.url, make_sample())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(reply=JSON | st.builds(lambda inner: {"meta_info": {"input_token_logprobs": inner}}, JSON))
def test_whatever_comes_back_the_error_is_ours(reply):
    try:
        values = read_log_probs(reply, [1, 2, 3], VOCABULARY)
    except TeacherError:
        return
    assert len(values) == 2


def test_zero_stands_for_the_last_token_only_where_that_was_found_out(engine, answers, expected):
    engine.answer = answers()
    tokens = [5, 6, 9999, 0]
    sample = make_sample(tokens=tokens, response=2)
    ask(engine.url, sample)
    assert sample.teacher_log_probs == expected(tokens, 2)
    other = TeacherVocabulary(largest=9999)
    words = failure(engine.url, make_sample(tokens=tokens, response=2), vocabulary=other)
    assert "answered about token 0 in the place of token 9999" in words


def test_server_errors_are_tried_again(engine, answers):
    engine.answer = lambda number, body: 500 if number < 2 else answers()(number, body)
    sample = make_sample()
    assert ask(engine.url, sample) == [None]
    assert (len(sample.teacher_log_probs), len(engine.bodies)) == (3, 3)


def test_a_teacher_that_stays_broken_is_an_error(engine):
    engine.answer = lambda number, body: 503
    words = failure(engine.url, make_sample(index=2))
    assert words.startswith(f"sample 2 of 5 tokens: the teacher at {engine.url}/generate failed")
    assert "failed 4 times, at last with HTTP 503: scripted 503; look at its log" in words
    assert len(engine.bodies) == 4


def test_a_teacher_that_hangs_is_an_error_in_time(engine):
    engine.answer = lambda number, body: asyncio.sleep(30)
    start = time.monotonic()
    assert "at last with no answer: time limit of 0.2 s" in failure(engine.url, make_sample(), timeout=0.2)
    assert time.monotonic() - start < 15


def test_a_refusal_is_told_in_the_teachers_words_and_not_tried_again(engine):
    engine.answer = lambda number, body: 400
    words = failure(engine.url, make_sample())
    assert "refused it (HTTP 400: scripted 400); where it is too long, raise the teacher's --context-length" in words
    assert len(engine.bodies) == 1


def test_with_drop_a_sample_without_log_probs_is_left_out_and_told(engine, answers, caplog):
    engine.answer = lambda number, body: 400 if body["input_ids"][0] == 5 else answers()(number, body)
    bad, good = make_sample(index=3), make_sample(tokens=[4, 6, 7], response=1)
    with caplog.at_level(logging.WARNING):
        assert ask(engine.url, bad, good, drop=True) == [None, None]
    assert (bad.remove_sample, bad.teacher_log_probs, bad.trained_tokens) == (True, None, 0)
    assert "HTTP 400" in bad.metadata["teacher_failure"]
    assert "sample 3 is not trained on: " in caplog.text
    assert (good.remove_sample, good.metadata, len(good.teacher_log_probs)) == (False, {}, 1)


def test_a_sample_that_came_back_and_gets_its_log_probs_is_trained_on(engine, answers, expected):
    """The reason it was left out for is gone; one of the reward's is its own."""
    engine.answer = answers()
    once = make_sample(remove_sample=True, metadata={"teacher_failure": "HTTP 503", "row": 1})
    both = make_sample(remove_sample=True, metadata={"teacher_failure": "HTTP 503", "reward_failure": "it hung"})
    mine = make_sample(remove_sample=True)
    assert ask(engine.url, once, both, mine, drop=True) == [None] * 3
    assert once.teacher_log_probs == both.teacher_log_probs == expected(once.tokens, 3)
    assert (once.remove_sample, once.metadata) == (False, {"row": 1})
    assert (both.remove_sample, both.metadata) == (True, {"reward_failure": "it hung"})
    assert mine.remove_sample


def test_with_drop_too_a_teacher_that_never_answers_ends_the_run(engine, answers):
    engine.answer = lambda number, body: 400
    assert [type(error) for error in ask(engine.url, *map(numbered, range(70)), drop=True)].count(TeacherError) == 7
    teacher = TeacherLogProbs(engine.url, timeout=5.0, vocabulary=VOCABULARY, drop=True)

    async def one_by_one():
        for index in range(100):
            engine.answer = answers() if index == 60 else lambda number, body: 400
            await teacher(numbered(index))

    asyncio.run(one_by_one())  # 60 and then 39 in a row


def numbered(index):
    return make_sample(index=index, tokens=[5, 100 + index], response=1)


def test_every_sample_gets_its_own_with_64_at_once(engine, answers, expected):
    async def slowly(number, body):
        await asyncio.sleep(0.02)
        return answers()(number, body)

    engine.answer = slowly
    samples = [numbered(index) for index in range(150)]
    assert ask(engine.url, *samples) == [None] * 150
    assert [sample.teacher_log_probs for sample in samples] == [expected(sample.tokens, 1) for sample in samples]
    assert 8 < engine.most_in_flight <= 64


def test_what_is_asked_generates_nothing():
    assert request([1, 2], 0, more=1)["sampling_params"]["max_new_tokens"] == 0
    assert request([1, 2], 0, more=1)["more"] == 1
