"""An HTTP server with the command line and the control traffic of an SGLang engine; up in a moment.

Its behaviour is what the test tells it: ``POST /behave {"health": "slow", "seconds": 1.5}``, and, before it listens,
files in the directory that it is given as its model.
"""

import http.server
import json
import sys
import threading
import time
from pathlib import Path

arguments = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
port, model = int(arguments["--port"]), Path(arguments["--model-path"])


class Engine(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    version = arguments["--weight-version"]
    health = "good"
    seconds = 0.0
    probes = 0
    generated = 0
    hangs = "never"
    going_on = threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        engine = self.server
        if self.path == "/health_generate":
            engine.probes += 1
            if engine.health == "slow":
                time.sleep(engine.seconds)
            engine.going_on.wait()
            if engine.hangs == "scheduler":
                threading.Event().wait()
            if engine.health == "bad" or (engine.health == "flapping" and engine.probes % 2):
                return self.answer(503, {})
        return self.answer(200, {"weight_version": engine.version, "probes": engine.probes})

    def do_POST(self):
        engine = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path == "/generate":
            engine.generated += 1
            time.sleep(body["sampling_params"]["max_new_tokens"] / 1000)
            engine.going_on.wait()
        elif self.path == "/pause_generation":
            engine.going_on.clear()
        elif self.path == "/continue_generation":
            engine.going_on.set()
        elif self.path == "/update_weight_version":
            engine.version = body["new_version"]
        elif self.path == "/update_weights_from_tensor" and engine.hangs != "never":
            threading.Event().wait()
        elif self.path == "/behave":
            engine.health, engine.seconds = body["health"], body.get("seconds", 0.0)
            engine.hangs = body.get("hangs", "never")
        return self.answer(200, {"port": port, "version": engine.version, "generated": engine.generated})

    def answer(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


if (model / "port_is_taken").exists():
    (model / "port_is_taken").unlink()
    sys.exit("ERROR: [Errno 98] error while attempting to bind on address: address already in use")
if (model / "broken").exists():
    sys.exit("no such model")
while (model / "wait").exists():
    time.sleep(0.05)
engine = Engine(("127.0.0.1", port), Handler)
engine.going_on.set()
engine.serve_forever()
