"""Conversions in processes of their own, measured from outside, and models made up for them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LIMIT_SECONDS = 3600.0
SAMPLE_SECONDS = 0.02
PATTERN_BYTES = 2**26
_FIELDS = ("VmRSS", "RssAnon", "RssFile")


@dataclass(frozen=True)
class Run:
    """One run of a side, from when all was imported until it was done.

    Attributes:
        seconds: Wall-clock time.
        cpu: Seconds of one core, in the kernel too.
        imported: Resident size after importing, in bytes.
        peak: Largest resident size less that, in bytes.
        anonymous: The same of anonymous memory alone, which the system cannot take back.
        mapped: The same of mapped file pages alone, which it can.
    """

    seconds: float
    cpu: float
    imported: int
    peak: int
    anonymous: int
    mapped: int


def measure(script: str, *words: str | Path, log: Path) -> Run:
    """Run a file next to this one, which hands its work to :func:`serve`, in a process of its own.

    The peak is the kernel's; its two parts are seen from outside, every 20 ms.

    Args:
        script: The file.
        words: Its arguments.
        log: Where what it says goes.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline():
            before = most = _memory(process.pid)
            process.stdin.write("go\n")
            process.stdin.flush()
            deadline = time.monotonic() + LIMIT_SECONDS
            while not select.select([process.stdout], [], [], SAMPLE_SECONDS)[0] and time.monotonic() < deadline:
                now = _memory(process.pid)
                most = {field: max(most[field], now[field]) for field in _FIELDS}
            if answer := process.stdout.readline():
                done = json.loads(answer)
                parts = (most[field] - before[field] for field in ("RssAnon", "RssFile"))
                imported = before["VmRSS"]
                return Run(done["seconds"], done["cpu"], imported, done["peak"] - imported, *parts)
    finally:
        process.kill()
        process.wait()
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    raise RuntimeError(f"{' '.join(command)} ended without a result:\n{tail}")


def serve(call: Callable[[], object]) -> None:
    """In the process that is measured, when all is imported: run, and tell how long it took and the largest size."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not be taken for an answer
    print("ready", file=answers, flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far (proc(5))
    start, start_cpu = time.perf_counter(), time.process_time()
    call()
    done = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - start_cpu}
    print(json.dumps(done | {"peak": _memory("self", ("VmHWM",))["VmHWM"]}), file=answers, flush=True)


def _memory(pid: int | str, fields: tuple[str, ...] = _FIELDS) -> dict[str, int]:
    """Sizes in bytes from /proc/PID/status; zeros of a process that has ended."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return dict.fromkeys(fields, 0) | {
        words[0][:-1]: 1024 * int(words[1]) for words in lines if words[0][:-1] in fields
    }


@dataclass(frozen=True)
class Widths:
    """A Llama model's sizes."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    head_dim: int = 128

    def layer(self, number: int) -> dict[str, list[int]]:
        """Shapes of one layer's weights by name."""
        query, key = self.heads * self.head_dim, self.groups * self.head_dim
        shapes = {
            "self_attn.q_proj": [query, self.hidden],
            "self_attn.k_proj": [key, self.hidden],
            "self_attn.v_proj": [key, self.hidden],
            "self_attn.o_proj": [self.hidden, query],
            "mlp.gate_proj": [self.ffn, self.hidden],
            "mlp.up_proj": [self.ffn, self.hidden],
            "mlp.down_proj": [self.hidden, self.ffn],
            "input_layernorm": [self.hidden],
            "post_attention_layernorm": [self.hidden],
        }
        return {f"model.layers.{number}.{name}.weight": shape for name, shape in shapes.items()}

    def ends(self) -> dict[str, list[int]]:
        """Shapes of the weights outside the layers by name."""
        matrix = [self.vocab, self.hidden]
        return {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix, "model.norm.weight": [self.hidden]}

    def config(self, layers: int) -> dict[str, object]:
        """What config.json says."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


def nbytes(weights: dict[str, list[int]]) -> int:
    """Bytes of weights in bfloat16."""
    return sum(2 * int(np.prod(shape)) for shape in weights.values())


def layers_in(widths: Widths, size: float) -> int:
    """How many layers a model of about `size` bytes has, at least one."""
    return max(1, round((size - nbytes(widths.ends())) / nbytes(widths.layer(0))))


def write_model(directory: Path, widths: Widths, layers: int, *, sparse: bool) -> int:
    """A Hugging Face model in bfloat16, one file per layer and one for the rest.

    Args:
        directory: To be made.
        widths: The sizes.
        layers: Number of layers.
        sparse: Whether the files are holes, which take no room and read as zeros; otherwise they hold random bytes.

    Returns:
        Its bytes.
    """
    directory.mkdir(parents=True)
    files = {f"model-{number:05d}.safetensors": widths.layer(number) for number in range(layers)}
    files["model-ends.safetensors"] = widths.ends()
    for name, weights in files.items():
        write_file(directory / name, weights, sparse=sparse)
    (directory / "config.json").write_text(json.dumps(widths.config(layers)), encoding="utf-8")
    return sum(map(nbytes, files.values()))


def write_file(path: Path, weights: dict[str, list[int]], *, sparse: bool) -> None:
    """A safetensors file in bfloat16, as of :func:`write_model`."""
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape in weights.items():
        start, end = end, end + nbytes({name: shape})
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as the safetensors library aligns what follows
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + end)
        else:
            file.writelines(_random(end))


def _random(size: int) -> Iterator[bytes]:
    pattern = np.random.default_rng(0).bytes(PATTERN_BYTES)
    for start in range(0, size, PATTERN_BYTES):
        yield pattern[: size - start]
