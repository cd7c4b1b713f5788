"""Making the next tensors while the last ones are written."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD_BYTES = 2**29
"""Nothing larger is made ahead, so that a large weight stays alone in memory."""

_T = TypeVar("_T")


def made_ahead(jobs: Iterable[tuple[int, Callable[[], _T]]]) -> Generator[_T, None, None]:
    """Results in order. While the caller uses one, a thread makes the next, unless that is large.

    One result is made at a time, and only one ahead. An error of a job comes when its result is asked for. Close the
    iterator (:func:`contextlib.closing`) if it may be left early: closing waits for the job that runs.

    Args:
        jobs: The size of each result in bytes, and what makes it.

    Yields:
        What the jobs return.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="made_ahead") as beside:
        ahead: Future[_T] | None = None
        rest = iter(jobs)
        job = next(rest, None)
        while job is not None:
            result = ahead.result() if ahead else job[1]()
            job = next(rest, None)
            ahead = beside.submit(job[1]) if job and job[0] <= AHEAD_BYTES else None
            yield result
            del result
