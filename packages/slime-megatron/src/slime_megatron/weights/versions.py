"""Copies of the policy's earlier weights, which generated the tokens that are trained on now: ``--keep-old-actor``."""

from __future__ import annotations

from collections.abc import Collection

from slime_megatron.model.build import Chunks
from slime_megatron.weights.host_copies import HostWeights


class KeptVersions:
    """The policy's weights by version, in host memory, as far back as later rollouts may have tokens of.

    A later rollout may have older tokens than an earlier one, which was dropped as too old and generated again. So a
    copy is kept until the policy is more than ``most_behind`` versions ahead of it.

    Ranks call its methods with the same arguments, so that all of them run the same forward passes.

    Attributes:
        copies: The kept weights, by version.
        current: The version of the weights of now; ``None`` if engines do not have them.
    """

    def __init__(self, model: Chunks, most_behind: int) -> None:
        self._model = model
        self._most_behind = most_behind
        self.copies: dict[int, HostWeights] = {}
        self.current: int | None = None

    def pushed(self, version: int) -> None:
        """The weights of now are sent to the engines as ``version``. What is too old by now is dropped."""
        self.current, oldest = version, version - self._most_behind
        self.copies = {kept: copy for kept, copy in self.copies.items() if kept >= oldest}

    def before_training(self) -> None:
        """Keep the weights of now if engines have them."""
        if self.current is not None:
            self.copies[self.current] = HostWeights(self._model)
        self.current = None

    def by_source(self, wanted: Collection[int]) -> dict[int | None, list[int]]:
        """The ``wanted`` versions by the kept version that stands for them, or ``None`` for the weights of now.

        That is the version itself or, if it is no longer kept, the next newer one: a response may have begun long ago.
        Tokens that no engine generated have version -1 and go by the weights of now.
        """
        sources: dict[int | None, list[int]] = {}
        for version in sorted(wanted):
            is_now = version < 0 or version == self.current
            source = None if is_now else min((kept for kept in self.copies if kept >= version), default=None)
            sources.setdefault(source, []).append(version)
        return sources

    def clear(self) -> None:
        """Have nothing: other weights are loaded."""
        self.copies, self.current = {}, None
