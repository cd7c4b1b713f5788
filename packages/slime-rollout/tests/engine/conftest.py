"""One fleet of real engines for all tests here: two SGLang servers on the CPU behind sglang-router.

And, where the router matters but no model does, small servers that it takes for engines.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from slime_rollout.engine import EngineDiedError
from slime_rollout.engine.addresses import free_port
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.router import Router
from slime_rollout.engine.server import LOAD_FILES, EngineSpec, server_environment
from slime_rollout.supervise import reaper


@pytest.fixture(scope="session")
def engine_environment(engine_config, tiny_model):
    return server_environment(engine_config, EngineSpec(model_path=tiny_model, port=1))


def pids_below():
    return {process.pid for process in reaper.descendants(os.getpid())}


def open_files():
    return [path for process in reaper.descendants(os.getpid()) for path in reaper.open_files(process.pid)]


@pytest.fixture(scope="session")
def kept_fleet(engine_config, tiny_model, tmp_path_factory):
    """Gives the fleet, or another one where a test has ended an engine of it: which files come first is by chance."""
    with contextlib.ExitStack() as stack:
        kept = []

        def give():
            if kept and not serves(kept[-1]):
                stack.close()
                kept.clear()
            if not kept:
                kept.append(stack.enter_context(started(engine_config, tiny_model, tmp_path_factory.mktemp("logs"))))
            return kept[-1]

        yield give


@pytest.fixture(scope="module")
def fleet(kept_fleet):
    return kept_fleet()


def serves(fleet):
    try:
        fleet.check()
    except EngineDiedError:
        return False
    return True


@contextlib.contextmanager
def started(engine_config, tiny_model, logs):
    seen, before = [], pids_below()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there, and nobody may try
        fleet = EngineFleet.start(
            dataclasses.replace(engine_config, sglang_args={"log-level": "debug"}),
            model_path=tiny_model,
            num_engines=2,
            dtype="float32",
            context_length=None,
            seed=1,
            log_dir=logs,
            on_progress=lambda ready, total, seconds: seen.append((ready, total, seconds)),
        )
    print(f"two engines and the router were up after {seen[-1][2]:.1f} s")
    assert seen[-1][:2] == (3, 3)
    load_files = {path for path in open_files() if path.startswith(LOAD_FILES)}
    assert len(load_files) == 2
    new = pids_below() - before
    assert len(new) > 3
    yield fleet
    fleet.stop()
    assert not [path for path in load_files if Path(path).exists()]
    assert not new & pids_below()


class Worker:
    """A server that can be ended, and started again at the same address. ``answers``: what a GET of a path gives, as
    bytes or to be written as JSON.

    One that is ``paused`` answers `/health` no more, as engines do, before it is told to go on.
    """

    def __init__(self, name, answers=None, *, paused=False):
        self.name, self.port = name, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.answers = {"/health": {"status": "ok"}, **(answers or {})}
        self.requests = []
        self.paused = paused
        self.gate = threading.Event()  # closed, requests wait here
        self.gate.set()
        self.start()

    def start(self):
        worker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                self.reply(None if worker.paused and path == "/health" else worker.answers.get(path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                worker.requests.append((self.path, json.loads(body)))
                if self.path == "/continue_generation":
                    worker.paused = False
                worker.gate.wait(20)
                self.reply({"text": worker.name})

            def reply(self, answer):
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def is_up(self):
        return self._thread.is_alive()

    def end(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(20)


@pytest.fixture
def worker():
    """Starts a :class:`Worker`."""
    with contextlib.ExitStack() as stack:

        def start(*args, **kwargs):
            started = Worker(*args, **kwargs)
            stack.callback(started.end)
            return started

        yield start


@pytest.fixture
def router(tmp_path):
    """Starts a real router with some settings."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            port = free_port()
            config = EngineConfig(**settings)
            prometheus_port = free_port(without={port})
            started = Router.start(config, port=port, prometheus_port=prometheus_port, log_path=tmp_path / "router.log")
            stack.callback(started.stop)
            deadline = time.monotonic() + 30
            while not started.is_ready():
                assert time.monotonic() < deadline
            return started

        yield start


@pytest.fixture
def ask():
    """Asks a router; returns the worker that answered."""

    def post(router, session=None):
        headers = {"Content-Type": "application/json", **({"X-SMG-Routing-Key": session} if session else {})}
        body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {}}).encode()
        request = urllib.request.Request(f"{router.url}/generate", body, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["text"]

    return post


# A program that takes the command line of `python -m sglang.launch_server` and serves what the router needs.
SERVER = """#!/bin/sh
[ "$1" = -c ] && echo /nowhere/sglang/__init__.py && exit
exec {python} -c '
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
flags = dict(zip(sys.argv, sys.argv[1:]))
if flags["--model-path"] == "broken":
    sys.exit("this model is broken")
if flags["--model-path"] == "endless":
    time.sleep(600)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        content = json.dumps({{"text": flags["--model-path"]}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass
ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
' "$@"
"""


@pytest.fixture
def quick_python(tmp_path):
    """An interpreter whose engines are up at once, and answer with their model's path."""
    program = tmp_path / "quick_python"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path", "--model")
        parser.add_argument("--page-size", type=int, default=1, help="tokens of a page")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--grammar-backend", choices=["xgrammar", "none"])
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"])
        parser.add_argument("--lora-paths", nargs="*")
        parser.add_argument("--tp-size", type=int)
"""


@pytest.fixture
def sglang_python(tmp_path, monkeypatch):
    """An interpreter that has an SGLang with a few flags; as a server it runs a shell command."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(server="exit 3"):
        package = tmp_path / "site" / "sglang" / "srt"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("__version__ = '1.2'")
        (package / "server_args.py").write_text(SERVER_ARGS)
        program = tmp_path / "python"
        path = f'PYTHONPATH="{tmp_path / "site"}:$PYTHONPATH"'
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && {path} exec {sys.executable} "$@"\n{server}\n')
        program.chmod(0o755)
        return str(program)

    return make


def socket_rows(pids, kind, place):
    """Rows of the table /proc/net/KIND of the processes' sockets, whose numbers are in column ``place``."""
    links = [str(link.readlink()) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")}
    found = [line.split() for line in Path(f"/proc/{pids[0]}/net/{kind}").read_text().splitlines()[1:]]
    return [row for row in found if len(row) > place and row[place] in own]


@pytest.fixture
def listening():
    """Hosts and ports where processes listen by TCP; of IPv6 as hexadecimal numbers."""

    def find(pids):
        places = [row[1].split(":") for row in socket_rows(pids, "tcp", 9) if row[3] == "0A"]
        found = {(socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)) for host, port in places}
        return found | {tuple(row[1].split(":")) for row in socket_rows(pids, "tcp6", 9) if row[3] == "0A"}

    return find


@pytest.fixture
def socket_files():
    """Files of processes' Unix sockets."""

    def find(pids):
        rows = socket_rows(pids, "unix", 6)
        return {Path(row[7]) for row in rows if len(row) > 7 and not row[7].startswith("@")}

    return find
