"""A small model as a checkpoint, its next versions, and scripted engines."""

import http.server
import json
import threading

import pytest
import torch
from safetensors.torch import save_file


def first_weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(300, 64, generator=generator),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64, generator=generator),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(32, 64, generator=generator),
        "model.layers.0.self_attn.v_proj.weight": torch.randn(32, 64, generator=generator),
        "model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
        "model.frozen": torch.arange(5),
    }


def next_weights(weights, seed):
    """As after an optimizer step: a few elements of every trained tensor changed."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in weights.items():
        if name != "model.frozen":
            step = (
                0.1
                * torch.randn(tensor.shape, generator=generator)
                * (torch.rand(tensor.shape, generator=generator) < 0.03)
            )
            step.view(-1)[seed % 8] = 0.5
            changed[name] = tensor + step.to(tensor.dtype)
    return changed


@pytest.fixture
def first():
    """The weights that everything begins with."""
    return first_weights()


@pytest.fixture
def step():
    """The weights after a step, by ``step(weights, seed)``."""
    return next_weights


@pytest.fixture
def hf_checkpoint(tmp_path):
    """The first weights as a Hugging Face directory."""
    directory = tmp_path / "hf"
    directory.mkdir()
    save_file(first_weights(), directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "small"}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"old")
    return directory


class ScriptedEngine(http.server.ThreadingHTTPServer):
    """Says yes to everything, but ``refuse[path]`` is answered with 400, and ``hold[path]`` once that event is set.

    Keeps what it was asked.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.version, self.asked, self.refuse, self.answers = "0", [], {}, {}
        self.hold = {}

    def paths(self):
        return [path for path, _ in self.asked]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, self.server.answers.get(self.path, {"weight_version": self.server.version}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.path in self.server.hold:
            self.server.hold[self.path].wait(60)
        if self.path in self.server.refuse:
            self.reply(400, {"success": False, "message": self.server.refuse[self.path]})
            return
        if self.path == "/update_weight_version":
            self.server.version = body["new_version"]
        self.reply(200, self.server.answers.get(self.path, {"success": True}))

    def reply(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def engines():
    """Two engines that only listen."""
    servers = [ScriptedEngine() for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield servers
    for server in servers:
        server.shutdown()
        server.server_close()
