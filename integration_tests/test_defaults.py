"""What `plan` approves starts: each kind of run, with nothing but its size given, up to its first step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kinds import conversation, make_chat_model, pair, write_rows
from launching import LAUNCHER, Assets, make_assets, rows, run

pytestmark = pytest.mark.timeout(600)

SIZE = ["--rollout-batch-size", "4", "--num-rollout", "1"]
GENERATES = ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "6", "--rm-type", "random"]
ON_ENGINES = [*SIZE, *GENERATES, "--sglang-max-total-tokens", "8192", "--sglang-context-length", "128"]
KINDS = {
    "dpo": ("pairs", [*SIZE, "--loss-type", "dpo_loss"]),
    "reward-model": ("pairs", [*SIZE, "--loss-type", "rm_loss"]),
    "sft": ("conversations", [*SIZE, "--loss-type", "sft_loss"]),
    "grpo": ("prompts", [*ON_ENGINES, "--colocate"]),
    "ppo": ("prompts", [*ON_ENGINES, "--colocate", "--advantage-estimator", "ppo"]),
    "distillation": ("prompts", [*ON_ENGINES, "--colocate", "--use-opd", "--opd-type", "megatron"]),
    "async": ("prompts", [*ON_ENGINES, "--async-buffer-size", "1", "--rollout-num-gpus", "1"]),
    # Its routers are made to leave experts to rounding, which the canary takes for wrong weights.
    "moe": ("prompts", [*ON_ENGINES, "--colocate", "--weight-canary-limit", "0"]),
    "lora": ("prompts", [*ON_ENGINES, "--colocate", "--lora-rank", "4", "--lora-alpha", "8"]),
    "evaluation": ("prompts", [*ON_ENGINES, "--num-rollout", "0"]),
    "resumed": ("conversations", [*SIZE, "--loss-type", "sft_loss"]),
}
IN_EVERY_RUN = ("dpo",)


@pytest.fixture(scope="session")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """A tiny model with experts."""
    return make_assets("qwen3-moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=[pytest.mark.full] * (name not in IN_EVERY_RUN)) for name in KINDS]
)
def test_what_plan_approves_starts(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assets: Assets = request.getfixturevalue("moe" if kind == "moe" else "llama")
    data, flags = KINDS[kind]
    make_chat_model(assets)
    files = {
        "pairs": [pair(number) for number in range(8)],
        "conversations": [conversation(number) for number in range(8)],
        "prompts": [{"prompt": f"say a number: {number}", "label": str(number)} for number in range(8)],
    }
    given = write_rows(tmp_path / "rows.jsonl", files[data])
    words = ["--hf-checkpoint", str(assets.hf), "--load", str(assets.torch_dist), "--prompt-data", str(given), *flags]
    words += ["--output-dir", str(tmp_path / "out"), "--sglang-python", assets.engine_python]
    if kind == "distillation":
        words += ["--opd-teacher-load", str(assets.torch_dist)]
    if kind == "evaluation":
        words += ["--eval-prompt-data", "held", str(given)]
    if kind == "resumed":
        words += ["--save", str(tmp_path / "save")]
        run([str(LAUNCHER), "train", *words], tmp_path / "first.txt")
        words += ["--num-rollout", "2"]
    plan = subprocess.run([str(LAUNCHER), "plan", *words], capture_output=True, text=True, timeout=120)
    assert plan.returncode == 0, plan.stderr
    run([str(LAUNCHER), "train", *words], tmp_path / "train.txt")
    if kind == "evaluation":
        assert "eval/held" in rows(tmp_path, "eval")[0]
    else:
        assert len(rows(tmp_path, "train")) == 1 + (kind == "resumed")
