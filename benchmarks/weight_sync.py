"""MB/s of new weights from the trainer's process into one running SGLang engine on this machine, by each transport.

A random Qwen3 in fp32, in one bucket, as with the default `--update-weight-buffer-size`; each update changes a
thousandth of the elements, as few as a late step in bf16 does. Updates of all transports alternate, and the median
counts. `rate` is what a run sends over the time from `begin` to `end`, in which the engine pauses, loads, confirms the
version and goes on; for files and deltas generation goes on until it loads. `time` is the update's over that by shared
memory. `sent` are the bytes that leave the trainer, over those of the model. `tensor by tensor` gives the engine
a handle for every tensor instead of one for a piece of a bucket. Clock times; the engine has one thread.

`memory copy` copies the same tensors with one thread, in the same rounds, into memory that this process has written
before. An update by shared memory copies twice, here and in the engine, and allocates that memory for each update.
"""

from __future__ import annotations

import base64
import io
import os
import statistics
import sys
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from _records import Record

from slime_core.interfaces import NamedTensors, WeightChannel
from slime_core.types import WeightUpdate
from slime_rollout.engine.channels import ChannelSpec
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.transports import WeightSyncConfig
from slime_rollout.weights import (
    DeltaReceiver,
    DeltaWeightChannel,
    DiskWeightChannel,
    DistributedWeightChannel,
    TensorWeightChannel,
)
from slime_rollout.weights.buckets import PICKLE_PROTOCOL, _file_system_sharing

ROUNDS, LAYERS, HIDDEN, CHANGED = 7, 12, 512, 1000
BASE, COPY = "one shared buffer", "memory copy"
COPY_GOAL = 0.6


class TensorByTensor(TensorWeightChannel):
    """As `TensorWeightChannel`, with a handle for every tensor of a bucket."""

    def _send(self, bucket: NamedTensors) -> int:
        flat, metadata = self._copied(bucket)
        views = [
            (each.name, flat[each.start_idx : each.end_idx].view(each.dtype).view(each.shape)) for each in metadata
        ]
        stream = io.BytesIO()
        with _file_system_sharing():
            ForkingPickler(stream, PICKLE_PROTOCOL).dump(views)
        payload = {"serialized_named_tensors": [base64.b64encode(stream.getvalue()).decode()], "flush_cache": False}
        self._on_all(lambda url: self._post(url, "/update_weights_from_tensor", payload))
        return flat.nbytes


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure all transports on one engine.

    Args:
        out: For the model, the engine's log and the files.
        quick: Two layers and three rounds.
    """
    torch.set_num_threads(1)
    weights = write_model(out / "model", layers=2 if quick else LAYERS)
    total = sum(tensor.nbytes for tensor in weights.values())
    python = os.environ.get("SLIME_ENGINE_PYTHON", str(Path(__file__).parents[1] / ".venv-engine/bin/python"))
    config = EngineConfig(sglang_python=python if Path(python).exists() else sys.executable, engine_threads=1)
    with EngineFleet.start(
        config,
        model_path=str(out / "model"),
        num_engines=1,
        dtype="float32",
        context_length=None,
        seed=1,
        log_dir=out / "logs",
    ) as fleet:
        seconds, sent = measure(tuple(fleet.engine_urls), weights, out, 3 if quick else ROUNDS)
    records = []
    for name, times in seconds.items():
        case, middle = f"{name}, {total / 1e6:.0f} MB", statistics.median(times)
        if name == COPY:
            share = middle / statistics.median(seconds[BASE])
            records.append(Record(case, "rate", total / middle / 1e6, "MB/s", True))
            records.append(Record(f"{BASE} / {COPY}", "rate", share, "x", True, COPY_GOAL))
            continue
        records += [
            Record(case, "rate", total / middle / 1e6, "MB/s", True),
            Record(case, "time", middle / statistics.median(seconds[BASE]), "x", False),
        ]
        if name in sent:
            records.append(Record(case, "sent", sent[name] / total, "x", False))
    return records


def measure(
    urls: tuple[str, ...], weights: dict[str, torch.Tensor], out: Path, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each update, and the bytes of the last one's files."""
    model = str(out / "model")
    seconds: dict[str, list[float]] = {}
    buffer = torch.zeros(sum(tensor.nbytes for tensor in weights.values()), dtype=torch.uint8)
    with DeltaReceiver(directory=str(out / "local"), hf_checkpoint=model, source=str(out / "delta")) as receiver:
        channels: dict[str, WeightChannel] = {
            BASE: TensorWeightChannel(ChannelSpec(urls)),
            "tensor by tensor": TensorByTensor(ChannelSpec(urls)),
            "gloo": DistributedWeightChannel(ChannelSpec(urls)),
            "disk": DiskWeightChannel(
                ChannelSpec(urls, hf_checkpoint=model, sync=WeightSyncConfig(update_weight_disk_dir=str(out / "disk")))
            ),
            "delta": DeltaWeightChannel(
                ChannelSpec(
                    urls,
                    hf_checkpoint=model,
                    receivers=(receiver.url,),
                    sync=WeightSyncConfig(update_weight_disk_dir=str(out / "delta")),
                )
            ),
        }
        for number in range(rounds + 1):  # the first, which makes buffers and groups, does not count
            for name, channel in channels.items():
                change(weights)
                taken = push(channel, weights, number + 1)
                print(f"round {number}: {name}: {taken:.3f} s", flush=True)
                if number:
                    seconds.setdefault(name, []).append(taken)
            taken = copy(weights, buffer)
            if number:
                seconds.setdefault(COPY, []).append(taken)
        for channel in channels.values():
            channel.close()
    return seconds, {name: newest_bytes(out / name) for name in ("disk", "delta")}


def push(channel: WeightChannel, weights: dict[str, torch.Tensor], version: int) -> float:
    """Send all weights; returns seconds."""
    started = time.perf_counter()
    channel.begin(WeightUpdate(version=version))
    channel.send(list(weights.items()))
    channel.end()
    return time.perf_counter() - started


def copy(weights: dict[str, torch.Tensor], buffer: torch.Tensor) -> float:
    """Copy all weights, one behind the other; returns seconds."""
    started, place = time.perf_counter(), 0
    for tensor in weights.values():
        buffer[place : place + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
        place += tensor.nbytes
    return time.perf_counter() - started


def newest_bytes(directory: Path) -> int:
    """Bytes of the weights of the last version in a directory."""
    newest = max(directory.glob("weight_v*"))
    return sum(path.stat().st_size for path in newest.iterdir() if path.suffix in (".safetensors", ".bin"))


def change(weights: dict[str, torch.Tensor]) -> None:
    """Change one element in a thousand."""
    for tensor in weights.values():
        tensor.view(-1)[int(torch.randint(CHANGED, ())) :: CHANGED] += 1e-3


def write_model(directory: Path, *, layers: int) -> dict[str, torch.Tensor]:
    """Write a random model with a tokenizer of single bytes; returns its weights."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    vocabulary = {chr(0x100 + token): token for token in range(256)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x100)))
    ).save_pretrained(directory)
    network = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=1024,
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )
    network.save_pretrained(directory)
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
