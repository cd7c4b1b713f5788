"""Data and commands of runs that generate nothing: conversations and preference pairs for a tiny chat model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launching import LAUNCHER, Assets

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
ANSWER, OTHER = "one and one is two", "say a number: 3"


def make_chat_model(assets: Assets) -> None:
    """Give the tokenizer of a tiny model a chat template."""
    file = assets.hf / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON Lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversation(number: int) -> dict[str, Any]:
    """A question with a number, and the answer that all of them have."""
    return {
        "messages": [
            {"role": "user", "content": f"say a number: {number}"},
            {"role": "assistant", "content": ANSWER},
        ]
    }


def pair(number: int) -> dict[str, Any]:
    """A prompt with two answers, the same two for all."""
    return {"prompt": f"say a number: {number}", "chosen": f" {ANSWER}", "rejected": f" {OTHER}"}


def data_command(
    assets: Assets, work: Path, loss: str, rows: Path, *extra: str, rollouts: int = 12, save: bool = False
) -> list[str]:
    """A run on a data set, 8 rows a rollout and one step each; later flags in `extra` replace earlier ones."""
    flags: Mapping[str, str] = {
        "--loss-type": loss,
        "--hf-checkpoint": str(assets.hf),
        "--load": str(assets.torch_dist),
        "--prompt-data": str(rows),
        "--output-dir": str(work / "out"),
        "--num-rollout": str(rollouts),
        "--rollout-batch-size": "8",
        "--micro-batch-size": "4",
        "--lr": "4e-3",
    }
    words = [word for flag in flags.items() for word in flag]
    return [str(LAUNCHER), "train", *words, *(["--save", str(work / "save")] if save else []), *extra]
