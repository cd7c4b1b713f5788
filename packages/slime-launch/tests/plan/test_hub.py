"""A plan for a model on the Hub downloads what describes it, and no weights. The Hub is a server on this machine."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

NAME, OTHER, COMMIT = "owner/tiny-model", "owner/other-model", "a" * 40
WEIGHTS = 123_456_789


@pytest.fixture
def hub(workspace, tokenizer, tmp_path):
    """The workspace's model as a Hub has it, in two files of weights; gives its address and the files asked for."""
    config = json.loads((workspace / "hf" / "config.json").read_text())
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config |= {"quantization_config": quantized, "head_dim": 128, "hidden_size": 512, "intermediate_size": 512}
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = {"metadata": {"total_size": WEIGHTS}, "weight_map": weights}
    files = {name: (workspace / "hf" / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    files |= {"config.json": json.dumps(config).encode(), "model.safetensors.index.json": json.dumps(index).encode()}
    files |= {"model-1.safetensors": bytes(8), "model-2.safetensors": bytes(8)}
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            name = self.path.rpartition("/")[2].partition("?")[0]
            if "/tree/" in self.path:
                listed = [
                    {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for file, content in files.items()
                ]
                body = json.dumps(listed).encode()
            elif "/api/models/" in self.path:
                siblings = [{"rfilename": file} for file in files]
                body = json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode()
            else:
                asked.append(name)
                body = files.get(name, b"")
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "given",
    [
        {"--load": NAME},
        pytest.param({"--load": OTHER}, marks=pytest.mark.full),
        pytest.param({"--load": "/there/later", "--ref-load": OTHER}, marks=pytest.mark.full),
    ],
)
def test_a_plan_downloads_no_weights(hub, flags, to_words, tmp_path, given):
    address, asked = hub
    del flags["--colocate"]
    flags |= {"--hf-checkpoint": NAME, "--rollout-num-gpus": "1"} | given
    words = [sys.executable, "-m", "slime_launch.cli", "plan", "--device", "h100", "--json", *to_words(flags)]
    environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["problems"] == [] and plan["prompt"]["tokens"] == 4
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {*asked}
    assert not [name for name in asked if name.endswith(".safetensors")]
    assert plan["engines"][0]["weights"] == WEIGHTS
    absent = {NAME, *given.values()} & {NAME, OTHER}
    assert {f"the weights of {name} are not downloaded yet" for name in absent} <= {*plan["notices"]}
    asked.clear()
    environment["HF_HUB_OFFLINE"] = "1"
    again = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (again.returncode, asked) == (0, [])
