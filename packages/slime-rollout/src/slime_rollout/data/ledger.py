"""Where every sample went: generated = trained + filtered + aborted + buffered, checked after every rollout."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Group, Sample

_NAMED = 8  # samples that a message names at most


class Fate(enum.StrEnum):
    """How a sample that was handed out can end."""

    TRAINED = "trained"
    FILTERED = "filtered"
    ABORTED = "aborted"


class Ledger:
    """Counts trajectories from hand-out to their end, each by its number, so that no error hides behind another.

    A sample that is handed out for the first time counts as generated. It is out until it is settled (trained on,
    filtered or aborted) or given back. Memory grows with what is out or given back, not with what is settled.
    """

    def __init__(self) -> None:
        self._generated = self._faults = 0
        self._ended = {fate.value: 0 for fate in Fate}
        self._out: dict[int, Group] = {}
        self._buffered: set[int] = set()
        self._faulty: list[int] = []

    @property
    def counts(self) -> dict[str, int]:
        """Trajectories by name: ``generated``, ``trained``, ``filtered``, ``aborted``, ``buffered`` and ``out``."""
        return {"generated": self._generated, **self._ended, "buffered": len(self._buffered), "out": len(self._out)}

    def hand_out(self, groups: Iterable[Group]) -> None:
        """Groups leave the data source, fresh or from its buffer."""
        for group in groups:
            for number, samples in by_trajectory(group).items():
                if number in self._buffered:
                    self._buffered.remove(number)
                elif number in self._out:
                    self._fault(number)
                    continue
                else:
                    self._generated += 1
                self._out[number] = samples

    def put_back(self, groups: Iterable[Group]) -> None:
        """Groups come back to be handed out again; a `DataError` and no change if a sample is not out."""
        numbers = [number for group in groups for number in by_trajectory(group)]
        seen: set[int] = set()
        for number in numbers:
            if number not in self._out or number in seen:
                raise DataError(
                    f"sample {number} cannot be given back: it is not out, so it was trained on, dropped or given back "
                    "before, or never came from this data source; give back each sample once, instead of training on it"
                )
            seen.add(number)
        for number in numbers:
            del self._out[number]
        self._buffered |= seen

    def settle(self, groups: Iterable[Group], fate: Fate) -> None:
        """Groups that are out end. One that was not out is a fault that :meth:`problem` tells."""
        for group in groups:
            for number, samples in by_trajectory(group).items():
                self._ended[fate] += 1
                if self._out.pop(number, None) is None or len({sample.index for sample in samples}) < len(samples):
                    self._fault(number)

    def replace_out(self, groups: Iterable[Group]) -> None:
        """Groups that are out stand like this now. One that is not out is a fault that :meth:`problem` tells."""
        for group in groups:
            for number, samples in by_trajectory(group).items():
                if number not in self._out:
                    self._fault(number)
                else:
                    self._out[number] = samples

    def drop_buffered(self, groups: Iterable[Group]) -> None:
        """Groups are taken from the buffer for good: they count as filtered."""
        for group in groups:
            for number in by_trajectory(group):
                self._ended[Fate.FILTERED] += 1
                if number not in self._buffered:
                    self._fault(number)
                self._buffered.discard(number)

    def out_groups(self) -> list[Group]:
        """The groups that are out, as they stand, in the order in which they were handed out."""
        samples = [sample for samples in self._out.values() for sample in samples]
        return [list(group) for _, group in groupby(samples, key=lambda sample: sample.group_index)]

    def problem(self, buffer: Iterable[Group] | None, in_flight: Iterable[Group] = ()) -> str | None:
        """A message about samples that are lost or counted twice, or ``None``.

        All of ``buffer`` waits to be handed out again (``None``: that cannot be seen); ``in_flight`` is rightly out.
        """
        held = {sample.trajectory for group in buffer for sample in group} if buffer is not None else self._buffered
        running = {sample.trajectory for group in in_flight for sample in group}
        findings = {
            "out, neither trained on nor given back": sorted(self._out.keys() - running),
            "in flight without having been handed out": sorted(running - self._out.keys()),
            "missing from the buffer": sorted(self._buffered - held),
            "in the buffer without having been given back": sorted(held - self._buffered),
        }
        texts = [f"{what}: {_names(numbers, len(numbers))}" for what, numbers in findings.items() if numbers]
        if self._faults:
            texts.append(f"handed out or settled twice, or never generated: {_names(self._faulty, self._faults)}")
        terms = {**self._ended, "buffered": len(held)}
        if running:
            terms["in flight"] = len(running)
        if not texts and self._generated == sum(terms.values()):
            return None
        equation = " + ".join(f"{count} {name}" for name, count in terms.items())
        return f"the ledger does not balance: {self._generated} generated, {equation}; {'; '.join(texts)}"

    def given_back(self) -> list[int]:
        """The trajectories that wait to be handed out again, and those that are out."""
        return sorted(self._buffered | self._out.keys())

    def copy(self) -> Ledger:
        """Another ledger with the same counts, which refers to the same samples."""
        other = Ledger()
        vars(other).update({name: copy.copy(value) for name, value in vars(self).items()})
        return other

    def state_dict(self) -> dict[str, Any]:
        """The counts, as plain values. What is out or given back belongs to the data source's own state."""
        return {"generated": self._generated, **self._ended, "faults": self._faults, "faulty": list(self._faulty)}

    def load_state_dict(
        self, state: dict[str, Any], buffer: Iterable[Group], *, given_back: Iterable[int] = ()
    ) -> None:
        """Continue with saved counts; of the rest, ``buffer`` and ``given_back`` wait, and nothing is out."""
        self._generated = state["generated"]
        self._ended = {fate.value: state[fate.value] for fate in Fate}
        self._faults, self._faulty = state["faults"], list(state["faulty"])
        self._out = {}
        self._buffered = {sample.trajectory for group in buffer for sample in group}.union(given_back)

    def _fault(self, number: int) -> None:
        self._faults += 1
        if len(self._faulty) < _NAMED:
            self._faulty.append(number)


def by_trajectory(group: Iterable[Sample]) -> dict[int, list[Sample]]:
    """The samples of each trajectory, by its number."""
    parts: dict[int, list[Sample]] = {}
    for sample in group:
        parts.setdefault(sample.trajectory, []).append(sample)
    return parts


def _names(numbers: list[int], count: int) -> str:
    """``3 (samples 1, 2, 3)``."""
    more = ", …" if count > _NAMED else ""
    return f"{count} (sample{'s' * (count > 1)} {', '.join(map(str, numbers[:_NAMED]))}{more})"
