"""Who was busy when, from the spans in ``metrics.jsonl`` and the engines' logs; and what the other time went to."""

from __future__ import annotations

import itertools
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.files import open_file
from slime_launch.tracking import Row

LOOP, GENERATION = "loop", ("generate", "evaluate")
MOST_ENGINES, MOST_SPANS = 16, 50_000
MOST_LOG_BYTES = 64 * 2**20
"""Of an engine's log, this much of its end is read."""
_BATCH = re.compile(
    rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] "
    rb"(?:Prefill batch, #new-seq: (\d+)|Decode batch, #running-req: (\d+))",
    re.MULTILINE,
)
_LONGEST_QUIET = 30.0  # seconds between lines of an engine that is busy: it writes one for every 40 tokens
_BUSY = "generate"


class Interval(NamedTuple):
    """A phase of a rollout, from ``start`` to ``end``, in seconds since 1970."""

    start: float
    end: float
    what: str
    rollout_id: int


Lanes = dict[str, list[Interval]]


def lanes_of(rows: Sequence[Row], logs: Path, *, overlaps: bool) -> Lanes:
    """The intervals of the loop, the rollout worker, the engines and the ranks, in order of time.

    ``overlaps`` is whether engines generate while the loop does something else.
    """
    lanes: defaultdict[str, list[Interval]] = defaultdict(list)
    for row in rows:
        for who, spans in row.get("spans", {}).items():
            lanes[who] += [Interval(start, start + seconds, what, row["rollout_id"]) for what, start, seconds in spans]
    windows = [one for one in lanes.get(LOOP, ()) if one.what in GENERATION]
    for path in sorted(logs.glob("engine_*.log"), key=lambda path: (len(path.name), path.name))[:MOST_ENGINES]:
        lanes[path.stem.replace("_", " ")] = list(_engine(path, None if overlaps else windows))
    order = sorted(lanes, key=lambda who: (_PLACES.get(who.split()[0], len(_PLACES)), len(who), who))
    return {who: sorted(lanes[who]) for who in order if lanes[who]}


_PLACES = {name: place for place, name in enumerate((LOOP, "rollout", "engine", "rank"))}


def _engine(path: Path, windows: Sequence[Interval] | None) -> Iterator[Interval]:
    """When an engine had requests, as far as the lines of its log tell, which have whole seconds.

    It is busy from a line that has some until the next; where lines are far apart, for as long as they usually are.
    With ``windows`` it is busy in these alone: what else is in its log, such as the first request of all, is left out.
    """
    times = [moment for moment, requests in _lines(path) if requests]
    parts = [(times, float("inf"), -1)]
    if windows is not None:
        bounds = [(one.start - 1, one.end, one.rollout_id) for one in windows]  # the log's seconds are whole
        parts = [([moment for moment in times if start <= moment <= end], end, number) for start, end, number in bounds]
    gaps = [later - sooner for part, *_ in parts for sooner, later in itertools.pairwise(part)]
    usual = max([1.0, *(gap for gap in gaps if gap < _LONGEST_QUIET)])
    for part, last, number in parts:
        busy = ((at, min(following, at + usual, last)) for at, following in itertools.pairwise([*part, float("inf")]))
        for start, end in _union(busy):
            yield Interval(start, end, _BUSY, number)


def _lines(path: Path) -> Iterator[tuple[float, int]]:
    """Seconds since 1970 of each batch, and its requests."""
    with open_file(path) as file:
        file.seek(max(path.stat().st_size - MOST_LOG_BYTES, 0))
        text = file.read()
    parsed: dict[bytes, float] = {}
    for stamp, prefilled, running in _BATCH.findall(text):
        if stamp not in parsed:
            parsed[stamp] = time.mktime(time.strptime(stamp.decode(), "%Y-%m-%d %H:%M:%S"))
        yield parsed[stamp], int(prefilled or running)


def lost_time(lanes: Mapping[str, Sequence[Interval]]) -> list[dict[str, Any]]:
    """The time in which trainers and engines did not work, by phase of the loop, the longest first.

    Seconds, and their share of all; of several ranks or engines the mean.
    """
    phases = lanes.get(LOOP, ())
    if not phases:
        return []
    began, ended = phases[0].start, max(one.end for one in phases)
    found: list[dict[str, Any]] = []
    for title, kind in (("trainers", "rank"), ("engines", "engine")):
        members = [spans for who, spans in lanes.items() if who.split()[0] == kind]
        sums: defaultdict[str, float] = defaultdict(float)
        for spans in members:
            busy = _union((one.start, one.end) for one in spans if one.what not in ("send", "save"))
            free = _gaps(busy, began, ended)
            left = sum(end - start for start, end in free)
            for what in dict.fromkeys(one.what for one in phases):
                seconds = _overlap(free, [(one.start, one.end) for one in phases if one.what == what])
                sums[what] += seconds
                left -= seconds
            sums["between phases"] += left
        for what, total in sums.items():
            if total > 0 and ended > began:
                mean = total / len(members)
                found.append({"what": f"{title} wait: {what}", "seconds": mean, "share": mean / (ended - began)})
    return sorted(found, key=lambda one: -one["seconds"])


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time in intervals that do not overlap, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _gaps(busy: Sequence[tuple[float, float]], began: float, ended: float) -> list[tuple[float, float]]:
    """The intervals between ``began`` and ``ended`` that are not ``busy``, which is a :func:`_union`."""
    neighbours = itertools.pairwise([(began, began), *busy, (ended, ended)])
    gaps = [(max(before, began), min(after, ended)) for (_, before), (after, _) in neighbours]
    return [(start, end) for start, end in gaps if start < end]


def _overlap(some: Sequence[tuple[float, float]], others: Iterable[tuple[float, float]]) -> float:
    """Seconds that are in both; ``some`` do not overlap each other."""
    total, first = 0.0, 0
    for start, end in _union(others):
        while first < len(some) and some[first][1] <= start:
            first += 1
        at = first
        while at < len(some) and some[at][0] < end:
            total += min(end, some[at][1]) - max(start, some[at][0])
            at += 1
    return total


def timeline(lanes: Lanes, began: float) -> dict[str, Any]:
    """As the page takes it; of a long run its end."""
    kinds = list(dict.fromkeys(one.what for spans in lanes.values() for one in spans))
    place = {what: at for at, what in enumerate(kinds)}
    starts = sorted((one.start for spans in lanes.values() for one in spans), reverse=True)
    since = starts[MOST_SPANS - 1] if len(starts) > MOST_SPANS else 0.0

    def shown(one: Interval) -> list[float]:
        return [round(one.start - began, 3), round(one.end - one.start, 3), place[one.what], one.rollout_id + 1]

    rows = [{"who": who, "spans": [shown(one) for one in spans if one.start >= since]} for who, spans in lanes.items()]
    return {"kinds": kinds, "lanes": rows, "lost": lost_time(lanes)}
