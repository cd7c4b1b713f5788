import json
import logging
import re
import shutil
import socket
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from slime_core.errors import ConfigError
from slime_rollout.config import RolloutConfig
from slime_rollout.errors import TeacherError
from slime_rollout.teacher import TeacherVocabulary, make_teacher

NAMED = 274  # tokens that the tokenizer has; the model's output layer has 300


@pytest.fixture(scope="module")
def student(tokenizer_dir, tmp_path_factory):
    directory = shutil.copytree(tokenizer_dir, tmp_path_factory.mktemp("student") / "hf")
    Path(directory, "config.json").write_text(json.dumps({"vocab_size": 300}))
    assert len(AutoTokenizer.from_pretrained(directory)) == NAMED
    return str(directory)


@pytest.fixture(scope="module")
def reads(student):
    tokenizer = AutoTokenizer.from_pretrained(student)
    return lambda token: tokenizer.decode([token])


@pytest.fixture
def connect(engine, student):
    """Makes the teacher of a config whose ``--rm-url`` is the scripted server."""
    engine.pages["/model_info"] = {"model_path": "models/big", "is_generation": True}

    def build(**changes):
        config = {"hf_checkpoint": student, "opd_type": "sglang", "rm_url": engine.url, **changes}
        return make_teacher(RolloutConfig.of(prompt_data="x", rollout_batch_size=1, **config))

    return build


def test_no_teacher_is_asked_for(student):
    assert make_teacher(RolloutConfig.of(hf_checkpoint=student, prompt_data="x", rollout_batch_size=1)) is None


def test_a_teacher_of_the_same_vocabulary(connect, engine, answers, reads, caplog):
    engine.answer = answers(300, reads)
    with caplog.at_level(logging.INFO):
        teacher = connect()
    assert teacher._vocabulary == TeacherVocabulary(largest=299, shown_as_zero=299)
    assert f"the teacher at {engine.url}/generate is models/big" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    (body,) = engine.bodies
    assert body["input_ids"][-1] == 299 and {0, 1, 273} & set(body["input_ids"])
    assert len(set(body["input_ids"])) > 90


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (512, TeacherVocabulary(largest=299)),  # padded further
        (299, TeacherVocabulary(largest=273)),  # padded less: what has no text is not asked about
        (NAMED, TeacherVocabulary(largest=273, shown_as_zero=273)),
    ],
)
def test_vocabularies_may_be_padded_otherwise(connect, engine, answers, reads, size, expected):
    engine.answer = answers(size, reads)
    assert connect()._vocabulary == expected


def test_a_smaller_vocabulary_is_refused(connect, engine, answers, reads):
    engine.answer = answers(NAMED - 1, reads)
    with pytest.raises(TeacherError, match="does not know token 273 of the student: its vocabulary is smaller"):
        connect()


def test_other_words_are_refused(connect, engine, answers, reads):
    engine.answer = answers(300, lambda token: reads(token) if token < 200 else f"w{token}")
    with pytest.raises(TeacherError) as caught:
        connect()
    assert f"{engine.url}/generate (models/big) has another vocabulary than --hf-checkpoint" in str(caught.value)
    assert re.search(r"of \d+ tokens \d+ differ \((\d+) is '.+' here and 'w\1' there, ", str(caught.value))
    assert "\n" not in str(caught.value)


def test_other_added_tokens_are_told(connect, engine, answers, reads, caplog):
    engine.answer = answers(300, lambda token: "<tool>" if token == 1 else reads(token))
    with caplog.at_level(logging.WARNING):
        connect()
    assert "reads 1 added tokens otherwise: 1 is '<|start|>' here and '<tool>' there" in caplog.text


def test_white_space_around_a_token_does_not_count(connect, engine, answers, reads):
    """A server that cleans up what it decodes, as older ones do, still has the same vocabulary."""
    engine.answer = answers(300, lambda token: reads(token).strip())
    connect()


def test_a_teacher_without_a_tokenizer_is_told(connect, engine, answers, caplog):
    engine.answer = answers(300)
    with caplog.at_level(logging.WARNING):
        assert connect()._vocabulary.largest == 299
    assert "only their numbers are compared" in caplog.text


def test_nobody_is_there(connect):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(TeacherError, match=f"the teacher at --rm-url {url} does not answer .* start it first"):
            connect(rm_url=url)


def test_a_server_of_something_else(connect, engine, answers):
    with pytest.raises(TeacherError, match=r"gives no log-probs \(HTTP 404"):
        connect(rm_url=engine.url + "/score")
    engine.answer = lambda number, body: {"score": 1}
    with pytest.raises(TeacherError, match="answered in an unknown form"):
        connect()
    engine.answer = lambda number, body: 500
    with pytest.raises(TeacherError, match=r"gives no log-probs \(HTTP 500: scripted 500\)"):
        connect()
    engine.pages["/model_info"] = {"model_path": "models/embedding", "is_generation": False}
    with pytest.raises(TeacherError, match="serves models/embedding, no language model"):
        connect()


def test_the_router_and_older_servers_name_their_model_elsewhere(connect, engine, answers, reads, caplog):
    engine.answer = answers(300, reads)
    del engine.pages["/model_info"]
    engine.pages["/get_model_info"] = {"model_path": "models/behind"}
    with caplog.at_level(logging.INFO):
        connect()
    assert "is models/behind" in caplog.text
    del engine.pages["/get_model_info"]
    connect()


def test_samples_that_may_get_too_long_are_told(connect, engine, answers, reads, caplog):
    engine.answer = answers(300, reads)
    engine.pages["/server_info"] = {"max_req_input_len": 1018}
    lengths = {"rollout_max_prompt_len": 17, "rollout_max_response_len": 1000}
    with caplog.at_level(logging.WARNING):
        connect(**lengths)
        connect(**lengths | {"rollout_max_prompt_len": 600}, rollout_max_context_len=1017)
        assert not caplog.records
        connect(**lengths | {"rollout_max_prompt_len": 18})
    assert "samples may get 1018 tokens long" in caplog.text
    assert "takes 1017; raise its --context-length by 1" in caplog.text


def test_a_student_that_cannot_be_read(connect, engine, answers):
    with pytest.raises(ConfigError, match="--hf-checkpoint nowhere is not a directory"):
        connect(hf_checkpoint="nowhere")
