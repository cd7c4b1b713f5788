"""What every worker process does first: its output goes to a file, its threads are limited."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare(log_path: str, *, threads: int | None) -> None:
    """Set this process up as a worker of the run.

    Args:
        log_path: File that standard output and error are appended to.
        threads: CPU threads of torch and its libraries; ``None`` leaves them alone.
    """
    Path(log_path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(log, number)
    os.close(log)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(threads)
