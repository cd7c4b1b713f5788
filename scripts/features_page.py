"""Writes docs/reference/features.md: every two features of a run together, as the checks before a run answer it.

python scripts/features_page.py    writes the page
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from slime_convert.published import PUBLISHED
from slime_core.errors import ConfigError
from slime_core.types import RolloutBatch, Sample, Status
from slime_launch import preflight
from slime_launch.errors import FlagError, Problems
from slime_launch.flags import read_train
from slime_launch.idle import idle_flags
from slime_megatron.settings import megatron_check
from slime_rollout.engine import python, server
from slime_rollout.engine.python import importable_in
from slime_rollout.measure import Measured

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "features.md"
MODEL = dict(PUBLISHED["qwen3-30B-A3B"].config) | {"num_hidden_layers": 8, "num_experts": 8}
BASE = (
    "--hf-checkpoint hf --load dist --save save --rollout-batch-size 16 --actor-num-gpus-per-node 8 --sequence-parallel"
)
USUAL = {
    "length": "--num-rollout 4",
    "prompts": "--prompt-data train.jsonl",
    "groups": "--n-samples-per-prompt 4",
    "engines": "--rollout-num-gpus 8",
}
OWN = """
import torch

def loss(inputs):
    return (inputs.output_N * inputs.weights_N).sum(), {}

async def generate(args, sample, sampling_params):
    return sample

def rollout(args, rollout_id, data_source, evaluation=False):
    return data_source.get_samples(args.rollout_batch_size)

def rewards(args, group):
    return [0.0 for _ in group]

def change(args, rollout_id, rollout_data):
    rollout_data["rewards"][0] += 0.5
"""
ENGINE_GROUPS = [
    {"name": name, "model_path": "hf", "update_weights": name == "policy", "server_groups": [{"num_gpus": 4}]}
    for name in ("policy", "judge")
]
SERVER_ARGS = """
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--speculative-algorithm")
        for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
            parser.add_argument(f"--speculative-{name}", type=int)
"""
QUANTIZED = {
    "hf": None,
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"model.layers.0.self_attn.q_proj.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)},
    ),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "all": {
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
                }
            },
        },
        {"model.layers.0.mlp.experts.0.up_proj.weight_packed": torch.ones(8, 4, dtype=torch.int32)},
    ),
}
ENVIRONMENT = ("PYTHONPATH", "XDG_CACHE_HOME", "SLIME_ENGINE_PYTHON")
HEAD = """\
# Features together

Written by `scripts/features_page.py` from `scripts/features.toml` and what all checks before a run say of a command
with stand-in files; a test compares the two. The command trains a small model of Qwen3-30B-A3B's family on 8 GPUs
beside 8 for the engines. Every feature is accepted alone. A run has one of two that are alternatives of one choice.
Of the other pairs some are refused; in some, one of the two has no effect, which the run says at start. The last two
tables have these with the reason. All others are accepted: no check refuses them.

Those with `step` in the last column are a matter of a train step alone. Every accepted pair of two of them was run: a
tiny model trains a step on recorded rollouts, in one process on a CPU (`test_features_run.py`). What else has been
run together is in the other tests.
"""


@dataclass(frozen=True)
class Feature:
    """One feature: its name, its flags, the choice that it is an alternative of, and what it takes the place of.

    ``step`` says that it is a matter of a train step alone.
    """

    name: str
    words: str
    choice: str = ""
    instead: tuple[str, ...] = ()
    step: bool = False


FEATURES = tuple(
    Feature(**row | {"instead": tuple(USUAL[name] for name in row.get("instead", ()))})
    for row in tomllib.loads((Path(__file__).parent / "features.toml").read_text(encoding="utf-8"))["feature"]
)


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Within the block, every file that a command names is in the working directory, as far as checks look at it."""
    kept = {name: os.environ.get(name) for name in ENVIRONMENT}
    asks_megatron = patch.object(
        megatron_check, "_ask_megatron", lambda question: None
    )  # takes seconds, and tested there
    asked_once = patch.object(python, "importable_in", functools.cache(importable_in))
    on_gpus = patch.object(server, "engine_device", lambda: "cuda")
    uncounted = patch.object(preflight, "measure", lambda kind, rollout, context: Measured())  # needs a tokenizer
    temporary = tempfile.TemporaryDirectory(prefix="slime-features-")
    with temporary as directory, contextlib.chdir(directory), asked_once, on_gpus, asks_megatron, uncounted:
        write_files(Path())
        os.environ |= {"PYTHONPATH": f"{directory}/site", "XDG_CACHE_HOME": f"{directory}/cache"}
        os.environ.pop("SLIME_ENGINE_PYTHON", None)
        try:
            yield
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                os.environ |= {} if value is None else {name: value}


def write_files(directory: Path) -> None:
    """The files of :func:`stand_ins`."""
    for name, quantized in QUANTIZED.items():
        model = directory / name
        model.mkdir()
        config = MODEL | ({} if quantized is None else {"quantization_config": quantized[0]})
        (model / "config.json").write_text(json.dumps(config))
        (model / "tokenizer.json").write_text("{}")
        save_file({} if quantized is None else quantized[1], model / "model.safetensors")
    for name in ("dist", "teacher"):
        checkpoint = directory / name / "release"
        checkpoint.mkdir(parents=True)
        (directory / name / "latest_checkpointed_iteration.txt").write_text("release")
        (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
        torch.save({"args": {}}, checkpoint / "common.pt")
    talk = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    pair = {"prompt": "1 + 1 =", "label": "2", "chosen": "2", "rejected": "3"}
    for name, row in (("train", pair), ("rows", pair | {"messages": talk}), ("held", pair | {"messages": talk})):
        (directory / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 64)
    (directory / "own.py").write_text(OWN)
    (directory / "engines.yaml").write_text(json.dumps({"sglang": ENGINE_GROUPS}))
    (directory / "debug").mkdir()
    said: dict[str, Any] = {
        "prompt": "p",
        "tokens": [1, 2],
        "response_length": 1,
        "status": Status.COMPLETED,
        "group_index": 0,
    }
    preferred = [Sample(index=index, reward=reward, **said) for index, reward in enumerate((1.0, 0.0))]
    RolloutBatch(rollout_id=0, groups=[preferred]).columns().write(directory / "debug" / "0.npz")
    server = directory / "site" / "sglang" / "srt"
    server.mkdir(parents=True)
    (server.parent / "__init__.py").touch()
    (server / "server_args.py").write_text(SERVER_ARGS)


def command(*features: Feature) -> list[str]:
    """The words of a command with some features."""
    instead = {words for feature in features for words in feature.instead}
    shared = [words for words in USUAL.values() if words not in instead]
    return " ".join([BASE, *shared, *(feature.words for feature in features)]).split()


def answer(*features: Feature) -> tuple[str, set[str]]:
    """Why a command with some features is refused, empty if it is accepted; and its flags without effect, with why.

    To be called within :func:`stand_ins`.
    """
    try:
        settings, contradictions = read_train(command(*features), on_gpu=False)
    except (FlagError, ConfigError) as error:
        return str(error).splitlines()[0], set()
    problems = Problems(contradictions)
    preflight.look(settings, problems, elsewhere=True, planned=True)
    notes = [line.removeprefix("no effect, as ").rpartition(": ") for line in idle_flags(settings).notes]
    idle = {f"{flag}: {why}" for why, _, flags in notes for flag in flags.split(", ")}
    return next(iter(problems.lines), ""), idle


def pairs() -> list[tuple[Feature, Feature]]:
    """Every two features that are not alternatives."""
    every = itertools.combinations(FEATURES, 2)
    return [(one, other) for one, other in every if not one.choice or one.choice != other.choice]


def page() -> str:
    """The whole page."""
    flags = [f"| {one.name} | `{one.words}` | {one.choice} | {'step' if one.step else ''} |" for one in FEATURES]
    with stand_ins():
        answers = {chosen: answer(*chosen) for chosen in (*((feature,) for feature in FEATURES), *pairs())}
    alone = {feature: answers[feature,][1] for feature in FEATURES}
    rows: list[str] = []
    idle: list[str] = []
    every = pairs()
    for one, other in every:
        why, without_effect = answers[one, other]
        if why:
            rows.append(f"| {one.name} | {other.name} | {why} |")
        elif new := sorted(without_effect - alone[one] - alone[other]):
            idle.append(f"| {one.name} | {other.name} | {'; '.join(new)} |")
    accepted = len(every) - len(rows) - len(idle)
    run = sum(one.step and other.step and not answers[one, other][0] for one, other in every)
    return "\n".join(
        [
            HEAD,
            f"{len(every)} pairs: {accepted} are accepted, {len(rows)} refused, of {len(idle)} one has no effect. "
            f"{run} were run.\n",
            "## Features\n\n| feature | flags | alternative of | |\n|---|---|---|---|",
            *flags,
            "\n## Refused\n\n| feature | with | reason |\n|---|---|---|",
            *rows,
            "\n## Without effect\n\n| feature | with | flag and reason |\n|---|---|---|",
            *idle,
            "",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
