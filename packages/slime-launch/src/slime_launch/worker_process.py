"""What every worker process does first: where it works, where its output goes, how many threads it has."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare(directory: str, log_path: str, *, threads: int | None) -> None:
    """Set this process up as a worker of the run.

    Args:
        directory: The launcher's working directory, which relative paths start from; a worker of a cluster starts
            elsewhere.
        log_path: File that standard output and error are appended to.
        threads: CPU threads of torch and its libraries; ``None`` leaves them alone.
    """
    if Path(directory).is_dir():
        os.chdir(directory)
        sys.path.insert(0, directory)  # where `--custom-rm-path my_module.fn` is looked for
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
        # Trainer and engine share these cores: a thread that waits must not spin.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
