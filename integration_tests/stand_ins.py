"""Plans of commands that pages and recipes show, with stand-ins for the models, checkpoints and data that they name.

A model's stand-in has the real config and no weights, so that the plan's sizes are the real ones. Its tokenizer knows a
few words only: prompts are shorter than real ones. That of a name on the Hub is in a cache of the Hub.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from launching import engine_python
from torch.distributed.checkpoint.metadata import Metadata

from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.errors import SlimeError
from slime_launch.config import Settings
from slime_launch.config_file import with_config
from slime_launch.devices import find_device
from slime_launch.errors import Problems
from slime_launch.flags import read_train
from slime_launch.plan.build import Plan, make_plan
from slime_launch.plan.engines import num_parameters
from slime_rollout.config import DataConfig
from slime_rollout.eval_sets import read_eval_sets

ROOT = Path(__file__).resolve().parents[1]
GIVEN = ("benchmarks", "docs", "examples", "integration_tests", "packages", "scripts")
"""What of the repository a command may name; everything else that it reads has a stand-in."""
COMMANDS: dict[str, list[str]] = {
    "train": [],
    "train-async": ["--async-buffer-size", "1"],
    "plan": [],
    "submit": [],
    "sft": ["--loss-type", "sft_loss"],
    "eval": ["--rollout-batch-size", "1"],
}
"""The commands of ``slime-launch`` that take training flags, and the flags that each begins with."""
ROWS = 1024
ROWS_OF = {"aime": 30, "gsm8k/test": 1319}
"""Rows of held-out sets whose size a plan's times depend on, by a part of the path."""
QUICK_START = {"outputs/quickstart/model": "SmolLM2-135M-Instruct"}
ON_THE_HUB = ("Qwen", "meta-llama", "zai-org")
"""Owners of models on the Hub that commands name; what begins with another word is a directory."""
SAME_SHAPE = {"Kimi-K2-Instruct-0905": "kimi-k2"}
"""Models that :data:`PUBLISHED` does not name, by name, with the entry whose shape they have."""
FP8 = re.compile(r"fp8", re.IGNORECASE)
STORED_IN_FP8 = ("DeepSeek-V3", "DeepSeek-R1", "Kimi-K2")
"""Models that their makers publish in FP8 alone; a directory of theirs with bf16 in its name is not."""

_TALK = [{"role": "user", "content": "what is 6 times 7 ?"}, {"role": "assistant", "content": "42"}]
_WORDS = ("what", "is", "6", "times", "7", "?", "42", "user", "assistant", "system", "tool")
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} {% generation %}{{ message.content }}{% endgeneration %} "
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


@dataclass(frozen=True)
class Planned:
    """A command's plan, and what is wrong with it, a line each; ``plan`` is ``None`` if it cannot be read."""

    plan: Plan | None
    problems: list[str]


def plan_words(words: Sequence[str], work: Path, *, device: str = "h100", gpus_per_node: int = 8) -> Planned:
    """Plan a command, ``slime-launch train …`` or such, as if it were given in a clone on a machine with its files.

    Args:
        words: The words of the command, with or without ``slime-launch``.
        work: An empty directory, or one in which other commands of the same page were planned.

    Returns:
        The plan, even of a command with problems; without one where a flag cannot be read, or what the command names
        is neither in the repository nor something that has a stand-in.
    """
    command, *flags = words[1:] if words[0] == "slime-launch" else words
    if command not in COMMANDS:
        return Planned(None, [f"{command} is a command that cannot be planned; allowed: {', '.join(COMMANDS)}"])
    own, flags = _own_flags(flags)
    device, gpus_per_node = own.get("--device", device), int(own.get("--gpus-per-node", gpus_per_node))
    with _clone(work):
        try:
            flags = [*COMMANDS[command], *flags, *(["--num-rollout", "0"] if command == "eval" else [])]
            flags = _with_engine_python(_inside(work, with_config(flags).words))
            settings, known = read_train(flags, on_gpu=device != "cpu", planned=True)
        except SlimeError as error:
            return Planned(None, str(error).splitlines())
        if missing := _write_stand_ins(settings, flags):
            return Planned(None, missing)
        problems, found = Problems(known, settings.unread), find_device(device, None)
        plan = make_plan(settings, problems, found, gpus_per_node=gpus_per_node, elsewhere=True)
    return Planned(plan, plan.problems)


def _own_flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The flags that ``plan`` and ``submit`` have besides those of training, and all other words."""
    own: dict[str, str] = {}
    others: list[str] = []
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name in ("--device", "--gpus-per-node", "--ray-address", "--write", "--device-memory-gib"):
            own[name] = value if equals else next(following, "")
        elif name != "--json":
            others.append(word)
    return own, others


@contextlib.contextmanager
def _clone(work: Path) -> Iterator[None]:
    """Within the block, the working directory has the repository's files, and room for stand-ins and a Hub's cache."""
    work.mkdir(parents=True, exist_ok=True)
    for name in GIVEN:
        if (ROOT / name).exists() and not (work / name).is_symlink():
            (work / name).symlink_to(ROOT / name)
    cache = {"HF_HUB_CACHE": str(work.absolute() / "hub"), "HF_HUB_OFFLINE": True}
    with contextlib.chdir(work), mock.patch.multiple("huggingface_hub.constants", **cache):
        yield


def _inside(work: Path, words: Sequence[str]) -> list[str]:
    """The same words with absolute paths, such as those of a cluster's disk, below ``work``."""

    def moved(value: str) -> str:
        return f"{work}{value}" if value.startswith("/") and not Path(value).exists() else value

    found = []
    for word in words:
        name, equals, value = word.partition("=")
        found.append(f"{name}={moved(value)}" if equals and name.startswith("--") else moved(word))
    return found


def _with_engine_python(words: Sequence[str]) -> list[str]:
    """The same words with the SGLang of the tests: its flags are read once for all plans."""
    external = any(word.startswith("--rollout-external-") for word in words)  # which have an SGLang of their own
    if external or not Path(engine_python()).is_file():
        return list(words)
    others = [word for word in words if not word.startswith("--sglang-python=")]
    while "--sglang-python" in others:
        place = others.index("--sglang-python")
        del others[place : place + 2]
    return [*others, "--sglang-python", engine_python()]


def _write_stand_ins(settings: Settings, words: Sequence[str]) -> list[str]:
    """Write what is missing of the files that a command reads; returns what cannot have a stand-in."""
    megatron, model = settings.megatron, settings.rollout.data.hf_checkpoint
    paths = {megatron.load, megatron.ref_load, megatron.critic_load, megatron.opd_teacher_load}
    problems = [_write_model(model, words)]
    problems += [_write_checkpoint(path, words) for path in paths - {None, model, megatron.save} if path is not None]
    data = settings.rollout.data
    files = [(path, data) for path in data.prompt_paths]
    with contextlib.suppress(SlimeError):  # the plan says what is wrong with them
        files += [(held_out.path, held_out.config.data) for held_out in read_eval_sets(settings.rollout)]
    problems += [_write_rows(path, settings.kind.rows, fields) for path, fields in files]
    return [problem for problem in problems if problem is not None]


def _missing(path: str | Path) -> str | None:
    """What is wrong if a file below the repository's own directories is not there."""
    if Path(path).parts[0] in GIVEN and not Path(path).exists():
        return f"{path} is not in the repository"
    return None


def model_config(path: str, words: Sequence[str] = ()) -> dict[str, Any] | None:
    """The config of the published model that a path names, or whose flags are among the words."""
    for start, name in QUICK_START.items():
        if start in path:
            path = name
    names = {name.lower(): entry for entry in PUBLISHED.values() for name in entry.models.split(", ")}
    names |= {name.lower(): entry for name, entry in PUBLISHED.items()}
    names |= {name.lower(): PUBLISHED[entry] for name, entry in SAME_SHAPE.items()}
    for part in reversed(Path(path).parts):
        wanted = re.sub(r"[-_](torch[-_]dist|hf|bf16|fp8|int4)\b", "", part.lower())
        if wanted in names:
            return dict(names[wanted].config)
    flags = dict(itertools.pairwise(words))
    for entry in PUBLISHED.values():
        given = entry.shape.to_megatron_flags()
        mine = dict(itertools.pairwise(given))
        if "--num-layers" in flags and all(
            flags.get(flag) == mine.get(flag) for flag in ("--num-layers", "--hidden-size", "--vocab-size")
        ):
            return dict(entry.config)
    return None


def _write_model(path: str, words: Sequence[str]) -> str | None:
    """A Hugging Face directory with a published model's config, a small tokenizer, and a file of weights."""
    if Path(path).parts[0] in GIVEN:
        return _missing(path)
    config = model_config(path, words)
    if config is None:
        return f"{path} names no model that slime-convert list-models knows, so its stand-in has no shape"
    shape, directory, name = ModelShape.from_hf_config(config), _directory_of(path), Path(path).name
    directory.mkdir(parents=True, exist_ok=True)
    quantized = FP8.search(name) or (name.startswith(STORED_IN_FP8) and "bf16" not in name.lower())
    if quantized:
        config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        # One number of a linear layer is one byte; embeddings and output layer have two.
        size = num_parameters(shape) + 2 * shape.vocab_size * shape.hidden_size
        _write_header(directory, "model.layers.0.mlp.up_proj.weight", "F8_E4M3", size)
    else:
        _write_header(directory, "model.norm.weight", "BF16", 2 * shape.hidden_size)
    (directory / "config.json").write_text(json.dumps(config))
    _write_tokenizer(directory)
    return None


def _directory_of(model: str) -> Path:
    """Where a model's stand-in is: the directory that is named, or a snapshot in the Hub's cache."""
    owner, _, name = model.partition("/")
    if owner not in ON_THE_HUB:
        return Path(model)
    cached = Path("hub", f"models--{owner}--{name}")
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "refs" / "main").write_text("stand-in")
    return cached / "snapshots" / "stand-in"


def _write_header(directory: Path, name: str, dtype: str, size: int) -> None:
    """A file of one tensor of so many bytes, which take no room on a disk."""
    length = size // (1 if dtype == "F8_E4M3" else 2)
    header = json.dumps({name: {"dtype": dtype, "shape": [length], "data_offsets": [0, size]}}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(_WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_checkpoint(path: str, words: Sequence[str]) -> str | None:
    """A checkpoint of Megatron's that says nothing about its model, or a Hugging Face model if the path names one."""
    if Path(path).parts[0] in GIVEN:
        return _missing(path)
    if "torch_dist" not in path and model_config(path) is not None:
        return _write_model(path, words)
    release = Path(path, "release")
    release.mkdir(parents=True, exist_ok=True)
    Path(path, "latest_checkpointed_iteration.txt").write_text("release")
    (release / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (release / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    torch.save({"args": {}}, release / "common.pt")
    return None


def _write_rows(path: str, rows: str | None, data: DataConfig) -> str | None:
    """A file of prompts, conversations or pairs, with the fields that the flags name."""
    path = re.sub(r"@\[.*\]\Z", "", path)
    if Path(path).parts[0] in GIVEN:
        return _missing(path)
    row: dict[str, Any] = {data.metadata_key: {"index": 0}}
    if rows == "pairs":
        other = [_TALK[0], {"role": "assistant", "content": "7"}]
        row |= {data.chosen_key or "chosen": _TALK, data.rejected_key or "rejected": other}
    elif rows == "conversations":
        row[data.input_key or "messages"] = _TALK
    else:
        prompt = _TALK[:1] if data.apply_chat_template else _TALK[0]["content"]
        row |= {data.input_key or "prompt": prompt, data.label_key or "label": "42"}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    count = next((size for part, size in ROWS_OF.items() if part in path), ROWS)
    if path.endswith(".parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * count), path)
    else:
        Path(path).write_text((json.dumps(row) + "\n") * count)
    return None
