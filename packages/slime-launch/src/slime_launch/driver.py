"""The process that holds a run together. Started by `train`, below a supervisor, while the command is checked.

It is given a directory, and the starter's process id. What is in ``CLUSTER`` there says with what to start a Ray of its
own, and ``CHECKED`` comes when the command is checked. If it does not come, the starter ends this process, and says
why.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, NoReturn

from slime_core.importing import without_collections
from slime_core.redact import redact_logs
from slime_launch.calls import SIGNALS, Watch, leave

CLUSTER, CHECKED = "cluster.pickle", "checked.pickle"
POLL_SECONDS = 0.01


def main() -> int:
    """Listen to signals before anything that takes time, start Ray, then run what the starter has checked."""
    directory, launcher = Path(sys.argv[1]), int(sys.argv[2])
    listen(directory, launcher)
    keep_files_private(directory)
    redact_logs()
    with without_collections():
        from slime_launch.ray_runtime import RayAhead
        from slime_launch.run import run

    ahead = None
    if (directory / CLUSTER).exists():
        with contextlib.redirect_stdout(sys.stderr):
            ahead = RayAhead(read(directory / CLUSTER), directory)
        listen(directory, launcher)  # Ray has done so meanwhile
    while not (directory / CHECKED).exists():
        time.sleep(POLL_SECONDS)
    watch = Watch(launcher)
    watch.listen(at_once=True)
    with contextlib.nullcontext() if ahead is None else contextlib.closing(ahead):
        return run(read(directory / CHECKED), watch, ahead)


def listen(directory: Path, launcher: int) -> None:
    """End this process when a signal comes; a command that is still being checked says nothing then."""

    def end(signum: int, _frame: types.FrameType | None) -> NoReturn:
        if (directory / CHECKED).exists():
            leave(signum, launcher)
        os._exit(128 + signum)

    for signum in SIGNALS:
        signal.signal(signum, end)


def keep_files_private(directory: Path) -> None:
    """Have this process, and all that it starts, keep temporary files where only this user can open them.

    Names that libraries choose for sockets, stores and compiled code can be foreseen, in a folder that users share.
    What the compiler keeps for the next run is in the user's cache.
    """
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory / "tmp")
    Path(tempfile.tempdir).mkdir(mode=0o700)
    with contextlib.suppress(RuntimeError):  # no home directory
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "slime" / "inductor"))


def read(path: Path) -> Any:
    """A file of the starter's."""
    return pickle.loads(path.read_bytes())  # noqa: S301  # of this process's parent


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is stopped; threads of Ray's that are left can crash an interpreter that takes itself apart
