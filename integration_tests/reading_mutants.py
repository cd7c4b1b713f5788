"""Every reader of files that come from others, and a warm process that has mutants of such files read by its children.

`python reading_mutants.py DIR FIRST COUNT` makes the files, forks a child for each mutant from number FIRST on, and
prints what became of each as a line of JSON.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from files_of_others import CHATS, make_files
from mutants_of_files import copied, mutate

MEMORY, SECONDS, WAIT, AT_ONCE = 2 * 2**30, 20, 200, 2
READ, REFUSED, FAULT, WRONG = 0, 3, 4, 5
NAMES = {READ: "read", REFUSED: "refused", FAULT: "fault", WRONG: "wrong"}
M_ARENA_MAX = -8
STATM = Path("/proc/self/statm")
NO_MEMORY = (
    *("MemoryError", "not enough memory", "Cannot allocate memory", "bad_alloc", "out of memory"),
    "Unable to allocate",
)
MOST_CHARACTERS = 11_000  # of a line that refuses a file


# Who reads it. Each returns something that is the same for the same content, or nothing.


class RefusedError(Exception):
    """A command has said what is wrong."""


def _convert(*words: Any) -> int:
    from slime_convert.cli import main

    if (code := main([str(word) for word in words])) not in (0, 1):
        raise RefusedError
    return code


def _launch(*words: Any) -> int:
    from slime_launch.cli import main

    if (code := main([str(word) for word in words])) not in (0, 1):
        raise RefusedError
    return code


def _checkpoint(name: str, place: Path, root: Path) -> Any:
    refused = 0
    for words in (("inspect", place), ("verify", "--quiet", place, root / name)):
        try:
            code = _convert(*words)
        except RefusedError:
            refused += 1
    if refused:
        raise RefusedError
    return code


def _gguf(place: Path, root: Path) -> Any:
    _convert("inspect", place)
    found = _convert("verify", "--quiet", "--tolerance", "0", place, root / "gguf")
    _convert("gguf-to-hf", "--gguf", place, "--save", place.parent / "new", "--force", "--quiet")
    return found


def _adapter(place: Path, root: Path) -> Any:
    words = ("--hf-checkpoint", root / "hf", "--adapter", place, "--save", place.parent / "new", "--force", "--quiet")
    return _convert("merge-lora", *words)


def _trainer(place: Path, root: Path) -> Any:
    """As a trainer loads a checkpoint."""
    from slime_convert.shape import ModelShape
    from slime_core.types import Rendezvous
    from slime_megatron.checkpoints.contents import load_weights
    from slime_megatron.checkpoints.find import find_checkpoint
    from slime_megatron.model.build import build_model, named_weights
    from slime_megatron.ranks.device import select_device
    from slime_megatron.ranks.parallel import join_ranks, seed_everything
    from slime_megatron.settings.config import MegatronConfig

    shape, config, device = ModelShape.from_hf_config(root / "hf"), MegatronConfig(), select_device(1)
    info = find_checkpoint(place)
    join_ranks(config, Rendezvous(rank=0, world_size=1), device)
    seed_everything(1)
    model = build_model(shape, config, device, random_weights=False)
    load_weights(info, shape, model)
    return hashlib.sha256(b"".join(one.detach().numpy().tobytes() for _, one in named_weights(model))).hexdigest()


def _prompts(end: str, place: Path, _root: Path) -> Any:
    from slime_rollout.config import RolloutConfig
    from slime_rollout.data import check_prompt_file

    path = str(place / (f"rows.{end}" if end != "arrow" else "rows"))
    config = RolloutConfig.of(prompt_data=(path,), hf_checkpoint="m", rollout_batch_size=1, rm_type="math")
    return [(row.prompt, row.label, row.metadata) for row in check_prompt_file(path, config)]


def _sft(place: Path, root: Path) -> Any:
    from slime_rollout.data import ChatEncoder, load_tokenizer, read_sft

    encoder = ChatEncoder(load_tokenizer(str(root / "hf")))
    return [encoder.encode(row.messages).tokens for row in read_sft(str(place / "rows.jsonl"))]


def _pairs(place: Path, _root: Path) -> Any:
    from slime_rollout.data import read_preferences

    return [(row.prompt, row.chosen, row.rejected) for row in read_preferences(str(place / "rows.jsonl"))]


def _chat(place: Path, _root: Path) -> Any:
    """As prompts and conversations become tokens."""
    from slime_rollout.data import ChatEncoder, PromptEncoder, load_tokenizer
    from slime_rollout.data.chat import with_checked_template

    tokenizer = with_checked_template(load_tokenizer(str(place)))
    found = PromptEncoder(tokenizer, apply_chat_template=True).encode("say a number: 7")
    return [found, ChatEncoder(tokenizer).encode(CHATS[0]["messages"]).tokens]


def _plan(file: str, place: Path, _root: Path) -> Any:
    return _launch("plan", "--config", place / file)


def _run(place: Path, root: Path) -> Any:
    try:
        _launch("report", place)
    finally:
        found = _launch("diff", place, root / "run")
    return found


def _rollouts(place: Path, _root: Path) -> Any:
    from slime_launch.manifest import read_manifest
    from slime_rollout.store import RolloutStore

    read_manifest(place)
    store = RolloutStore(place / "rollouts")
    found = [store.read(number).batch() for number in range(2)]
    states = [store.read_source_state(number) for number in range(2)]
    return [[repr(batch.groups) for batch in found], states]


def _script(place: Path, _root: Path) -> Any:
    return _launch("migrate", place / "run.sh")


Reader = Callable[[Path, Path], Any]
READERS: dict[str, tuple[int, str, Reader]] = {
    "safetensors and index.json": (12, "hf", functools.partial(_checkpoint, "hf")),
    "FP8": (4, "fp8", functools.partial(_checkpoint, "fp8")),
    "INT4": (4, "int4", functools.partial(_checkpoint, "int4")),
    "torch_dist": (10, "torch_dist", functools.partial(_checkpoint, "torch_dist")),
    "torch_dist in a trainer": (6, "torch_dist", _trainer),
    "legacy torch": (6, "legacy", functools.partial(_checkpoint, "legacy")),
    "GGUF": (10, "gguf", _gguf),
    "adapter": (8, "adapter", _adapter),
    **{
        f"rows.{end}": (3, end, functools.partial(_prompts, end))
        for end in ("jsonl", "json", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "jsonl.zst")
    },
    "parquet": (10, "parquet", functools.partial(_prompts, "parquet")),
    "arrow": (10, "arrow", functools.partial(_prompts, "arrow")),
    "conversations": (3, "sft", _sft),
    "pairs": (3, "pairs", _pairs),
    "tokenizer and chat template": (10, "hf", _chat),
    "run file, TOML": (8, "toml", functools.partial(_plan, "run.toml")),
    "run file, YAML": (8, "yaml", functools.partial(_plan, "run.yaml")),
    "run folder": (10, "run", _run),
    "rollouts": (8, "rollouts", _rollouts),
    "script": (4, "script", _script),
}
"""Of how many mutants in a round, folder of its files, and who reads them."""
SEALED = ("rows.jsonl.gz", "rows.jsonl.bz2", "rows.jsonl.xz", "rows.jsonl.zst", "rollouts")
"""Where a checksum shows bytes that were altered by chance: what is read is what was written."""
ROUND = [name for name, (count, *_) in READERS.items() for _ in range(count)]
FILES = {
    "tokenizer and chat template": ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"),
    "safetensors and index.json": ("*.safetensors", "*.json"),
}
"""What of a folder is left of a copy, where not all of it is read by this reader."""


# A process for each mutant.


def warm_up(root: Path, work: Path) -> dict[str, Any]:
    """Read everything as it was written, here, so that a child finds all loaded; what was found, by reader."""
    from slime_megatron.ranks.device import select_device

    select_device(1)  # before Megatron is imported
    importlib.import_module("slime_megatron.checkpoints.contents")
    found, out = {}, os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for name, (_, folder, reader) in READERS.items():
        if reader is not _trainer:  # which has threads of gloo afterwards
            copied(root / folder, work / "warm")
            os.chdir(work / "warm")
            found[name] = reader(work / "warm", root)
    sys.stdout.flush()
    os.dup2(out, 1)
    return found


def read_one(number: int, root: Path, place: Path, expected: dict[str, Any]) -> int:
    """In a child: make the mutant of a number, and read it."""
    rng = random.Random(number)
    name = random.Random(number // len(ROUND)).sample(ROUND, len(ROUND))[number % len(ROUND)]
    _, folder, reader = READERS[name]
    copied(root / folder, place)
    for path in place.rglob("*"):
        if name in FILES and path.is_file() and not any(path.match(pattern) for pattern in FILES[name]):
            path.unlink()
    how = mutate(rng, place, sorted(path for path in root.rglob("*") if path.is_file()))
    os.chdir(place)
    _, resident, *_, used, _ = (int(pages) * resource.getpagesize() for pages in STATM.read_text().split())
    print(json.dumps({"number": number, "reader": name, "how": how, "before": resident}), flush=True)
    resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))  # on a busy machine, too, a reader has its time
    signal.alarm(WAIT)
    from slime_convert.errors import ConvertError
    from slime_core.errors import SlimeError
    from slime_core.words import shortened

    try:
        found = reader(place, root)
    except RefusedError:
        return REFUSED
    except (SlimeError, ConvertError) as error:
        print(shortened(str(error)), file=sys.stderr)
        return REFUSED
    if name in SEALED and found != expected[name] and any(f": {kind} at" in how for kind in ("flip", "number", "cut")):
        print(f"read as {found!r:.500}", file=sys.stderr)
        return WRONG
    return READ


def child(number: int, root: Path, slot: Path, expected: dict[str, Any]) -> None:
    """The whole life of a child."""
    code = FAULT
    try:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(slot / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        code = read_one(number, root, slot / "place", expected)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def result(slot: Path, status: int, usage: resource.struct_rusage) -> dict[str, Any]:
    """What became of a mutant."""
    out, error = ((slot / name).read_text(errors="replace") for name in ("out", "err"))
    said = json.loads(out.partition("\n")[0]) if out.startswith("{") else {"how": out[:100], "before": 0}
    grown = max(usage.ru_maxrss * 1024 - said.pop("before"), 0)
    code = os.waitstatus_to_exitcode(status)
    end = NAMES.get(code, f"ended by signal {-code}" if code < 0 else f"exit code {code}")
    if code in (-signal.SIGXCPU, -signal.SIGALRM):
        end = "time"
    elif any(words in error for words in NO_MEMORY) or grown > 0.95 * MEMORY:
        end = "memory"
    lines = error.strip().splitlines()
    is_said = bool(lines) and max(map(len, lines)) <= MOST_CHARACTERS and "Traceback (most" not in error
    if (end == "refused" and not is_said) or (slot / "place" / "ran").exists():
        end = "fault"
    return said | {
        "end": end,
        "error": "" if end == "read" else error[-3000:],
        "seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "grown": grown,
    }


def make_beside(root: Path) -> None:
    """Make the files in a child: what makes them leaves threads."""
    importlib.import_module("tiny")  # with torch and transformers, which all need
    process = os.fork()
    if not process:
        code = 1
        try:
            make_files(root)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def read_all(work: Path, first: int, count: int) -> None:
    """Read the mutants of these numbers, two at a time; a line for each."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)  # or each thread would reserve what it may never use
    root = work / "files"
    make_beside(root)
    expected = warm_up(root, work)
    gc.collect()
    gc.freeze()
    threads = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, threads
    running: dict[int, Path] = {}
    free = [work / str(number) for number in range(AT_ONCE)]
    for number in [*range(first, first + count), *[None] * AT_ONCE]:
        while running and (number is None or not free):
            process, status, usage = os.wait4(-1, 0)
            slot = running.pop(process)
            print(json.dumps(result(slot, status, usage)), flush=True)
            free.append(slot)
        if number is not None:
            slot = free.pop()
            slot.mkdir(exist_ok=True)
            process = os.fork()
            if not process:
                child(number, root, slot, expected)
            running[process] = slot


if __name__ == "__main__":
    read_all(Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3]))
