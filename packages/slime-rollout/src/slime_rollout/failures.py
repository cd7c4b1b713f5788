"""What a sample's metadata says of why it could not be scored, or has no log-probs of the teacher."""

from __future__ import annotations

from slime_core.types import Sample

REWARD = "reward_failure"
TEACHER = "teacher_failure"
KEYS = (REWARD, TEACHER)


def withdraw(sample: Sample, key: str, *, drop: bool = True) -> None:
    """It worked this time: of a sample that came back the reason goes, and with the last one its being left out.

    Args:
        sample: Where the reason may be.
        key: Which.
        drop: Whether samples are left out for such a reason.
    """
    was_there = sample.metadata.pop(key, None) is not None
    if was_there and drop and not any(other in sample.metadata for other in KEYS):
        sample.remove_sample = False
