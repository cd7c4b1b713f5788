"""Plans of commands on machines that have neither the models nor the data: both have stand-ins of the real shape.

A command's words name models, checkpoints and prompt files. Each that the repository does not hold gets a stand-in: a
Hugging Face directory with the published config of that model, an empty checkpoint, or rows with the columns that the
flags name. Then ``slime-launch plan`` looks at the command as it would on a cluster of H100s.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
import yaml
from launching import engine_python
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from slime_convert.published import PUBLISHED
from slime_core.types import RolloutBatch, Sample, Status
from slime_launch.cli import main
from slime_launch.config_file import with_config

ROOT = Path(__file__).resolve().parents[1]
USUAL_MODEL = "qwen3-4B"
"""What stands for a path that names no published model."""
OURS = ("examples", "integration_tests", "packages", "scripts")
"""Directories of the repository that commands name files of; these are taken as they are."""
COLUMNS = {"--input-key": "text", "--label-key": "label", "--chosen-key": "chosen", "--rejected-key": "rejected"} | {
    f"--eval-{name}-key": kind for name, kind in {"input": "text", "label": "label", "tool": "tools"}.items()
}
SETTINGS_FILES = ("--sglang-config", "--eval-config", "--custom-config-path", "--megatron-config-path")
CHECKPOINTS = ("--load", "--ref-load", "--critic-load", "--opd-teacher-load")
TALK = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
CELLS: dict[str, Any] = {"text": "1 + 1 =", "label": "2", "chosen": "2", "rejected": "3", "messages": TALK, "tools": []}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
QUANTIZED: Mapping[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"model.layers.0.mlp.up_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)},
    ),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "all": {
                    "weights": {
                        **{"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
                    }
                }
            },
        },
        {"model.layers.0.mlp.up_proj.weight_packed": torch.ones(8, 4, dtype=torch.int32)},
    ),
}


def published_like(path: str, words: Sequence[str] = ()) -> str:
    """The published model that a path means: the one whose shape flags are among ``words``, else the one it names."""
    typed = f" {' '.join(words)} "
    for name, entry in PUBLISHED.items():
        if f" {' '.join(entry.shape.to_megatron_flags())} " in typed:
            return name
    if "quickstart" in path or "smollm2" in path.lower():
        return "smollm2-135M"
    names = {word.lower(): name for name, entry in PUBLISHED.items() for word in (name, *entry.models.split(", "))}
    found = [word for word in names if word in path.lower()]
    return names[max(found, key=len)] if found else USUAL_MODEL


def write_model(directory: Path, name: str, quantized: str | None = None) -> Path:
    """A Hugging Face directory of a published model, as far as a plan looks at it."""
    directory.mkdir(parents=True, exist_ok=True)
    settings, weights = QUANTIZED[quantized] if quantized else (None, {"model.norm.weight": torch.ones(8)})
    config = dict(PUBLISHED[name].config) | ({"quantization_config": settings} if settings else {})
    (directory / "config.json").write_text(json.dumps(config))
    words = ["?", "<user>", "<assistant>", "<end>", *"0123456789+="]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    save_file(weights, directory / "model.safetensors")
    return directory


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint in Megatron's ``torch_dist`` format that says nothing of its model."""
    release = directory / "release"
    release.mkdir(parents=True, exist_ok=True)
    (directory / "latest_checkpointed_iteration.txt").write_text("release")
    (release / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (release / ".metadata").touch()
    torch.save({"args": {}}, release / "common.pt")
    return directory


def write_rows(path: Path, columns: Mapping[str, Any], count: int) -> Path:
    """The same row ``count`` times, as Parquet or JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(columns)] * count
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass
class StandIns:
    """Puts stand-ins in the place of what a command names.

    Attributes:
        directory: Where they are written.
        written: Files of the page or recipe that the repository does not hold, by the name that commands have for them.
    """

    directory: Path
    written: Mapping[str, str] = field(default_factory=dict)

    def words(self, argv: Sequence[str]) -> list[str]:
        """The words of ``slime-launch train`` with paths that can be read here; the file of ``--config`` is in them."""
        words = self._expanded(argv)
        flags = _by_flag(words)
        hf = {value for name, values in flags if name == "--hf-checkpoint" for value in values}
        columns, count = self._columns(flags), max([1024, *_numbers(flags, "--rollout-batch-size")])
        said: list[str] = []
        for name, values in flags:
            said += [*([name] if name else []), *self._replaced(name, values, words, hf, columns, count)]
        return said

    def _expanded(self, argv: Sequence[str]) -> list[str]:
        """With the flags of ``--config`` in its place."""
        words = _apart(argv)
        if "--config" not in words:
            return words
        at = words.index("--config")
        words[at + 1] = str(self._ours(words[at + 1]))
        words = _apart(with_config(words).words)
        at = words.index("--config")
        return words[:at] + words[at + 2 :]

    def _replaced(
        self, name: str, values: list[str], words: list[str], hf: set[str], columns: Mapping[str, Any], count: int
    ) -> list[str]:
        if name == "--hf-checkpoint" or (name in CHECKPOINTS and values and values[0] in hf):
            return [self.model(value, words) for value in values]
        if name in CHECKPOINTS:
            return [str(write_checkpoint(self._place(value))) for value in values]
        if name in ("--prompt-data", "--eval-prompt-data"):
            at_names = 2 if name == "--eval-prompt-data" and len(values) > 1 else 1
            return [
                value if (place + 1) % at_names else self.data(value, columns, count)
                for place, value in enumerate(values)
            ]
        if name == "--load-debug-rollout-data":
            return [self._rollouts()]
        if name == "--sglang-python":
            return [engine_python()]
        if name in SETTINGS_FILES:
            return [self._settings(value, words, columns, count) for value in values]
        if name.endswith("-path"):  # functions
            return [self._function(value) for value in values]
        return values

    def model(self, path: str, words: Sequence[str] = ()) -> str:
        """A stand-in for a model's directory; FP8 or INT4 where its name says so."""
        quantized = next((form for form in QUANTIZED if form in path.lower()), None)
        return str(write_model(self._place(path), published_like(path, words), quantized))

    def data(self, path: str, columns: Mapping[str, Any], count: int) -> str:
        """A file of prompts: one of the repository or the page, or else a stand-in with some columns."""
        file, at, part = path.partition("@[")
        found = self._found(file)
        if found is None:
            place = self._place(file)
            found = write_rows(place if place.suffix in (".parquet", ".jsonl") else place / "0.jsonl", columns, count)
        return f"{found}{at}{part}"

    def _columns(self, flags: Sequence[tuple[str, list[str]]]) -> dict[str, Any]:
        """A row with every column that a flag names, and those that are read where none does."""
        given = {name: values[0] for name, values in flags if values}
        is_talk = given.get("--loss-type") == "sft_loss"
        row = {"prompt": CELLS["text"], **{kind: CELLS[kind] for kind in ("label", "messages", "chosen", "rejected")}}
        for flag, kind in COLUMNS.items():
            if flag in given:
                row[given[flag]] = CELLS["messages" if is_talk and kind == "text" else kind]
        if "--metadata-key" in given:
            row[given["--metadata-key"]] = {"source": "stand-in"}
        if "--tool-key" in given:
            row[given["--tool-key"]] = CELLS["tools"]
        return row

    def _settings(self, path: str, words: Sequence[str], columns: Mapping[str, Any], count: int) -> str:
        """A YAML or JSON file of settings, with stand-ins for the models and data that it names."""
        content = yaml.safe_load(self._ours(path).read_text())
        hf = next((values[0] for name, values in _by_flag(words) if name == "--hf-checkpoint" and values), None)
        change: dict[str, Callable[[str], str]] = {
            "model_path": lambda value: self.model(value, words if value == hf else ()),
            "path": lambda value: self.data(value, columns, count),
            "load": lambda value: str(write_checkpoint(self._place(value))),
        }
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(yaml.safe_dump(_changed(content, change), sort_keys=False))
        return str(place)

    def _function(self, path: str) -> str:
        """``file.py:function`` with a file that is there."""
        file, colon, name = path.partition(":")
        if not file.endswith(".py"):
            return path
        return f"{self._ours(file)}{colon}{name}"

    def _rollouts(self) -> str:
        """Recorded rollouts: two samples of one prompt, of which one is better."""
        file = self.directory / "debug" / "0.npz"
        file.parent.mkdir(parents=True, exist_ok=True)
        said: dict[str, Any] = {"tokens": [1, 2], "response_length": 1, "status": Status.COMPLETED, "group_index": 0}
        group = [Sample(index=index, prompt="p", reward=float(index), **said) for index in range(2)]
        RolloutBatch(rollout_id=0, groups=[group]).columns().write(file)
        return str(file.with_name("{rollout_id}.npz"))

    def _ours(self, path: str) -> Path:
        """A file that the repository holds or the page writes."""
        found = self._found(path)
        if found is None:
            raise FileNotFoundError(f"{path} is neither in the repository nor written by this page")
        return found

    def _found(self, path: str) -> Path | None:
        if path in self.written:
            place = self._place(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(self.written[path])
            return place
        file = ROOT / path
        return file if path.startswith(tuple(f"{name}/" for name in OURS)) and file.exists() else None

    def _place(self, path: str) -> Path:
        """Where the stand-in for a path lies."""
        return self.directory / re.sub(r"[^\w./-]", "_", path).strip("/").replace("..", "_")


def _apart(words: Sequence[str]) -> list[str]:
    """``--flag=value`` as two words."""
    return [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]


def _by_flag(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Words by the flag before them; those before the first have the flag ``""``."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def _numbers(flags: Sequence[tuple[str, list[str]]], name: str) -> list[int]:
    return [int(value) for flag, values in flags if flag == name for value in values if value.isdecimal()]


def _changed(content: Any, change: Mapping[str, Callable[[str], str]]) -> Any:
    if isinstance(content, list):
        return [_changed(item, change) for item in content]
    if not isinstance(content, dict):
        return content
    return {
        key: change[key](value) if key in change and isinstance(value, str) else _changed(value, change)
        for key, value in content.items()
    }


def words_of_train(command: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What a command of ``slime-launch`` says to ``plan``: flags of the plan itself, and those of training.

    Raises:
        ValueError: It is not a command that trains, evaluates or plans.
    """
    words = list(argv)
    if command == "plan":
        own = []
        for flag in ("--device", "--device-memory-gib", "--gpus-per-node", "--write"):
            if flag in words:
                at = words.index(flag)
                own += [] if flag == "--write" else words[at : at + 2]
                del words[at : at + 2]
        return own, [word for word in words if word != "--json"]
    if command == "submit":
        return [], words[2:] if words[:1] == ["--ray-address"] else words
    if command == "sft":
        return [], ["--loss-type", "sft_loss", *words]
    if command == "eval":
        return [], ["--rollout-batch-size", "1", *words, "--num-rollout", "0"]
    if command == "train-async":
        return [], words if "--async-buffer-size" in words else ["--async-buffer-size", "1", *words]
    if command != "train":
        raise ValueError(f"slime-launch {command} is not a command that can be planned")
    return [], words


def plan_of(argv: Sequence[str], directory: Path, written: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The plan, on H100s, of a command's words after ``slime-launch``; see ``problems`` in it.

    Args:
        argv: Such as ``["train", "--config", "examples/x/run.toml"]``; paths are relative to the repository's root.
        directory: Where stand-ins are written.
        written: Files that the repository does not hold, by name.
    """
    command, *words = argv
    own, words = words_of_train(command, words)
    try:
        words = StandIns(directory, written or {}).words(words)
    except FileNotFoundError as error:
        return {"problems": [str(error)]}
    if "--device" not in own:
        own += ["--device", "h100"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["plan", "--json", *own, *words])
    try:
        plan: dict[str, Any] = json.loads(out.getvalue())
    except ValueError:
        plan = {"problems": [err.getvalue()]}
    assert (code == 0) == (not plan["problems"]), err.getvalue()
    return plan
