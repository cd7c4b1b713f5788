"""Commands that slime's users know are read, and mean what they say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launching import engine_python

from slime_launch.config import Settings
from slime_launch.flags import parse_train
from slime_launch.validate import check_settings
from slime_rollout.eval_sets import read_eval_sets

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ["--hf-checkpoint", "/m", "--load", "/m_torch_dist", "--ref-load", "/m_torch_dist", "--save", "/runs/m"]
GRPO = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo --use-kl-loss
--kl-loss-coef 0.001 --prompt-data /path/to/train.jsonl --input-key prompt --label-key label --apply-chat-template
--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000 --save-interval 100
"""


def _model(name: str) -> list[str]:
    """The words of ``${MODEL_ARGS[@]}`` after ``source scripts/models/NAME.sh``."""
    program = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, timeout=20
    ).stdout.split()


def _read(command: str, model: str = "qwen3-4B") -> Settings:
    settings = parse_train([*command.split(), *_model(model), *CHECKPOINTS])
    check_settings(settings)
    return settings


@pytest.mark.parametrize("model", sorted(path.stem for path in (ROOT / "scripts" / "models").glob("*.sh")))
def test_grpo_with_every_model_of_ours(model: str) -> None:
    settings = _read(GRPO, model)
    assert settings.cluster.actor_gpus == settings.cluster.rollout_gpus == 8
    assert settings.megatron.save_interval == 100
    assert settings.shape["num_layers"] > 1


def test_held_out_sets_by_repeated_flags() -> None:
    settings = _read(
        GRPO + "--eval-interval 50 --eval-prompt-data aime /a.jsonl --eval-prompt-data gsm8k /g.jsonl "
        "--n-samples-per-eval-prompt 16"
    )
    held_out_sets = read_eval_sets(settings.rollout)
    assert [(held_out.name, held_out.path) for held_out in held_out_sets] == [
        ("aime", "/a.jsonl"),
        ("gsm8k", "/g.jsonl"),
    ]
    assert {held_out.n_samples_per_eval_prompt for held_out in held_out_sets} == {16}


def test_colocation_and_flags_of_megatron_and_sglang() -> None:
    settings = _read(
        GRPO + "--colocate --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel "
        "--micro-batch-size 1 --sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO "
        f"--sglang-python {engine_python()}"
    )
    assert settings.cluster.colocate
    assert settings.megatron.tensor_model_parallel_size == 2
    assert dict(settings.engine.sglang_args) == {
        "mem-fraction-static": "0.8",
        "context-length": "8192",
        "log-level": "INFO",
    }
