"""Verifiers in other processes: one that hangs, crashes or takes all memory costs one score, never the run.

    pool ──requests──▶ keeper ──one at a time──▶ worker (forked, memory limited, killed at its time limit)
         ◀──replies──         ◀─────────────────

The keeper is a process that has imported the verifier, which takes seconds; a worker that dies is replaced by a fork of
it, in milliseconds. When the connection to the pool closes, however its process ended, the keeper ends the workers and
itself.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from slime_core.interfaces import RewardValue
from slime_core.user_functions import load_function
from slime_rollout.errors import RewardError, UnreadableResponseError, VerifierError
from slime_rollout.rewards.rules import find_rule, read_reward

Verifier = Callable[[str, str, dict[str, Any]], Any]

_CACHED = 100_000  # scores
_KEEPER = "import sys; from slime_rollout.rewards.pool import keep; keep(*sys.argv[1:])"
_FORK = multiprocessing.get_context("fork")
_LENGTH, _JOB = struct.Struct("!i"), struct.Struct("!Q")  # a `Connection` puts the length of a message before it
_RECEIVING: set[asyncio.Task[None]] = set()  # an event loop keeps only weak references to its tasks
_PR_SET_PDEATHSIG = 1
_ERROR_CHARACTERS = 300


class VerifierPool:
    """Runs one verifier in at most ``workers`` processes.

    The processes start with the first request, and end with :meth:`close`, the last reference to the pool, the event
    loop of the requests, or this process. A request waits for a free worker without limit. Equal requests are scored
    once, while the first is pending and as long as its score is among the last 100,000; failures are not kept.

    ``target`` is a rule's name, or ``pkg.mod:fn`` or ``file.py:fn``: a function ``(response, label, metadata)``. A
    worker has ``time_limit`` seconds for one score, and ``memory_limit`` bytes of address space.
    """

    def __init__(self, target: str, *, workers: int, time_limit: float, memory_limit: int) -> None:
        self._target, self._limits = target, (str(workers), str(time_limit), str(memory_limit))
        self._keeper: _KeeperProcess | None = None
        self._pending: dict[bytes, asyncio.Task[RewardValue]] = {}
        self._scores: collections.OrderedDict[bytes, RewardValue] = collections.OrderedDict()

    async def score(self, response: str, label: str, metadata: Mapping[str, Any]) -> RewardValue:
        """The verifier's value. Raises `VerifierError` if there is none, `RewardError` if the keeper does not start."""
        request = json.dumps([response, label, dict(metadata)]).encode()
        key = hashlib.blake2b(request, digest_size=16).digest()  # responses are long
        if key in self._scores:
            self._scores.move_to_end(key)
            value = self._scores[key]
        else:
            if key not in self._pending:
                self._pending[key] = asyncio.create_task(self._verify(key, request))
            value = await asyncio.shield(self._pending[key])  # others may wait for it too
        return dict(value) if isinstance(value, dict) else value

    async def _verify(self, key: bytes, request: bytes) -> RewardValue:
        try:
            value = await self._running_keeper().ask(request)
        finally:
            del self._pending[key]
        self._scores[key] = value
        if len(self._scores) > _CACHED:
            self._scores.popitem(last=False)
        return value

    def _running_keeper(self) -> _KeeperProcess:
        if self._keeper is None or self._keeper.ended:
            try:
                self._keeper = _KeeperProcess(self._target, self._limits)
            except OSError as error:
                raise RewardError(f"the verifier {self._target} does not start: {error}") from error
            weakref.finalize(self, self._keeper.close)
        return self._keeper

    def close(self) -> None:
        """End the processes. Pending requests fail; another request starts new ones."""
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None


class _KeeperProcess:
    """A running keeper, for one event loop."""

    def __init__(self, target: str, limits: tuple[str, ...]) -> None:
        self._target = target
        self._jobs = itertools.count()
        self._pending: dict[int, asyncio.Future[RewardValue]] = {}
        self._ready = self.ended = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _KEEPER, str(theirs.fileno()), target, *limits],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # Ctrl-C is for this process, which closes the connection when it ends
            )
        self._streams = asyncio.ensure_future(asyncio.open_connection(sock=self._socket))
        receiving = asyncio.create_task(self._receive())
        _RECEIVING.add(receiving)
        receiving.add_done_callback(_RECEIVING.discard)

    async def ask(self, request: bytes) -> RewardValue:
        job = next(self._jobs)
        answer: asyncio.Future[RewardValue] = asyncio.get_running_loop().create_future()
        self._pending[job] = answer
        _, writer = await self._streams
        writer.write(_LENGTH.pack(_JOB.size + len(request)) + _JOB.pack(job) + request)
        return await answer

    def close(self) -> None:
        """End the keeper and its workers. From any thread, and twice without harm."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    async def _receive(self) -> None:
        reader, writer = await self._streams
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    self._take(await reader.readexactly(length))
        finally:
            self.ended = True
            self.close()
            error = self._end(self.process.wait())
            self._errors.close()
            writer.close()
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(error)

    def _take(self, message: bytes) -> None:
        if not message:
            self._ready = True
            return
        (job,), reply = _JOB.unpack_from(message), json.loads(message[_JOB.size :])
        answer = self._pending.pop(job)
        if answer.done():  # cancelled
            return
        if "failure" in reply:
            answer.set_exception(UnreadableResponseError(reply["failure"]))
        elif "ended" in reply:
            answer.set_exception(VerifierError(reply["ended"]))
        else:
            answer.set_result(reply["value"])

    def _end(self, code: int) -> RewardError:
        if self._ready:
            return VerifierError(f"the verifiers of {self._target} ended with exit code {code}")
        self._errors.seek(0)
        *_, last = ["", *self._errors.read().decode(errors="replace").strip().splitlines()]
        return RewardError(f"the verifier {self._target} does not start: {last or f'exit code {code}'}")


def keep(descriptor: str, target: str, workers: str, time_limit: str, memory_limit: str) -> None:
    """The keeper's life: load the verifier, start workers, and serve until the pool's end closes."""
    connection: Connection[Any, Any] = Connection(int(descriptor))
    if ":" in target:
        verifier = load_function(target, "verifier", arguments=("response", "label", "metadata"))
    else:
        verifier = find_rule(target).score
        verifier("</think>\\boxed{\\frac{1}{2}+x}", "x+0.5", {})  # imports what it needs, before the first fork
    keeper = _Keeper(connection, verifier, int(workers), float(time_limit), int(memory_limit))
    try:
        connection.send_bytes(b"")  # ready
        keeper.run()
    except (EOFError, OSError):  # the pool is gone
        pass
    finally:
        keeper.close()


class _Keeper:
    """Hands requests to idle workers, watches the time, and replaces workers."""

    def __init__(
        self, pool: Connection[Any, Any], verifier: Verifier, workers: int, time_limit: float, memory_limit: int
    ) -> None:
        self._pool, self._verifier, self._count = pool, verifier, workers
        self._time_limit, self._memory_limit = time_limit, memory_limit
        self._waiting: collections.deque[bytes] = collections.deque()
        self._workers = [_Worker(verifier, memory_limit) for _ in range(workers)]

    def run(self) -> None:
        while True:
            by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers}
            for ready in wait([self._pool, *by_connection], self._seconds_left()):
                if ready is self._pool:
                    self._waiting.append(self._pool.recv_bytes())
                else:
                    self._hear(by_connection[ready])
            self._end_late_ones()
            self._hand_out()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    def _hear(self, worker: _Worker) -> None:
        try:
            reply, is_last = worker.connection.recv()
        except (EOFError, OSError):
            self._remove(worker)
            return
        self._reply(worker, reply)
        if is_last:
            self._remove(worker)
            self._add_worker()

    def _reply(self, worker: _Worker, reply: dict[str, Any]) -> None:
        self._pool.send_bytes(worker.job + json.dumps(reply).encode())
        worker.job = b""

    def _remove(self, worker: _Worker, failure: str | None = None) -> None:
        """End a worker. One that was idle is replaced when it is needed: one that cannot live would be forever."""
        self._workers.remove(worker)
        code = worker.end()
        if worker.job:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._reply(worker, {"failure": failure} if failure else {"ended": f"its process ended with {how}"})
            self._add_worker()

    def _add_worker(self) -> _Worker:
        self._workers.append(_Worker(self._verifier, self._memory_limit))
        return self._workers[-1]

    def _end_late_ones(self) -> None:
        now = time.monotonic()
        for worker in [one for one in self._workers if one.job and one.deadline <= now]:
            self._remove(worker, f"it took more than {self._time_limit:g} s")

    def _hand_out(self) -> None:
        while self._waiting:
            worker = next((one for one in self._workers if not one.job), None)
            if worker is None and len(self._workers) == self._count:
                return
            (worker or self._add_worker()).start(self._waiting.popleft(), self._time_limit)

    def _seconds_left(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.job]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


class _Worker:
    """A forked process that scores one request at a time."""

    def __init__(self, verifier: Verifier, memory_limit: int) -> None:
        self.connection, theirs = _FORK.Pipe()
        self._process = _FORK.Process(target=_work, args=(verifier, theirs, memory_limit, os.getpid()))
        self._process.start()
        theirs.close()
        self.job = b""  # none: idle
        self.deadline = 0.0

    def start(self, message: bytes, time_limit: float) -> None:
        self.job, self.deadline = message[: _JOB.size], time.monotonic() + time_limit
        with contextlib.suppress(OSError):  # it died, which reading its reply shows
            self.connection.send_bytes(message[_JOB.size :])

    def end(self) -> int:
        """Kill it and all of its process group; its exit code, negative for a signal."""
        pid = self._process.pid or 0
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self._process.join()
        self.connection.close()
        return self._process.exitcode or 0


def _work(verifier: Verifier, connection: Connection[Any, Any], memory_limit: int, keeper: int) -> None:
    """A worker's life. The verifier's standard streams lead nowhere; its memory is limited."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        return
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    own = connection.fileno()  # the only other descriptor that stays: those of the keeper are not for verifiers
    os.closerange(3, own)
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    allowed = memory_limit if most == resource.RLIM_INFINITY else min(memory_limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grown = False
    while not grown:
        reply = _answer(verifier, json.loads(connection.recv_bytes()))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > memory_limit / 2
        connection.send((reply, grown))


def _answer(verifier: Verifier, arguments: list[Any]) -> dict[str, Any]:
    try:
        value = verifier(*arguments)
        if (reward := read_reward(value)) is not None:
            return {"value": reward}
        return {"failure": f"it returned {value!r}"[:_ERROR_CHARACTERS] + ", which is not a finite number"}
    except MemoryError:
        return {"failure": "it reached the memory limit"}
    except RecursionError:
        return {"failure": "it nests too deep"}
    except BaseException as error:
        return {"failure": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}
