"""Engines of a simulated run: who shares one, and when responses are finished and scored."""

import dataclasses

import pytest

from slime_launch.plan.profile import EngineSpeed
from slime_launch.plan.simulate import simulate
from support.simulated_case import GENERATE, PROFILE, SEND, SETUP, TRAIN, of, seconds


def test_responses_of_two_lengths_share_an_engine_until_the_short_one_is_finished():
    """10 and 30 tokens: 2 seconds together at 5 tokens per second each, then 20 tokens at 10."""
    profile = dataclasses.replace(PROFILE, lengths=((0.0, 10), (0.499, 10), (0.501, 30), (1.0, 30)))
    outcome = simulate(profile, dataclasses.replace(SETUP, prompts=1, steps=40))
    train = {tokens: 1 + tokens * 0.01 + SEND for tokens in (20, 40, 60)}
    steps = [after - before for before, after in zip([0.0, *outcome.ends], outcome.ends, strict=False)]
    allowed = sorted({2 + train[20], 4 + train[40], 6 + train[60]})
    assert {min(allowed, key=lambda one: abs(one - step)) for step in steps} == set(allowed)
    assert all(min(abs(one - step) for one in allowed) < 1e-6 for step in steps)


def test_an_engine_runs_no_more_responses_than_it_may():
    """Each alone has 10 tokens per second, and two at a time 20: four of 10 tokens take two turns."""
    engine = EngineSpeed(decode=((1, 10.0), (2, 20.0)), most_running=2)
    assert seconds(of(engine=engine)) == pytest.approx(2.0 + TRAIN + SEND)
    assert seconds(of(engine=engine, concurrency=1)) == pytest.approx(4.0 + TRAIN + SEND)


def test_responses_are_shared_out_evenly_to_engines():
    assert seconds(of(engines=2)) == pytest.approx(GENERATE / 2 + TRAIN + SEND)
    assert seconds(of(engines=4)) == pytest.approx(GENERATE / 4 + TRAIN + SEND)
    assert seconds(of(engines=8)) == pytest.approx(GENERATE / 4 + TRAIN + SEND)


def test_prompts_hold_decoding_up():
    engine = EngineSpeed(decode=((1, 10.0),), most_running=100, prefill_tokens_per_second=100.0)
    assert seconds(of(engine=engine, prompt_tokens=50)) == pytest.approx(GENERATE + 4 * 0.5 + TRAIN + SEND)


@pytest.mark.parametrize(("workers", "waiting"), [(None, 3.0), (4, 3.0), (2, 6.0), (1, 12.0)])
def test_scores_come_after_the_last_response_as_many_at_a_time_as_there_are_workers(workers, waiting):
    outcome = of(reward_seconds=3.0, reward_workers=workers)
    assert seconds(outcome) == pytest.approx(GENERATE + waiting + TRAIN + SEND)
