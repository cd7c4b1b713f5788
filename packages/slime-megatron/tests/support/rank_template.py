"""Forks trainer ranks out of a process that has imported torch and Megatron: importing them takes each rank seconds.

Run as ``python rank_template.py FD``. Each file descriptor that comes over this socket becomes the pipe of a rank, as
in rank_program.py; the answer is the rank's process id.
"""

import os
import signal
import socket
import struct
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from rank_program import serve
from rank_te import pretend_engine


def import_megatron():
    """What every rank imports, with the stand-ins that must be there before."""
    import torch

    if os.environ.get("TE_STAND_IN"):
        pretend_engine()
    from slime_megatron.ranks.device import install_cpu_device

    if not torch.cuda.is_available():
        install_cpu_device()
        import slime_megatron.worker  # noqa: F401


def main():
    requests = socket.socket(fileno=int(sys.argv[1]))
    import_megatron()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, (
        "a lock that a thread holds would stay locked in every fork"
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks leave nothing to wait for
    while True:
        message, [*descriptors], _, _ = socket.recv_fds(requests, 1, 1)
        if not message:
            return
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            serve(Connection(descriptors[0]))
            return
        os.close(descriptors[0])
        requests.sendall(struct.pack("i", pid))


if __name__ == "__main__":
    main()
