"""Verifiers in processes of their own: what hangs, crashes or takes all memory there costs one score, never the run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from typing import IO, Any

from slime_core.interfaces import RewardValue
from slime_rollout.errors import RewardError, VerifierError

_CACHED = 100_000  # scores
_KEEPER = "slime_rollout.rewards.keeper"


class VerifierPool:
    """Runs one verifier in at most ``workers`` processes, from any event loop.

    The processes start with the first request, and end with :meth:`close`, with the last reference to the pool, or
    with this process, however it ends. A request waits for a free worker without limit; the time limit begins when it
    has one. Equal requests are scored once, while the first is open and as long as its score is among the last 100,000;
    failures are not kept.

    Args:
        target: A rule's name, or ``pkg.mod:fn`` or ``file.py:fn``: a function ``(response, label, metadata)``.
        workers: Processes at once.
        time_limit: Seconds for one score.
        memory_limit: Bytes of address space of one worker.
    """

    def __init__(self, target: str, *, workers: int, time_limit: float, memory_limit: int) -> None:
        self._target = target
        self._command = [sys.executable, "-m", _KEEPER, target, "--workers", str(workers)]
        self._command += ["--time-limit", str(time_limit), "--memory-limit", str(memory_limit)]
        self._lock = threading.RLock()
        self._link: _Link | None = None
        self._asked: dict[bytes, Future[RewardValue]] = {}
        self._scores: OrderedDict[bytes, RewardValue] = OrderedDict()

    async def score(self, response: str, label: str, metadata: Mapping[str, Any]) -> RewardValue:
        """The verifier's value.

        Raises:
            VerifierError: It gave none.
            RewardError: The verifier cannot be started.
        """
        request = json.dumps([response, label, dict(metadata)])
        key = hashlib.blake2b(request.encode(), digest_size=16).digest()  # responses are long
        with self._lock:
            if key in self._scores:
                self._scores.move_to_end(key)
                return _copy(self._scores[key])
            if key not in self._asked:
                self._asked[key] = asked = self._linked().ask(request)
                asked.add_done_callback(functools.partial(self._keep, key))
            else:
                asked = self._asked[key]
            answer: Future[RewardValue] = Future()  # of its own: it may be cancelled
            asked.add_done_callback(functools.partial(_pass_on, answer))
        return await asyncio.wrap_future(answer)

    def _linked(self) -> _Link:
        if self._link is None or self._link.ended:
            try:
                self._link = _Link(self._target, self._command)
            except OSError as error:
                raise RewardError(f"the verifier {self._target} does not start: {error}") from error
            weakref.finalize(self, self._link.close)
        return self._link

    def _keep(self, key: bytes, asked: Future[RewardValue]) -> None:
        with self._lock:
            if self._asked.get(key) is asked:
                del self._asked[key]
            if asked.exception() is None:
                self._scores[key] = asked.result()
                if len(self._scores) > _CACHED:
                    self._scores.popitem(last=False)

    def close(self) -> None:
        """End the processes. Open requests fail; another request starts new ones."""
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._asked.clear()


class _Link:
    """A running keeper, with a thread that writes to it and one that reads."""

    def __init__(self, target: str, command: list[str]) -> None:
        self._target = target
        self._numbers = itertools.count()
        self._open: dict[int, Future[RewardValue]] = {}
        self._lock = threading.Lock()
        self._ready = False
        self.ended = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which closes the pipe when it ends
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        for work, pipe in ((self._send, self._process.stdin), (self._receive, self._process.stdout)):
            threading.Thread(target=work, args=(pipe,), name="slime-verifiers", daemon=True).start()

    def ask(self, request: str) -> Future[RewardValue]:
        """Send a request; never waits."""
        answer: Future[RewardValue] = Future()
        with self._lock:
            if self.ended:
                answer.set_exception(VerifierError(f"the verifiers of {self._target} ended"))
                return answer
            job = next(self._numbers)
            self._open[job] = answer
        self._outbox.put(f"[{job}, {request}]\n".encode())
        return answer

    def close(self) -> None:
        """Close the pipe, which ends the keeper and its workers."""
        self._outbox.put(None)

    def _send(self, pipe: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError), pipe:
            while (message := self._outbox.get()) is not None:
                pipe.write(message)
                pipe.flush()

    def _receive(self, pipe: IO[bytes]) -> None:
        try:
            with pipe:
                for line in pipe:
                    self._take(json.loads(line))
        except (ValueError, KeyError):  # no reply of the keeper's, so nothing that follows can be trusted
            self._process.kill()
        code = self._process.wait()
        with self._lock:
            self.ended = True
            left, self._open = self._open, {}
        self._outbox.put(None)
        for answer in left.values():
            _settle(answer, error=self._end(code))
        self._errors.close()

    def _take(self, reply: dict[str, Any]) -> None:
        if "job" not in reply:
            self._ready = True
            return
        with self._lock:
            answer = self._open.pop(reply["job"])
        failure = reply.get("failure")
        _settle(answer, reply.get("value"), VerifierError(failure) if failure is not None else None)

    def _end(self, code: int) -> RewardError:
        if self._ready:
            return VerifierError(f"the verifiers of {self._target} ended with exit code {code}")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return RewardError(f"the verifier {self._target} does not start: {lines[-1] if lines else f'exit code {code}'}")


def _settle(answer: Future[RewardValue], value: Any = None, error: BaseException | None = None) -> None:
    if not answer.set_running_or_notify_cancel():
        return  # nobody waits any more
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def _pass_on(answer: Future[RewardValue], asked: Future[RewardValue]) -> None:
    error = asked.exception()
    if error is not None:
        _settle(answer, error=error)
    else:
        _settle(answer, _copy(asked.result()))


def _copy(value: RewardValue) -> RewardValue:
    return dict(value) if isinstance(value, dict) else value
