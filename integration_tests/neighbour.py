"""What another user of the machine can do to a run. A program: it becomes that user before it looks at anything.

It is given on its standard input, as JSON, what the run consists of: numbers of its ``processes``, ``folders`` and
``files`` that exist because of it, paths of its Unix ``sockets``, and where it listens (``tcp``). It prints, as JSON,
one line for each thing that it could do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import http.client
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from ray._raylet import GcsClient

NOBODY = 65534
SECONDS = 5.0
PTRACE_SEIZE = 0x4206
GET = (
    "/", "/v1/models", "/get_server_info", "/server_info", "/get_model_info", "/model_info", "/workers",
    "/list_workers", "/get_loads", "/metrics", "/engine_metrics", "/data.json", "/docs", "/openapi.json",
)  # fmt: skip
POST = (
    "/generate", "/v1/completions", "/v1/chat/completions", "/flush_cache", "/abort_request", "/pause_generation",
    "/update_weights_from_disk", "/init_weights_update_group", "/add_worker?url=http://127.0.0.1:9", "/workers",
    "/release_memory_occupation", "/pull",
)  # fmt: skip


def become_nobody() -> None:
    """Give up every right of root's."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def to_processes(pids: list[int]) -> Iterator[str]:
    """Read, trace or signal processes."""
    trace = ctypes.CDLL(None, use_errno=True).ptrace
    for pid in pids:
        for name in ("mem", "environ", "maps", "auxv"):
            with contextlib.suppress(OSError), Path(f"/proc/{pid}/{name}").open("rb"):
                yield f"open /proc/{pid}/{name}"
        with contextlib.suppress(OSError):
            yield f"list /proc/{pid}/fd: {os.listdir(f'/proc/{pid}/fd')}"  # noqa: PTH208
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            yield f"signal {pid}"
        if trace(PTRACE_SEIZE, pid, None, None) == 0:
            yield f"trace {pid}"


def to_folders(folders: list[str]) -> Iterator[str]:
    """List folders, make files in them, and rename them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            yield f"list {folder}: {os.listdir(folder)}"  # noqa: PTH208
        with contextlib.suppress(OSError):
            (Path(folder) / f"of-nobody-{secrets.token_hex(4)}").touch()
            yield f"make a file in {folder}"
        with contextlib.suppress(OSError):
            Path(folder).rename(folder + "-of-nobody")
            yield f"rename {folder}"


def to_files(files: list[str]) -> Iterator[str]:
    """Read and write files, link to them, and rename them."""
    for file in files:
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with contextlib.suppress(OSError):
                os.close(os.open(file, flags | os.O_NONBLOCK))
                yield f"{'read' if flags == os.O_RDONLY else 'write'} {file}"
        with contextlib.suppress(OSError):
            Path("/tmp", f"of-nobody-{secrets.token_hex(4)}").hardlink_to(file)
            yield f"link to {file}"
        with contextlib.suppress(OSError):
            Path(file).rename(file + "-of-nobody")
            yield f"rename {file}"


def to_sockets(paths: list[str]) -> Iterator[str]:
    """Connect to Unix sockets, those without a file (``@NAME``) among them, and be answered."""
    for path in paths:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as end:
                end.settimeout(SECONDS)
                end.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
                if not path.startswith("@"):
                    yield f"connect to {path}"
                end.send(b"\0" * 64)
                if end.recv(64):
                    yield f"be answered by {path}"


def to_servers(places: list[tuple[str, int]]) -> Iterator[str]:
    """Be answered by HTTP with anything but a refusal, or set a key of a store of torch's."""
    with concurrent.futures.ThreadPoolExecutor(len(places) or 1) as pool:
        for answers in pool.map(by_http, places):
            yield from answers
    clients = {place: in_a_child(place) for place in places}
    deadline = time.monotonic() + SECONDS
    while clients:
        for place, pid in list(clients.items()):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                yield f"set a key of the store at {place[1]}"
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            else:
                continue
            del clients[place]
        time.sleep(0.05)


def in_a_child(place: tuple[str, int]) -> int:
    """Set a key as a client of torch's, which waits for ever for a server that is none; the process that ends then."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(RuntimeError):
            dist.TCPStore(*place).set("a key", "of nobody")  # type: ignore[attr-defined]
            os._exit(0)
        signal.pause()
    return pid


def by_http(place: tuple[str, int]) -> list[str]:
    """What a server answers that is not a refusal. One that does not answer the first request is asked no others."""
    found: list[str] = []
    for method, path in [*(("GET", path) for path in GET), *(("POST", path) for path in POST)]:
        connection = http.client.HTTPConnection(*place, timeout=SECONDS)
        try:
            body = b"{}" if method == "POST" else None
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read(2000)
        except (OSError, http.client.HTTPException):
            return found
        if answer.status not in (401, 403, 404, 405):
            found.append(f"{method} {path} at {place[1]}: {answer.status} {text[:100]!r}")
    return found


def to_ray(places: list[tuple[str, int]]) -> Iterator[str]:
    """Ask Ray's table of everything for its keys, without its token."""
    for host, port in places:
        with contextlib.suppress(Exception):
            keys = GcsClient(address=f"{host.removeprefix('::ffff:')}:{port}").internal_kv_keys(
                b"", None, timeout=SECONDS
            )
            yield f"ask Ray at {port} for its keys: {len(keys)}"


def main() -> None:
    """Do all that, as nobody."""
    given = json.load(sys.stdin)
    places = [(host, port) for host, port in given["tcp"]]
    if "--as-root" not in sys.argv:
        become_nobody()
    done = [*to_processes(given["processes"]), *to_folders(given["folders"]), *to_files(given["files"])]
    done += [*to_sockets(given["sockets"]), *to_servers(places), *to_ray([tuple(each) for each in given["ray"]])]
    print(json.dumps(done), flush=True)
    os._exit(0)  # what Ray imports at its end is root's alone


if __name__ == "__main__":
    main()
