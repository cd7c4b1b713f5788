"""What is equal in two runs, and by how much the rest differs."""

import dataclasses

import numpy as np
import pytest

from slime_launch.diff import diff
from support.planted_runs import flip_bit, plant, set_log_prob, set_mask, set_token
from support.written import Written


def set_losses(*losses):
    return lambda written: written.losses.__setitem__(slice(None), losses)


def set_log_prob_and_losses(written):
    set_log_prob(written)
    written.losses = [0.5000001, 0.5000002, 0.5]


def add_weight(written):
    written.names = [*written.names, "bias"]
    written.weights = np.concatenate([written.weights, written.weights[:, :1]], axis=1)


SIZES = {
    "rounding": (
        set_log_prob_and_losses,
        [
            "of the 3 steps that both have\n  equal: samples' numbers and order, prompt, tokens, response_length, ",
            ", what each rank trains on, weights\n",
            "  rollout_log_probs: 1 of 12 samples differ, by 1.0e-07 at most\n",
            "  train/loss: 2 of 3 optimizer steps differ, by 2.0e-07 at most\n",
            "where they part, rounding explains it, up to 0.0001 nats in float32\n",
        ],
    ),
    "a token": (
        set_token,
        ["  tokens: 1 of 12 samples differ\n", "where they part, it is more than rounding: tokens\n"],
    ),
    "a loss": (set_losses(0.5, 0.25, 0.5), ["differ, by 2.5e-01 at most", "it is more than rounding: train/loss\n"]),
    "a loss that is not finite": (
        set_losses(0.5, float("nan"), 0.5),
        ["train/loss is 0.5 and not finite\n", "it is more than rounding: train/loss\n"],
    ),
    "a mask in one step alone": (set_mask, ["  loss_mask: 1 of 12 samples differ\n"]),
    "weights alone": (
        flip_bit,
        [
            "  weights: 1 of 9 checksums differ\n",
            "only checksums of weights differ, which do not say whether it is rounding",
        ],
    ),
    "a rollout of its own numbers": (
        lambda one: one.samples.__setitem__(
            1, [dataclasses.replace(each, index=each.index + 40) for each in one.samples[1]]
        ),
        [
            "  samples' numbers and order: 4 of 12 samples differ\n",
            "it is more than rounding: samples' numbers and order",
        ],
    ),
    "two samples that changed places": (
        lambda one: one.samples[2].__setitem__(slice(0, 2), one.samples[2][1::-1]),
        ["  samples' numbers and order: 2 of 12 samples differ\n", "  tokens: 2 of 12 samples differ\n"],
    ),
    "fewer samples in a rollout": (
        lambda one: one.samples[1].__delitem__(slice(2, None)),
        [
            "1 step is equal; in step 2 (rollout_id 1) the first run has 4 samples, the second 2\n",
            "  samples' numbers and order: 2 of 12 samples differ\n",
            "  tokens: 2 of 12 samples differ\n",
            "\n  equal: train/loss, weights\n",
        ],
    ),
    "rank order": (
        lambda one: setattr(one, "swapped", 1),
        ["  what each rank trains on: 2 of 6 shards differ\n", "it is more than rounding: what each rank trains on\n"],
    ),
    "another model": (
        add_weight,
        ["  weights: 3 of 12 checksums differ\n", "it is more than rounding: weights\n"],
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_equal_and_by_how_much_the_rest_differs_is_said(tmp_path, capsys, name):
    change, lines = SIZES[name]
    assert diff((Written().write(tmp_path / "a"), plant(change)().write(tmp_path / "b"))) == 1
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed


def test_without_the_rollouts_it_is_not_known_whether_log_probs_differ_by_rounding(tmp_path, capsys):
    runs = Written().write(tmp_path / "a"), plant(set_log_prob)().write(tmp_path / "b", keeps=False)
    assert diff(runs) == 1
    assert "it may be rounding, which is up to 0.0001 nats in float32: by how much" in capsys.readouterr().out
