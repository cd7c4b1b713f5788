"""Groups of a simulated run: which are begun, and which are trained on."""

import dataclasses

import pytest

from support.simulated_case import GENERATE, PROFILE, SEND, TRAIN, of, seconds


def test_weights_that_are_sent_less_often_are_older():
    outcome = of(update_interval=3)
    assert outcome.ends[-1] == pytest.approx(12 * (GENERATE + TRAIN) + 4 * SEND)
    assert (outcome.mean_staleness, outcome.most_staleness) == (1.0, 2)


def test_over_sampling_trains_on_the_first_and_partial_rollouts_keep_the_tokens_of_the_others():
    profile = dataclasses.replace(PROFILE, lengths=((0.0, 5), (0.9, 50), (1.0, 500)))
    plain = of(profile, prompts=8, steps=40, engines=4)
    cut = of(profile, prompts=8, steps=40, engines=4, in_flight=16)
    partial = of(profile, prompts=8, steps=40, engines=4, in_flight=16, partial=True)
    assert plain.samples_per_second < partial.samples_per_second
    assert cut.tokens_per_second < partial.tokens_per_second  # what was cut off is generated again
    assert partial.most_staleness > 0


def test_a_filter_has_more_groups_generated():
    outcome = of(dropped=0.5, steps=60)
    assert outcome.dropped > 0
    assert outcome.started == outcome.trained + outcome.dropped + outcome.left
    assert seconds(outcome) > seconds(of(steps=60))
