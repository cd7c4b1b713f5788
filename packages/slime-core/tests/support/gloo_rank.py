"""One of two gloo ranks, ``gloo_rank.py RANK FD FOLDER``: calls functions of test modules until the pipe closes.

It gets (path of a module, name of a function, arguments) and sends (whether it went well, result or traceback), both
through the pipe FD. ``ops/conftest.py`` holds the other end.
"""

import datetime
import importlib.util
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

MODULES = {}


def call(path, name, rank, arguments):
    if path not in MODULES:
        specification = importlib.util.spec_from_file_location(f"rank_{Path(path).stem}", path)
        MODULES[path] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(MODULES[path])
    return getattr(MODULES[path], name)(rank, *arguments)


def main():
    rank, pipe, folder = int(sys.argv[1]), Connection(int(sys.argv[2])), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            path, name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        try:
            outcome = (True, call(path, name, rank, arguments))
        except Exception:
            outcome = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
