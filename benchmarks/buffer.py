"""Samples a second through the buffer of rollouts: add and get, save and restore, up to 1 million samples.

Groups of 8 with short prompts and responses of 8 tokens; 64 groups are added or taken at once, as a rollout does. `add`
gives groups back to a `RolloutDataSourceWithBuffer`, `get` takes them out again in the order in which they came, both
with the books of the ledger; `save` is `state_dict` and `restore` is `load_state_dict` in a new object, without the
disk; `check` holds the ledger against the buffer; `fresh` makes the samples from the data set. `time by size` is the
time for a sample of the largest buffer over that of one an eighth as large: 1 is linear. `memory` is the most that the
call took beyond what was there, for a sample, with the samples or plain values that it makes.

Times are CPU times of one thread. Goals: over 100,000 samples/s, and at most 1.5 times the time for a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from _measure import measure
from _records import Record

from slime_core.types import Group, Status
from slime_rollout.data import PromptDataset, PromptRow, RolloutDataSourceWithBuffer, TokenizedPrompt

RATE_GOAL, LINEAR_GOAL = 100_000.0, 1.5
SAMPLES, GROUP, AT_ONCE, PROMPTS, TOKENS = 1_000_000, 8, 64, 1000, 8
SMALLER = 8
PHASES = ("fresh", "add", "check", "save", "restore", "get")
WITHOUT_GOAL = ("fresh",)

Figures = dict[str, tuple[float, float]]


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both sizes.

    Args:
        out: Not used.
        quick: 80,000 samples instead of 1 million.
    """
    largest = 80_000 if quick else SAMPLES
    smaller, figures = phases(largest // SMALLER), phases(largest)
    records = []
    for name in PHASES:
        (before, _), (seconds, memory) = smaller[name], figures[name]
        goal = None if name in WITHOUT_GOAL else RATE_GOAL
        records += [
            Record(f"{name} {largest:,}", "samples/s", largest / seconds, "1/s", True, goal),
            Record(f"{name} {largest:,}", "time by size", seconds / before / SMALLER, "x", False, LINEAR_GOAL),
            Record(f"{name} {largest:,}", "memory", memory / largest, "B", False),
        ]
    return records


def phases(samples: int) -> Figures:
    """CPU seconds and bytes of each phase, for this many samples."""
    source, groups = new_source(), list[Group]()
    figures: Figures = {}
    state: dict[str, Any] = {}

    def step(name: str, call: Callable[[], None]) -> None:
        figures[name] = measure(call)
        print(f"{samples:,} samples: {name}: {figures[name][0]:.2f} s", flush=True)

    step("fresh", lambda: groups.extend(source.get_samples(samples // GROUP)))
    finish(groups)
    step("add", lambda: add(source, groups))
    groups.clear()
    step("check", lambda: expect_balance(source))
    step("save", lambda: state.update(source.state_dict()))
    source = new_source()
    step("restore", lambda: source.load_state_dict(state))
    state.clear()
    step("get", lambda: get(source, samples // GROUP))
    return figures


def new_source() -> RolloutDataSourceWithBuffer:
    """A source of a few short prompts."""
    prompts = [
        TokenizedPrompt(row=PromptRow(where="", prompt=f"{place} + 26 =", label=str(place + 26)), tokens=[place] * 6)
        for place in range(PROMPTS)
    ]
    return RolloutDataSourceWithBuffer(PromptDataset(prompts), samples_per_prompt=GROUP, shuffle=True)


def finish(groups: list[Group]) -> None:
    """Give every sample a scored response."""
    for group in groups:
        for sample in group:
            sample.append_response(range(TOKENS), text="83", log_probs=[-0.5] * TOKENS, weight_version=1)
            sample.status, sample.reward = Status.COMPLETED, 1.0


def add(source: RolloutDataSourceWithBuffer, groups: list[Group]) -> None:
    """Give all groups back."""
    for start in range(0, len(groups), AT_ONCE):
        source.add_samples(groups[start : start + AT_ONCE])


def get(source: RolloutDataSourceWithBuffer, count: int) -> None:
    """Take so many groups, all of which were given back."""
    for start in range(0, count, AT_ONCE):
        source.get_samples(min(AT_ONCE, count - start))
    if source.ledger.counts["buffered"]:
        raise RuntimeError(f"{source.ledger.counts['buffered']} samples are left in the buffer")


def expect_balance(source: RolloutDataSourceWithBuffer) -> None:
    """Every sample is in the buffer, and the ledger says so."""
    if problem := source.check_ledger():
        raise RuntimeError(problem)
