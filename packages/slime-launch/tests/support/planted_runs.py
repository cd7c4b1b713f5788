"""Runs that differ in one place."""

from support.written import Written


def plant(change):
    def planted():
        written = Written()
        change(written)
        return written

    return planted


def set_mask(written):
    written.samples[1][2].loss_mask = [1, 0]


def set_token(written):
    written.samples[2][3].tokens = [1, 2, 13, 21]


def set_log_prob(written):
    written.samples[0][1].rollout_log_probs = [-0.5, -1.0000001]


def flip_bit(written):
    written.weights = written.weights.copy()
    written.weights[1, 2, 2] ^= 1
