"""No wait without an end: a thread that notices where a run makes no progress, finds the cause, and ends the wait."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from slime_core.files import open_to_append
from slime_launch.calls import DUMP_STACKS, Watch, stopped_line
from slime_launch.errors import RunError, Stopped
from slime_launch.processes import Run, look_at, on_nodes, own_node, stopped_below
from slime_launch.ray_runtime import ESSENTIAL
from slime_rollout.service import start_call

POLL_SECONDS = 0.2
LOOK_SECONDS = 20.0  # to look at the processes of other nodes
TAKE_SECONDS = 10.0  # until the main thread asks again whether to end its wait
STOP_SECONDS = 120.0  # for engines, trainers and Ray to be stopped
STACKS_FILE = "stacks.txt"


class StallWatch:
    """Watches the waits of a run, from the beginning to :meth:`close`.

    A wait that makes no progress for ``seconds`` ends with an error: which phase it is, which servers of ``silent`` do
    not answer, which processes are stopped, and where the stacks of the run's processes and of this one are. If this
    process's main thread hangs itself, the process ends; its supervisor ends everything below it.
    """

    def __init__(
        self, seconds: float, watch: Watch, log_dir: Path, silent: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._seconds = seconds
        self._watch = watch
        self._log_dir = log_dir
        self._silent = silent
        self._cause: BaseException | None = None
        self._stopping = False
        self._phase, self._marker = "begin", None
        self._since = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)
        self._thread.start()

    def progress(self, phase: str, marker: Any = None) -> None:
        """Say how far the run is: something has happened if that is new."""
        if (phase, marker) != (self._phase, self._marker):
            self._phase, self._marker, self._since = phase, marker, time.monotonic()

    def stop(self, cause: BaseException | None) -> None:
        """The run is being stopped, because of an error or at its end; that may not take long."""
        self._cause, self._stopping = cause, True
        self.progress("stop engines, trainers and Ray")

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(POLL_SECONDS):
            limit = min(self._seconds, STOP_SECONDS) if self._stopping else self._seconds
            if time.monotonic() - self._since < limit:
                continue
            since, was_stopping = self._since, self._stopping
            stall = self._explain(limit)
            if not was_stopping:
                self._watch.stall = stall
                deadline = time.monotonic() + TAKE_SECONDS
                while self._watch.stall and self._since == since and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS)
            taken, self._watch.stall = not was_stopping and self._watch.stall is None, None
            if self._over.is_set():
                return
            if not taken and self._since == since:
                self._leave(stall)
            if self._since == since:
                self._since = time.monotonic()

    def _explain(self, seconds: float) -> str:
        """The phase and the causes that can be seen; the stacks go to a file."""
        stopped, stacks = self._look()
        self._watch.ray_hangs = any(name.startswith(ESSENTIAL) for name in stopped)
        path = self._log_dir / STACKS_FILE
        text = f"no progress for {seconds:g} s (--stall-timeout) in the phase: {self._phase}"
        if silent := self._silent():
            text += f"; no answer from {', '.join(silent)}"
        if stopped:
            text += f"; stopped by a signal: {', '.join(stopped)}"
        try:
            with open_to_append(path) as file:
                file.write(f"{time.strftime('%F %T')} {text}\n{stacks}the launcher (process {os.getpid()}):\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:  # the disk is full
            return f"{text}; the stacks of all ranks can't be written: {error}"
        return f"{text}; the stacks of all ranks are in {path}"

    def _look(self) -> tuple[list[str], str]:
        """The processes that are stopped on the nodes of the run, and the stacks of all its processes."""
        import ray

        workers = {str(worker.log_path.resolve()): worker.name for worker in self._watch.workers}
        run = Run(str(self._log_dir.resolve()), workers, DUMP_STACKS)
        found = [look_at([run])]
        if ray.is_initialized():  # a question would start it
            looking = start_call("stall-look", look_elsewhere, self._watch, run)
            found += looking.result() if wait([looking], timeout=LOOK_SECONDS).done else []
        found.append(stopped_below("".join(name for names, _ in found for name in names)))
        return [name for names, _ in found for name in names], "".join(stacks for _, stacks in found)

    def _leave(self, stall: str) -> None:
        """End this process: its main thread does not take the news."""
        cause, code = self._cause, 1
        if isinstance(cause, Stopped):
            code = cause.exit_code
            sys.stderr.write(stopped_line(cause.signum, self._watch.launcher))
        elif cause is not None:
            code = cause.exit_code if isinstance(cause, RunError) else 2
            print(f"slime-launch: {cause}", file=sys.stderr)
        print(f"slime-launch: {stall}", file=sys.stderr, flush=True)
        os._exit(code)


def look_elsewhere(watch: Watch, run: Run) -> list[tuple[list[str], str]]:
    """As of :func:`look_at`, on each other node of a run."""
    own = own_node()
    return on_nodes([(node, run) for node in watch.nodes() if node != own], look_at)
