"""Streamed prompts: time and memory until the first groups for two sizes of a file, and prompts a second by processes.

Rows have 5 kB, most of it metadata, in JSON Lines. `first group` is the time from opening the file to the first of its
groups, shuffled in blocks of 1,000 rows, without the tokenizer's own loading; `read` is how much of the file was read
for it, and `memory` the most that 2,000 groups took. None of them may depend on the file's size: `by size` is the
larger file's figure over the smaller one's. `in memory` is `PromptDataset` instead. `prompts` is the rate at which
groups of one come out of a stream that is not shuffled, with so many processes of `--num-data-workers`, once they run;
it depends on the processors that there are.

Times are wall times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from _measure import measure
from _records import Record
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_rollout.config import RolloutConfig
from slime_rollout.data import (
    Fate,
    PromptDataset,
    PromptEncoder,
    RolloutDataSource,
    RowEncoder,
    StreamingPrompts,
    load_tokenizer,
)

SIZES_MB, QUICK_SIZES_MB = (256, 2048), (8, 64)
GROUPS, BLOCK, WORKERS = 2000, 1000, (0, 1, 2)
RATE_SECONDS = 10.0
SIZE_GOAL = 1.2
FIRST_GOAL = 1.0  # seconds


def main(out: Path, *, quick: bool) -> list[Record]:
    """Measure both sizes, then the processes.

    Args:
        out: Where the files of prompts go, and are removed again.
        quick: Files of 8 and 64 MB instead of 256 and 2048, and 2 seconds for each rate.
    """
    tokenizer_dir = out / "tokenizer"
    byte_tokenizer().save_pretrained(tokenizer_dir)
    encoder = PromptEncoder(load_tokenizer(str(tokenizer_dir)), apply_chat_template=False)
    sizes = QUICK_SIZES_MB if quick else SIZES_MB
    figures, records = [], []
    for size in sizes:
        path = write_prompts(out / f"{size}.jsonl", size)
        config = settings(path, tokenizer_dir, shuffle=True)
        figures.append(start(config, encoder))
        case = f"{size} MB"
        records += [
            Record(case, "first group", figures[-1][0], "s", False, FIRST_GOAL),
            Record(case, "read", figures[-1][1] / 1e6, "MB", False),
            Record(case, "memory", figures[-1][2] / 1e6, "MB", False),
        ]
        if size == sizes[0]:
            records += in_memory(config, encoder, case)
        else:
            records += rates(path, tokenizer_dir, encoder, 2.0 if quick else RATE_SECONDS)
        path.unlink()
    for place, name in enumerate(("first group", "read", "memory")):
        by_size = figures[1][place] / figures[0][place]
        records.append(Record(f"{sizes[1]} MB / {sizes[0]} MB", f"{name} by size", by_size, "x", False, SIZE_GOAL))
    return records


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def write_prompts(path: Path, megabytes: int) -> Path:
    """Rows of 5 kB with prompts of 1 kB."""
    rows = [
        {"prompt": f"{place} + 26 = " * 90, "label": str(place + 26), "metadata": {"text": f"{place:05}" * 780}}
        for place in range(200)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("w") as file:
        for _ in range(megabytes * 1_000_000 // len(lines)):
            file.write(lines)
    return path


def settings(path: Path, tokenizer_dir: Path, *, shuffle: bool) -> RolloutConfig:
    """Settings of a stream."""
    return RolloutConfig.of(
        hf_checkpoint=str(tokenizer_dir),
        prompt_data=str(path),
        rollout_batch_size=1,
        streaming_data=True,
        rollout_shuffle=shuffle,
        streaming_shuffle_buffer=BLOCK if shuffle else None,
    )


def start(config: RolloutConfig, encoder: PromptEncoder) -> tuple[float, float, float]:
    """Seconds and bytes read until the first group, and bytes of memory for all groups."""
    figures: list[float] = []

    def run() -> None:
        before, read = time.perf_counter(), bytes_read()
        source = open_stream(config, encoder)
        take(source)
        figures.extend((time.perf_counter() - before, bytes_read() - read))
        for _ in range(GROUPS):
            take(source)

    _, memory = measure(run)
    return figures[0], figures[1], memory


def in_memory(config: RolloutConfig, encoder: PromptEncoder, case: str) -> list[Record]:
    """The same file read whole."""
    seconds: list[float] = []

    def run() -> None:
        before = time.perf_counter()
        dataset = PromptDataset.load(config.data.prompt_paths[0], config, encoder)
        take(RolloutDataSource(dataset, samples_per_prompt=1, shuffle=True))
        seconds.append(time.perf_counter() - before)

    _, memory = measure(run)
    return [
        Record(f"{case} in memory", "first group", seconds[0], "s", False),
        Record(f"{case} in memory", "memory", memory / 1e6, "MB", False),
    ]


def rates(path: Path, tokenizer_dir: Path, encoder: PromptEncoder, seconds: float) -> list[Record]:
    """Prompts a second with each number of processes."""
    config, records = settings(path, tokenizer_dir, shuffle=False), []
    for workers in WORKERS:
        encoding = RowEncoder(config, encoder, workers)
        source = open_stream(config, encoder, encoding)
        for _ in range(200):  # until the processes run
            take(source)
        rate = counted(lambda source=source: take(source), seconds)  # type: ignore[misc]
        records.append(Record(f"{workers} processes", "prompts", rate, "1/s", True))
        encoding.close()
    return records


def open_stream(config: RolloutConfig, encoder: PromptEncoder, encoding: RowEncoder | None = None) -> RolloutDataSource:
    """A source of a stream."""
    prompts = StreamingPrompts(config, encoder, encoding=encoding)
    return RolloutDataSource(prompts, samples_per_prompt=1, shuffle=config.data.rollout_shuffle)


def take(source: RolloutDataSource) -> None:
    """Take a group and train on it."""
    source.ledger.settle(source.get_samples(1), Fate.TRAINED)


def counted(call: Callable[[], None], seconds: float) -> float:
    """Calls a second."""
    begun, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - begun < seconds:
        call()
        count += 1
    return count / (now - begun)


def bytes_read() -> int:
    """What this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))
