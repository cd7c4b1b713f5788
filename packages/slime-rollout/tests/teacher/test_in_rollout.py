"""A rollout whose samples a teacher sees. One scripted server is both: only the teacher is to generate nothing."""

import pytest

from slime_rollout.config import RolloutConfig
from slime_rollout.errors import TeacherError
from slime_rollout.rollout import RolloutManager
from slime_rollout.teacher import make_teacher

ROWS = [{"prompt": f"say a number: {number}", "label": str(number)} for number in range(4)]


@pytest.fixture
def asked(engine, reply, answers):
    """What the teacher was asked; the engine writes the number 1 in two tokens."""
    bodies = []

    def answer(number, body):
        if body["sampling_params"]["max_new_tokens"]:
            return reply(text="1")
        bodies.append(body)
        return answers(300)(number, body)

    engine.answer = answer
    return bodies


@pytest.fixture
def manager(engine, asked, tokenizer_dir, write_rows):
    path = write_rows(ROWS)

    def build(teacher=None, **changes):
        config = {
            "hf_checkpoint": tokenizer_dir,
            "prompt_data": path,
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 2,
            "opd_type": "sglang",
            "rm_url": engine.url,
            **changes,
        }
        return RolloutManager(RolloutConfig.of(**config), router_url=engine.url, run_seed=5, teacher=teacher)

    return build


def rewards(samples):
    return [sample.reward for sample in samples]


def test_every_sample_of_a_rollout_carries_the_teachers_log_probs(manager, asked, expected):
    given = manager()
    asked.clear()
    batch = given.generate(0)
    assert len(asked) == 4
    assert [sample.teacher_log_probs for sample in batch.samples] == [
        expected(sample.tokens, 2) for sample in batch.samples
    ]
    assert rewards(batch.samples) == [0.0] * 4
    assert batch.columns().batch() == batch


def test_a_reward_that_is_asked_for_counts_beside_it(manager):
    samples = manager(rm_type="first_integer").generate(0).samples
    assert rewards(samples) == [0, 0, 1, 1]
    assert all(sample.teacher_log_probs for sample in samples)


def test_samples_that_are_scored_together(manager, tmp_path):
    (tmp_path / "own.py").write_text("async def score(args, samples): return [float(len(samples))] * len(samples)")
    samples = manager(custom_rm_path=f"{tmp_path}/own.py:score", group_rm=True).generate(0).samples
    assert rewards(samples) == [2.0] * 4
    assert all(sample.teacher_log_probs for sample in samples)


def test_an_own_reward_function_may_be_the_teacher(manager, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def score(args, sample):\n    sample.teacher_log_probs = [-1.0, -2.0]\n    return 0.5\n")
    samples = manager(opd_type=None, rm_url=None, custom_rm_path=f"{own}:score").generate(0).samples
    assert [sample.teacher_log_probs for sample in samples] == [[-1.0, -2.0]] * 4


def test_evaluation_asks_no_teacher_and_is_scored_as_ever(manager, asked, write_rows):
    held_out = write_rows(ROWS[:2], "held_out.jsonl")
    for changes in ({}, {"rm_type": "first_integer"}):
        given = manager(eval_prompt_data=("sums", held_out), **changes)
        asked.clear()
        report = given.evaluate(0)
        assert asked == []
        assert report.scores == {"sums": 0.5}
        assert {sample.teacher_log_probs for sample in report.samples["sums"]} == {None}


def test_rows_need_no_label_where_nothing_compares(manager, write_rows):
    path = write_rows([{"prompt": "say"}] * 2, "bare.jsonl")
    assert rewards(manager(prompt_data=path).generate(0).samples) == [0.0] * 4


def test_without_its_log_probs_a_rollout_fails_and_takes_no_prompts(manager, engine, asked):
    given = manager()
    before, generate = given.state_dict(), engine.answer
    engine.answer = lambda number, body: generate(number, body) if body["sampling_params"]["max_new_tokens"] else 400
    with pytest.raises(TeacherError, match=r"sample \d of \d+ tokens: the teacher at .* refused it \(HTTP 400"):
        given.generate(0)
    assert given.state_dict() == before
    dropping = manager(teacher=make_teacher_dropping(given, engine, generate))
    engine.answer = lambda number, body: generate(number, body) if body["sampling_params"]["max_new_tokens"] else 400
    assert [sample.remove_sample for sample in dropping.generate(0).samples] == [True] * 4


def make_teacher_dropping(given, engine, answer):
    """A teacher that was checked while it answered."""
    engine.answer = answer
    return make_teacher(given._config.changed(rm_on_failure="drop"))


def test_a_teacher_that_cannot_teach_is_told_when_the_object_is_made(manager, engine, answers):
    engine.answer = answers(200)
    with pytest.raises(TeacherError, match="does not know token 273 of the student"):
        manager()
