"""Commands are planned with stand-ins of what they name, and mistakes in them are still found."""

from __future__ import annotations

from pathlib import Path

import pytest
from stand_ins import model_config, plan_words

COMMAND = """slime-launch train --hf-checkpoint Qwen/Qwen3-4B --load Qwen/Qwen3-4B --save runs/a --colocate
--actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2 --num-rollout 10
--prompt-data data/train.jsonl --input-key question --label-key answer --rm-type math --rollout-batch-size 32
--n-samples-per-prompt 8 --rollout-max-response-len 1024 --use-dynamic-batch-size --max-tokens-per-gpu 4096
--eval-prompt-data held data/held.parquet --apply-chat-template"""


def test_a_command_is_planned_with_the_real_shape(tmp_path: Path) -> None:
    planned = plan_words(COMMAND.split(), tmp_path)
    assert planned.problems == []
    assert planned.plan is not None and planned.plan.model is not None
    assert planned.plan.model["parameters"] == 4_022_468_096
    assert "models--Qwen--Qwen3-4B" in planned.plan.checkpoints["policy"] and not (tmp_path / "Qwen").exists()
    assert planned.plan.rows == {"data/train.jsonl": 1024, "data/held.parquet": 1024}


def test_names_on_the_hub_of_two_models_are_found(tmp_path: Path) -> None:
    planned = plan_words([*COMMAND.split(), "--hf-checkpoint", "Qwen/Qwen3-4B-FP8"], tmp_path)
    assert planned.problems == []
    assert planned.plan is not None and "models--Qwen--Qwen3-4B/" in planned.plan.checkpoints["policy"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--no-such-flag 3", "--no-such-flag"),
        ("--tensor-model-parallel-size 3", "3"),
        ("--prompt-data examples/nothing.jsonl", "examples/nothing.jsonl is not in the repository"),
        ("--hf-checkpoint models/Unknown-9B", "models/Unknown-9B names no model"),
        ("--config examples/nothing.toml", "examples/nothing.toml does not exist"),
        ("--custom-rm-path examples/nothing.py", "examples/nothing.py"),
        ("--actor-num-gpus-per-node 2 --max-tokens-per-gpu 400000", "a trainer rank takes"),
    ],
)
def test_a_mistake_is_a_problem(words: str, problem: str, tmp_path: Path) -> None:
    problems = plan_words([*COMMAND.split(), *words.split()], tmp_path).problems
    assert any(problem in line for line in problems), problems


@pytest.mark.parametrize(
    ("path", "layers"),
    [
        ("/shared/models/GLM-4.5_torch_dist", 92),
        ("Qwen/Qwen3-30B-A3B-FP8", 48),
        ("outputs/quickstart/model/hf", 30),
        ("models/DeepSeek-R1-bf16", 61),
    ],
)
def test_a_path_names_its_model(path: str, layers: int) -> None:
    config = model_config(path)
    assert config is not None
    assert config["num_hidden_layers"] == layers


def test_flags_of_the_shape_name_a_model(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "scripts" / "models" / "qwen3-4B.sh"
    flags = [word for line in script.read_text().splitlines() if line.startswith("    --") for word in line.split()]
    assert plan_words([*COMMAND.replace("Qwen/Qwen3-4B", "MODEL").split(), *flags], tmp_path).problems == []


@pytest.mark.parametrize("words", ["eval", "sft --rollout-max-context-len 4096 --input-key messages", "train-async"])
def test_every_command_of_the_launcher(words: str, tmp_path: Path) -> None:
    command, *more = words.split()
    colocate = [] if command != "train-async" else ["--rollout-num-gpus", "8"]
    given = [word for word in COMMAND.split()[2:] if word != "--colocate" or command != "train-async"]
    if command == "sft":
        given = [*given[: given.index("--eval-prompt-data")], "--global-batch-size", "32"]
        of_responses = ("--n-samples-per-prompt", "--rm-type", "--rollout-num-gpus-per-engine", "--label-key")
        for flag in of_responses:
            del given[given.index(flag) : given.index(flag) + 2]
    assert plan_words(["slime-launch", command, *given, *colocate, *more], tmp_path).problems == []


def test_a_cluster_command_with_absolute_paths_and_another_device(tmp_path: Path) -> None:
    words = "slime-launch plan --device h200 --gpus-per-node=4 --config examples/cluster/run.toml --json"
    planned = plan_words(words.split(), tmp_path)
    assert planned.plan is not None
    assert (planned.plan.device.name, planned.plan.gpus_per_node) == ("h200", 4)
    assert planned.plan.checkpoints["policy"].endswith("/shared/Qwen3-4B_torch_dist/release")
    assert planned.problems == []
