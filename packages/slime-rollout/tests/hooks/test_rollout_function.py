"""Rollouts and evaluations that user-defined functions make, through the manager."""

import pytest

from slime_core.errors import DataError
from slime_core.metrics import rollout_metrics
from slime_rollout.config import BUILT_IN_ROLLOUTS

SOURCE = """
import dataclasses
from slime_core.types import Sample
from slime_rollout import get_model_url, post
from slime_rollout.hooks.rollout_function import RolloutFnTrainOutput

lent = []

def done(groups):
    for sample in (sample for group in groups for sample in group):
        sample.tokens, sample.response_length, sample.reward = [*sample.tokens, 7, 8], 2, float(sample.index % 2)
        sample.status = "completed"
    return groups

def plain(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        return {"held": {"rewards": [0.0, 1.0, 0.5], "truncated": [True, False, False]}}
    lent.append(data_source)
    return RolloutFnTrainOutput(done(data_source.get_samples(args.rollout_batch_size)), {"mine": rollout_id})

def choosy(args, rollout_id, data_source, evaluation=False):
    first, second, third, fourth = done(data_source.get_samples(4))
    data_source.add_samples([third])
    return [second, fourth]  # the first one is dropped

def own(args, rollout_id, data_source, evaluation=False):
    groups = [[Sample(index=place, group_index=900 + number, prompt="own") for place in range(2)] for number in (0, 1)]
    for sample in groups[0]:
        sample.trajectory_id = 0
    return done(groups)

def failing(args, rollout_id, data_source, evaluation=False):
    data_source.get_samples(3)
    1 / 0

def same_group(args, rollout_id, data_source, evaluation=False):
    group, other = done(data_source.get_samples(2))
    for sample in other:
        sample.group_index = group[0].group_index
    return [group, other]

async def asking(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        reply = await post(get_model_url(args), {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 2}})
        sample.append_response(reply["output_ids"], text=reply["text"])
        sample.status, sample.reward = "completed", 1.0
    return groups

def held_out(args, rollout_id, data_source, evaluation):
    samples = [Sample(index=place, group_index=place, prompt="own") for place in range(2)]
    return {"held": {"rewards": [1, 0], "samples": sum(done([samples]), [])}}
"""


@pytest.fixture
def function(tmp_path):
    (tmp_path / "whole.py").write_text(SOURCE)
    return lambda name: f"{tmp_path}/whole.py:{name}"


def test_requests_of_a_whole_rollout_carry_the_runs_key(manager, function, engine):
    assert len(manager(rollout_function_path=function("asking"), key="the key").generate(0).groups) == 2
    assert {headers.get("Authorization") for headers in engine.headers} == {"Bearer the key"}


def test_a_function_makes_the_rollouts(manager, function):
    given = manager(rollout_function_path=function("plain"))
    batches = [given.generate(number) for number in range(2)]
    assert [group[0].group_index for batch in batches for group in batch.groups] == [0, 1, 2, 3]
    assert batches[1].metrics["mine"] == 1.0
    usual = rollout_metrics(batches[1].samples, None)
    assert {key: batches[1].metrics[key] for key in usual} == usual
    assert given.source.ledger.counts == {
        "generated": 12, "trained": 12, "filtered": 0, "aborted": 0, "buffered": 0, "out": 0
    }  # fmt: skip
    lent = given._function._function.__globals__["lent"]
    with pytest.raises(RuntimeError, match="belongs to a call that is over"):
        lent[0].get_samples(1)


def test_what_is_given_back_comes_again_and_what_is_kept_is_filtered(manager, function):
    given = manager(rollout_function_path=function("choosy"))
    assert [group[0].group_index for group in given.generate(0).groups] == [1, 3]
    assert given.source.ledger.counts["filtered"] == given.source.ledger.counts["buffered"] == 3
    state = given.state_dict()
    expected = [[sample.index for sample in group] for group in given.generate(1).groups]
    again = manager(rollout_function_path=function("choosy"))
    again.load_state_dict(state)
    assert [[sample.index for sample in group] for group in again.generate(1).groups] == expected
    assert expected == [[12, 13, 14], [18, 19, 20]]  # of groups 2 (from the buffer), 4, 5 and 6
    assert again.source.check_ledger() is None


def test_samples_of_its_own_get_numbers(manager, function):
    given = manager(rollout_function_path=function("own"))
    first, second = given.generate(0), given.generate(1)
    numbers = [sample.index for batch in (first, second) for sample in batch.samples]
    assert len(set(numbers)) == 8
    assert len({sample.trajectory for sample in first.groups[0]}) == 1  # two parts of one trajectory
    assert len({sample.trajectory for sample in first.groups[1]}) == 2
    assert given.source.check_ledger() is None and given.source.ledger.counts["trained"] == 6


def test_an_error_leaves_the_data_as_it_was(manager, function):
    given = manager(rollout_function_path=function("failing"))
    before = given.state_dict()
    with pytest.raises(DataError, match="raised ZeroDivisionError"):
        given.generate(0)
    assert given.state_dict() == before


def test_groups_have_numbers_of_their_own(manager, function):
    with pytest.raises(DataError, match="need one group_index, and each group another"):
        manager(rollout_function_path=function("same_group")).generate(0)


def test_evaluations(manager, function, write_rows):
    held_out = ("held", write_rows([{"prompt": "3", "label": "3"}], "held.jsonl"))
    report = manager(rollout_function_path=function("plain")).evaluate(4)
    assert report.rollout_id == 4 and report.scores == {"held": 0.5}
    assert report.metrics["eval/held"] == 0.5 and report.metrics["eval/held-truncated_ratio"] == pytest.approx(1 / 3)
    report = manager(eval_function_path=function("held_out"), eval_prompt_data=held_out).evaluate(0)
    assert report.scores == {"held": 0.5} and report.metrics["eval/held/response_len/mean"] == 2
    assert [sample.prompt for sample in report.samples["held"]] == ["own", "own"]


def test_the_names_of_what_is_built_in_change_nothing(manager, write_rows):
    held_out = ("held", write_rows([{"prompt": "3", "label": "42"}], "held.jsonl"))
    names = {"rollout_function_path": BUILT_IN_ROLLOUTS[0], "eval_function_path": BUILT_IN_ROLLOUTS[0]}
    given, usual = manager(**names, eval_prompt_data=held_out), manager(eval_prompt_data=held_out)
    plain = usual.generate(0)
    assert [sample.tokens for sample in given.generate(0).samples] == [sample.tokens for sample in plain.samples]
    assert given.evaluate(0).scores == usual.evaluate(0).scores
