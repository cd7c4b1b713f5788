"""Times of the phases of a rollout; groups in it are tested with those who collect them."""

from slime_rollout.pipeline import Stopwatch


def test_a_stopwatch_counts_scored_samples_while_somebody_waits():
    seen = []
    watch = Stopwatch(2, lambda *counts: seen.append(counts))
    watch.generated()
    for _ in range(3):
        watch.scored()  # one more than a rollout has
    assert seen == [(1, 2), (2, 2), (2, 2)]
    assert watch.end(2).keys() == {"generate", "reward"}
    watch.scored()
    assert len(seen) == 3
    watch.begin()
    watch.scored()
    assert seen[-1] == (2, 2)  # of the three that the last rollout left, and this one
