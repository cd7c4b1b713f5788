"""What a group filter says."""

from __future__ import annotations

import dataclasses

from slime_core.errors import DataError


@dataclasses.dataclass(frozen=True)
class Keep:
    """Train on the group."""


@dataclasses.dataclass(frozen=True)
class Drop:
    """Do not train on the group.

    Attributes:
        reason: A short name; dropped groups are counted by it (``dynamic_filter/drop_<reason>``).
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise DataError(f"the reason to drop a group must be a name to count it by, got {self.reason!r}")


Verdict = Keep | Drop
