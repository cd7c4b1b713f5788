"""The phases of a batch, as the timeline shows them."""

from __future__ import annotations

import pytest

from slime_core.types import Span
from slime_launch.rollouts import spans_of


def test_the_phases_of_a_batch_follow_each_other_and_the_rest_is_its_split():
    found = list(spans_of({"generate": 2.0, "reward": 0.5}, 10.0, 13.0))
    assert found == [
        Span("rollout", "generate", 10.0, 2.0),
        Span("rollout", "score", 12.0, 0.5),
        Span("rollout", "split", 12.5, pytest.approx(0.5)),
    ]
    assert list(spans_of({"generate": 2.0}, 10.0, 11.0))[-1].seconds == 0  # clocks that disagree
