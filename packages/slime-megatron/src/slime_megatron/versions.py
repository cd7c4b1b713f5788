"""Copies of the policy's earlier weights, which generated the tokens that are trained on now: ``--keep-old-actor``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slime_megatron.model import Chunks
from slime_megatron.weights import HostWeights


class KeptVersions:
    """The policy's weights by version, in host memory, as far back as later rollouts may have tokens of.

    A later rollout may have older tokens than an earlier one, which was dropped as too old and generated again. So a
    copy is kept until the policy is more than ``most_behind`` versions ahead of it.

    Ranks call its methods with the same arguments, so that all of them run the same forward passes.
    """

    def __init__(self, model: Chunks, most_behind: int) -> None:
        self._model = model
        self._most_behind = most_behind
        self._copies: dict[int, HostWeights] = {}
        self._current: int | None = None

    @property
    def current(self) -> int | None:
        """The version of the weights of now; ``None`` if engines do not have them."""
        return self._current

    def pushed(self, version: int) -> None:
        """The weights of now are sent to the engines as ``version``. What is too old by now is dropped."""
        self._current, oldest = version, version - self._most_behind
        self._copies = {kept: copy for kept, copy in self._copies.items() if kept >= oldest}

    def before_training(self) -> None:
        """Keep the weights of now if engines have them."""
        if self._current is not None:
            self._copies[self._current] = HostWeights(self._model)
        self._current = None

    def source(self, version: int) -> int | None:
        """The kept version that stands for ``version``; ``None`` for the weights of now.

        That is the version itself or, if it is no longer kept, the next newer one: a response may have begun long ago.
        Tokens that no engine generated have version -1 and go by the weights of now.
        """
        if version < 0 or version == self._current:
            return None
        return min((kept for kept in self._copies if kept >= version), default=None)

    def __getitem__(self, version: int) -> HostWeights:
        return self._copies[version]

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._copies))

    def put(self, version: int, weights: HostWeights) -> None:
        """Have ``weights`` again, which a checkpoint holds."""
        self._copies[version] = weights

    def clear(self) -> None:
        """Have nothing: other weights are loaded."""
        self._copies, self._current = {}, None


def by_source(versions: KeptVersions, wanted: Collection[int]) -> dict[int | None, list[int]]:
    """What stands for each of the ``wanted`` versions: kept version, or ``None``, and those that it stands for."""
    sources: dict[int | None, list[int]] = {}
    for version in sorted(wanted):
        sources.setdefault(versions.source(version), []).append(version)
    return sources
