"""When trainer and engines are asked about fixed tokens, and what a difference ends the run with."""

import dataclasses
import types

import numpy as np
import pytest

from slime_core.errors import SlimeError
from slime_launch.canary import Canary
from slime_launch.derived import canary_limit
from slime_launch.errors import RunError
from slime_launch.flags import parse_train
from slime_rollout.engine import WeightSyncError
from slime_rollout.engine.channels import ChannelSpec

SHAPE = types.SimpleNamespace(vocab_size=50, num_experts=None, moe_router_topk=None)
CHANNEL = ChannelSpec(("http://a", "http://b"))


class Halves:
    """Trainer, engines and their memory: engines are off by what ``off`` says."""

    def __init__(self):
        self.calls, self.off, self.cause = [], dict.fromkeys(CHANNEL.engine_urls, 0.0), []
        self.decoded = 0.0

    def log_probs(self, shard, *, on_poll):
        self.calls.append("trainer")
        assert all(sample.loss_mask[-1] for sample in shard.samples)
        return [np.full(sample.response_length, -2.0) for sample in shard.samples]

    def canary_log_probs(self, urls, tokens):
        self.calls.append("engines")
        count = sum(len(row) - 1 for row in tokens.rows)
        decoded = [-50.0 + self.decoded, -50.0] * (len(tokens.continuations) // 2)
        found = {url: [-2.0 - self.off[url]] * count + decoded for url in urls if url in self.off}
        looks = iter([False, True])
        return types.SimpleNamespace(done=lambda: next(looks), results=lambda: [found])

    def to_inspect(self):
        self.calls.append("memory")

    def inspect(self, channel, version, *, on_poll):
        self.calls.append(f"inspect {version}")
        if isinstance(self.cause, Exception):
            raise self.cause
        return self.cause


@pytest.fixture
def halves():
    return Halves()


def canary_of(halves, limit=1e-3):
    return Canary(limit, SHAPE, halves, halves, halves)


def poll():
    """Nothing to show."""


def test_each_update_is_compared_once(halves):
    canary = canary_of(halves)
    canary.check(poll)
    assert not canary.is_pending and halves.calls == []
    canary.sent(CHANNEL, 1, poll)
    assert canary.is_pending
    halves.off["http://a"] = 5e-4
    canary.check(poll)
    canary.check(poll)
    assert halves.calls == ["trainer", "engines"]
    row = canary.row()
    assert row["perf/weight_canary_abs_diff"] == pytest.approx(5e-4) and row["perf/weight_canary_time"] > 0
    assert canary.row()["perf/weight_canary_time"] == 0


def test_engines_are_asked_ahead_and_once_for_the_newest_weights(halves):
    canary, polls = canary_of(halves), []
    canary.ask()
    canary.sent(CHANNEL, 1, poll)
    canary.ask()
    canary.sent(CHANNEL, 2, poll)
    canary.ask()
    canary.ask()
    canary.check(lambda: polls.append(1))
    assert halves.calls == ["trainer", "engines"] * 2 and polls == [1]


def test_engines_that_get_the_same_weights_later_are_asked_with_the_others(halves):
    canary = canary_of(halves)
    canary.sent(dataclasses.replace(CHANNEL, engine_urls=("http://a",)), 3, poll)
    canary.sent(dataclasses.replace(CHANNEL, engine_urls=("http://b",)), 3, poll)
    halves.off |= {"http://a": 1.0, "http://b": 1.0}
    with pytest.raises(
        RunError, match=r"version 3: 2 of 2 engines .*a by 1 nats in reading, http://b by 1 nats .*; 0\.001 is allowed"
    ):
        canary.check(poll)


def test_engines_that_do_not_answer_are_not_compared(halves):
    canary = canary_of(halves)
    canary.sent(CHANNEL, 1, poll)
    halves.off.clear()
    canary.check(poll)
    assert "perf/weight_canary_abs_diff" not in canary.row()


def test_a_limit_of_zero_asks_nobody(halves):
    canary = canary_of(halves, 0.0)
    canary.sent(CHANNEL, 1, poll)
    canary.check(poll)
    assert halves.calls == [] and canary.row() == {}


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (WeightSyncError("weight version 7: http://b holds lm_head.weight wrong"), "b holds lm_head.weight wrong$"),
        (["decoder.final_layernorm.weight"], "trainer sends these otherwise than it has them: decoder.final"),
        ([], "every weight that can be compared is the trainer's, so the engine computes otherwise"),
        (SlimeError("no room"), "which weights differ could not be found out: no room$"),
    ],
)
def test_a_difference_ends_the_run_and_names_the_cause(halves, cause, words):
    canary = canary_of(halves)
    canary.sent(CHANNEL, 7, poll)
    halves.off["http://b"], halves.cause = 0.25, cause
    with pytest.raises(RunError, match=words) as caught:
        canary.check(poll)
    text = str(caught.value)
    assert (
        "weight version 7: 1 of 2 engines" in text and "b by 0.25 nats in reading for a token; 0.001 is allowed" in text
    )
    assert halves.calls == ["trainer", "engines", "memory", "inspect 7"]


def test_a_difference_in_decoding_alone_ends_the_run(halves):
    canary = canary_of(halves)
    canary.sent(CHANNEL, 7, poll)
    halves.decoded = 1.0
    with pytest.raises(
        RunError,
        match=r"7: 2 of 2 .*a by 0\.5 nats in decoding, http://b by 0\.5 .*computes again what it derives from weights",
    ):
        canary.check(poll)


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({}, 1e-4),
        ({"--bf16": None}, 0.4),
        ({"--weight-canary-limit": "0.03"}, 0.03),
        ({"--weight-canary-limit": "0"}, 0.0),
    ],
)
def test_the_limit_is_the_flags_or_that_of_the_type(flags, to_words, given, limit):
    flags.update(given)
    settings = parse_train(to_words(flags))
    assert canary_limit(settings.engine, settings.megatron, settings.rollout) == limit
