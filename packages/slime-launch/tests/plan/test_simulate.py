"""The simulation: cases that can be worked out by hand, and what holds in every run."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_launch.plan.profile import EngineSpeed, LoopSpeed, TrainerSpeed
from slime_launch.plan.setup import Setup
from slime_launch.plan.simulate import simulate
from support.simulated_case import GENERATE, PROFILE, SEND, TRAIN, of, seconds


def test_without_async_a_step_is_generate_and_train_and_send():
    outcome = of()
    step = GENERATE + TRAIN + SEND
    assert outcome.ends == pytest.approx([step * (number + 1) for number in range(12)])
    assert outcome.samples_per_second == pytest.approx(4 / step)
    assert outcome.tokens_per_second == pytest.approx(40 / step)
    assert outcome.trainers_idle == pytest.approx(1 - TRAIN / step)
    assert outcome.engines_idle == pytest.approx(1 - GENERATE / step)
    assert (outcome.mean_staleness, outcome.most_staleness) == (0, 0)


def test_generating_ahead_a_step_is_the_longer_half_and_the_pause():
    outcome = of(ahead=2)
    assert seconds(outcome) == pytest.approx(GENERATE + SEND, rel=0.1)
    trainer = TrainerSpeed(token_seconds=0.2, send_seconds=0.5)
    assert seconds(of(ahead=2, trainer=trainer)) == pytest.approx(8.0 + SEND)  # engines are done before
    assert of(ahead=2, trainer=trainer).trainers_idle == pytest.approx(SEND / 8.5)


def test_halves_that_share_a_machine_are_slower_while_both_work():
    shared = LoopSpeed(overlap_slowdown=1.5)
    assert of(loop=shared).ends == of().ends  # they take turns
    outcome = of(ahead=2, loop=shared, steps=80)
    assert seconds(outcome) == pytest.approx(GENERATE + 0.5 * TRAIN + SEND, rel=0.02)
    assert outcome.engines_idle == pytest.approx(SEND / seconds(outcome), abs=0.01)
    outcome = of(ahead=2, loop=shared, steps=80, trainer=TrainerSpeed(token_seconds=0.2, send_seconds=0.5))
    assert seconds(outcome) == pytest.approx(8.0 + 0.5 * GENERATE + SEND, rel=0.02)
    assert outcome.engines_idle == pytest.approx(1 - 1.5 * GENERATE / seconds(outcome), abs=0.01)


def test_of_one_rollout_ahead_the_engines_wait_where_they_are_the_faster_half():
    outcome = of(ahead=1, trainer=TrainerSpeed(token_seconds=0.2, send_seconds=0.5))
    assert seconds(outcome) == pytest.approx(8.5)
    assert outcome.engines_idle == pytest.approx(1 - GENERATE / 8.5)
    assert outcome.most_staleness == 1


def test_more_gpus_train_faster_and_further_steps_cost_their_fixed_part():
    assert seconds(of(actor_gpus=4)) == pytest.approx(GENERATE + 1 + 0.1 + SEND)
    assert seconds(of(optimizer_steps=2)) == pytest.approx(GENERATE + 2 + 0.4 + SEND)


def test_what_else_the_loop_does_takes_its_time():
    loop = LoopSpeed(prepare_seconds=1, between_seconds=2, save_seconds=12, evaluate_seconds=24, hand_over_seconds=4)
    plain = GENERATE + TRAIN + SEND + 3
    assert of(loop=loop).ends[-1] == pytest.approx(12 * plain)
    assert of(loop=loop, hands_over=True).ends[-1] == pytest.approx(12 * (plain + 4))
    assert of(loop=loop, save_interval=6).ends[-1] == pytest.approx(12 * plain + 2 * 12)
    assert of(loop=loop, evaluate_interval=5).ends[-1] == pytest.approx(12 * plain + 3 * 24)  # at the end, too


def test_the_same_seed_gives_the_same_run():
    profile = dataclasses.replace(PROFILE, lengths=((0.0, 1), (1.0, 100)))
    assert of(profile, ahead=2) == of(profile, ahead=2)
    assert of(profile, ahead=2).ends != of(profile, ahead=2, seed=2).ends


setups = st.builds(
    Setup,
    actor_gpus=st.integers(1, 4),
    engines=st.integers(1, 3),
    prompts=st.integers(1, 5),
    samples=st.integers(1, 3),
    steps=st.integers(1, 10),
    in_flight=st.none() | st.integers(5, 8),
    partial=st.booleans(),
    ahead=st.none() | st.integers(1, 3),
    most_stale=st.none() | st.integers(0, 3),
    update_interval=st.just(1),
    concurrency=st.sampled_from([1, 4, 1000]),
    seed=st.integers(0, 9),
)


@settings(max_examples=60, deadline=None)
@given(setups, st.sampled_from([0.0, 0.3]), st.sampled_from([0.0, 0.7]), st.sampled_from([None, 50.0]))
def test_in_every_run_no_group_is_lost_and_none_is_too_old(setup, dropped, reward, prefill):
    engine = EngineSpeed(decode=((1, 10.0), (4, 25.0)), most_running=5, prefill_tokens_per_second=prefill)
    profile = dataclasses.replace(
        PROFILE,
        lengths=((0.0, 1), (0.8, 10), (1.0, 90)),
        engine=engine,
        dropped=dropped,
        reward_seconds=reward,
        reward_workers=2,
        prompt_tokens=7,
    )
    if setup.ahead is not None:  # as commands are checked
        setup = dataclasses.replace(setup, in_flight=None, partial=False)
    outcome = simulate(profile, setup)
    assert len(outcome.ends) == setup.steps and outcome.ends == sorted(outcome.ends)
    assert outcome.started == outcome.trained + outcome.dropped + outcome.left
    assert outcome.trained == setup.steps * setup.prompts
    assert outcome.most_staleness <= (setup.steps if setup.most_stale is None else setup.most_stale)
    assert 0 <= outcome.trainers_idle <= 1 and -1e-9 <= outcome.engines_idle <= 1
    if setup.ahead is None and setup.in_flight is None:
        assert outcome.most_staleness == 0
    if setup.most_stale == 0 and setup.ahead is not None:  # nothing is generated ahead
        turns = simulate(profile, dataclasses.replace(setup, ahead=None, most_stale=None))
        assert dropped or outcome.ends == pytest.approx(turns.ends)
