"""The timeline as a Chrome trace, which https://ui.perfetto.dev and ``chrome://tracing`` open.

The format is the "Trace Event Format" of the Chromium project: a process per run, a thread per lane, times in
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def chrome_trace(data: dict[str, Any]) -> dict[str, Any]:
    """The timelines of a page's runs as one trace."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(data["runs"]))}


def _events(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    first = min((run["began"] for run in runs), default=0.0)
    for process, run in enumerate(runs, 1):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": run["name"]}}
        kinds = run["timeline"]["kinds"]
        for number, lane in enumerate(run["timeline"]["lanes"], 1):
            # Threads have numbers of their own in the whole trace, and none is its process's, which is the main thread.
            place = {"pid": process, "tid": process * 1000 + number}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": lane["who"]}}
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": number}}
            for start, seconds, what, rollout in lane["spans"]:
                times = {"ts": round((run["began"] - first + start) * 1e6), "dur": round(seconds * 1e6)}
                yield {"ph": "X", "name": kinds[what], "cat": "slime", **place, **times, "args": {"step": rollout}}
