"""The process that the user's shell waits for."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence

from slime_rollout.supervise import reaper
from slime_rollout.supervise.supervised import Supervised

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_under_supervisor(command: Sequence[str], *, grace: float = 10.0) -> int:
    """Run a command; return when it and everything it started is gone.

    The first SIGINT, SIGTERM or SIGHUP is passed to the command, which gets ``grace`` seconds to end in order; a second
    one ends the tree at once. If this process is killed, the supervisor ends the tree; if the supervisor is killed,
    this process does. It takes over the whole process: call it from a main thread that has started no other children.

    Args:
        command: Program and arguments. It inherits standard input and output, but runs in a session of its own.
        grace: Seconds between SIGTERM and SIGKILL, for the command and then for what it leaves behind.

    Returns:
        The command's exit code; 128 + n if signal n ended it.
    """
    reaper.become_subreaper()
    received: list[int] = []
    with _forwarding(received) as attach:
        supervised = Supervised.start(command, grace=grace, stdin=None)
        attach(supervised)
        code = supervised.wait()
        left = {process.pid for process in reaper.descendants(os.getpid())}  # of a supervisor that was killed itself
        reaper.end_descendants(grace, reap=_reap, hurry=lambda: len(received) > 1)
        reaper.remove_torch_memory(left)
    if code < 0:
        print(f"the supervisor was ended by signal {-code}; everything below it was stopped", file=sys.stderr)
        return 128 - code
    return code


@contextlib.contextmanager
def _forwarding(received: list[int]) -> Iterator[Callable[[Supervised], None]]:
    """Pass signals to the supervised tree that the yielded function is given; put the old handlers back at the end.

    Each signal is passed on once, also one that comes before there is anybody to pass it to, or amid passing another
    on: a second one would end the tree at once.
    """
    targets: list[Supervised] = []
    pending: collections.deque[int] = collections.deque()

    def deliver() -> None:
        with contextlib.suppress(IndexError):  # the last one was passed on by a handler that ran just now
            while targets and pending:
                targets[0].signal(pending.popleft())

    def forward(signum: int, _frame: types.FrameType | None) -> None:
        received.append(signum)
        pending.append(signum)
        deliver()

    def attach(supervised: Supervised) -> None:
        targets.append(supervised)
        deliver()

    old = {signum: signal.signal(signum, forward) for signum in _FORWARDED}
    try:
        yield attach
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
