"""Samples in the hands of a function that may not come back, and then still holds them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from slime_core.types import Sample


@contextlib.contextmanager
def lent(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Second objects of the same samples, for a function of the user's.

    What is set in either is set in both, so the function may set what it likes. If the block raises, as it does when
    the function is left behind, the samples keep what they have then and share nothing with the function any more.
    """
    twins = []
    for sample in samples:
        # One dictionary for two objects: a copy would have to be compared with the sample afterwards, field by field.
        sample.__dict__ = dict(vars(sample))
        twin = object.__new__(type(sample))
        twin.__dict__ = vars(sample)
        twins.append(twin)
    try:
        yield twins
    except BaseException:
        from slime_rollout.data.group_state import copied_group  # `slime_rollout.data` needs the rules

        for sample, whole in zip(samples, copied_group(list(samples)), strict=True):
            sample.__dict__ = vars(whole)
        raise
