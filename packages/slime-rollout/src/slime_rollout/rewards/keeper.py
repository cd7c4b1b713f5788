"""The pool's other end: one process that has imported the verifier, and forks the workers that run it.

    pool ──requests──▶ keeper ──one at a time──▶ worker (forked, memory limited, killed at its time limit)
         ◀──replies──         ◀─────────────────

A worker that dies is replaced by a fork of the keeper, in milliseconds. Pipe messages are lines of JSON. When the
pool's end of the pipe closes, however its process ended, the keeper ends the workers and itself.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import io
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from slime_core.user_functions import load_function
from slime_rollout.rewards.registry import find_rule

Verifier = Callable[[str, str, dict[str, Any]], Any]

_PR_SET_PDEATHSIG = 1
_REQUESTS, _REPLIES = 3, 4  # a worker's ends of its pipes
_ERROR_CHARACTERS = 300  # keeps a reply below what a pipe takes at once
_MOST_ENTRIES = 32
_LARGEST = 1e300


def load_verifier(target: str) -> Verifier:
    """A rule by name, made ready; or a function ``(response, label, metadata)`` by path."""
    if ":" in target:
        return load_function(target, "verifier", arguments=("response", "label", "metadata"))
    verifier = find_rule(target).score
    verifier("</think>\\boxed{\\frac{1}{2}+x}", "x+0.5", {})  # imports what it needs, before the first fork
    return verifier


class _Worker:
    """A forked process that scores one request at a time."""

    def __init__(self, verifier: Verifier, memory_limit: int) -> None:
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        keeper = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _work(verifier, request_read, reply_write, memory_limit, keeper)
        os.close(request_read)
        os.close(reply_write)
        self.request_fd, self.reply_fd = request_write, reply_read
        self.job: int | None = None
        self.deadline = 0.0

    def start(self, job: int, arguments: Sequence[Any], time_limit: float) -> None:
        self.job, self.deadline = job, time.monotonic() + time_limit
        with contextlib.suppress(BrokenPipeError):  # it died: the end of its replies tells
            _write(self.request_fd, json.dumps(arguments).encode() + b"\n")

    def end(self) -> int:
        """Kill it and all of its process group; its exit status as `os.waitstatus_to_exitcode` gives it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1]
        os.close(self.request_fd)
        os.close(self.reply_fd)
        return os.waitstatus_to_exitcode(status)


def _work(verifier: Verifier, request_fd: int, reply_fd: int, memory_limit: int, keeper: int) -> NoReturn:
    """The worker's life. Whatever is raised ends it here: the keeper's own way out would end the other workers."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            _serve(verifier, request_fd, reply_fd, memory_limit)
            code = 0
    finally:
        os._exit(code)


def _serve(verifier: Verifier, request_fd: int, reply_fd: int, memory_limit: int) -> None:
    """Answer requests. The verifier's standard streams lead nowhere; its memory is limited."""
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    # First out of the way of the numbers that they get.
    moved = [fcntl.fcntl(old, fcntl.F_DUPFD, _REPLIES + 1) for old in (request_fd, reply_fd)]
    for old, new in ((null, 0), (null, 1), (null, 2), (moved[0], _REQUESTS), (moved[1], _REPLIES)):
        os.dup2(old, new, inheritable=new < _REQUESTS)
    os.closerange(_REPLIES + 1, os.sysconf("SC_OPEN_MAX"))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory_limit if most == resource.RLIM_INFINITY else min(memory_limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with io.FileIO(_REQUESTS, "r") as raw, io.BufferedReader(raw) as requests:
        for line in requests:
            reply = _answer(verifier, json.loads(line))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory_limit / 2
            _write(_REPLIES, json.dumps({**reply, "last": grown}).encode() + b"\n")
            if grown:
                break


def _answer(verifier: Verifier, arguments: Sequence[Any]) -> dict[str, Any]:
    try:
        value = verifier(*arguments)
        if _is_reward(value):
            return {"value": value}
        return {"failure": f"it returned {value!r}"[:_ERROR_CHARACTERS] + ", which is no finite number"}
    except MemoryError:
        return {"failure": "it reached the memory limit"}
    except RecursionError:
        return {"failure": "it nests too deep"}
    except BaseException as error:
        return {"failure": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}


def _is_reward(value: Any) -> bool:
    """Whether it is a number, or a few by name: a reply has to be below what a pipe takes at once."""
    if isinstance(value, dict):
        names = all(isinstance(name, str) for name in value) and sum(map(len, value)) < _ERROR_CHARACTERS
        return 0 < len(value) <= _MOST_ENTRIES and names and all(map(_is_number, value.values()))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST  # which NaN is not either


class _Keeper:
    """Hands requests to idle workers, watches the time, and replaces workers."""

    def __init__(self, verifier: Verifier, workers: int, time_limit: float, memory_limit: int, replies: int) -> None:
        self._verifier, self._time_limit, self._memory_limit = verifier, time_limit, memory_limit
        self._count, self._replies = workers, replies
        self._selector = selectors.DefaultSelector()
        self._waiting: deque[tuple[int, Sequence[Any]]] = deque()
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._add_worker()

    def run(self) -> None:
        """Until the pool's end of the pipe closes."""
        self._selector.register(0, selectors.EVENT_READ, None)
        unread = b""
        while True:
            for key, _ in self._selector.select(self._seconds_left()):
                if key.data is not None:
                    self._hear(key.data)
                    continue
                chunk = os.read(0, 1 << 20)
                if not chunk:
                    return
                *lines, unread = (unread + chunk).split(b"\n")
                self._waiting.extend(json.loads(line) for line in lines)
            self._end_the_late()
            self._hand_out()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _hear(self, worker: _Worker) -> None:
        line = os.read(worker.reply_fd, 1 << 16)
        if not line:
            self._remove(worker)
            return
        reply = json.loads(line)
        last = reply.pop("last")
        self._reply(worker.job, reply)
        worker.job = None
        if last:
            self._remove(worker)
            self._add_worker()

    def _remove(self, worker: _Worker, failure: str | None = None) -> None:
        """End a worker. One that was idle is replaced when it is needed, or those that cannot live had no end."""
        self._selector.unregister(worker.reply_fd)
        self._workers.remove(worker)
        status = worker.end()
        if worker.job is not None:
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
            self._reply(worker.job, {"failure": failure or f"its process ended with {how}"})
            self._add_worker()

    def _add_worker(self) -> _Worker:
        worker = _Worker(self._verifier, self._memory_limit)
        self._workers.append(worker)
        self._selector.register(worker.reply_fd, selectors.EVENT_READ, worker)
        return worker

    def _end_the_late(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.job is not None and one.deadline <= now]:
            self._remove(worker, f"it took more than {self._time_limit:g} s")

    def _hand_out(self) -> None:
        while self._waiting:
            worker = next((one for one in self._workers if one.job is None), None)
            if worker is None and len(self._workers) == self._count:
                return
            job, arguments = self._waiting.popleft()
            (worker or self._add_worker()).start(job, arguments, self._time_limit)

    def _reply(self, job: int | None, reply: dict[str, Any]) -> None:
        _write(self._replies, json.dumps({"job": job, **reply}).encode() + b"\n")

    def _seconds_left(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.job is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def main(arguments: Sequence[str]) -> None:
    """``keeper TARGET --workers N --time-limit SECONDS --memory-limit BYTES``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--time-limit", type=float, required=True)
    parser.add_argument("--memory-limit", type=int, required=True)
    given = parser.parse_args(arguments)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a verifier writes as it is imported is no reply
    verifier = load_verifier(given.target)
    keeper = _Keeper(verifier, given.workers, given.time_limit, given.memory_limit, replies)
    try:
        _write(replies, b'{"ready": true}\n')
        keeper.run()
    except BrokenPipeError:  # the pool is gone
        pass
    finally:
        keeper.close()


if __name__ == "__main__":
    main(sys.argv[1:])
