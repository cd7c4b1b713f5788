"""Protocols that nothing of slime takes any more; they go with the next release.

A run talks to `slime_core.interfaces.Batches` and `Engines`; a filter of groups is a user-defined function.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from slime_core.types import EvalReport, Group, RolloutBatch, Verdict


class GroupFilter(Protocol):
    """Decides which scored groups are trained on, such as those whose rewards differ."""

    def __call__(self, group: Group) -> Verdict:
        """``Keep()``, or ``Drop(reason)``."""


@runtime_checkable
class Rollout(Protocol):
    """The generation half: parts of `Batches` and `Engines`."""

    def generate(self, rollout_id: int) -> RolloutBatch:
        """Generate and score one rollout."""

    def evaluate(self, rollout_id: int) -> EvalReport:
        """Score the held-out prompts."""

    def sleep(self, keep_weights: bool = False) -> None:
        """As of `Engines`."""

    def wake(self, weights_only: bool = False) -> None:
        """As of `Engines`."""

    def state_dict(self) -> dict[str, Any]:
        """State of the data source, as plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
