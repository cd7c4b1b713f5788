"""The memory that a plan says a trainer rank takes is what real ranks take, on a CPU, within 15%."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_launch.devices import find_device
from slime_launch.flags import parse_train
from slime_launch.plan.memory import trainer_memory
from slime_rollout.engine.addresses import free_port

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SAMPLES, LENGTH = 4, 512
# Settings, ranks, data-parallel replicas, samples of a micro-batch.
CASES = {
    "full recomputation": (FULL, 1, 1, 4),
    "fp32": ({}, 1, 1, 4),
    "bf16": ({"bf16": True}, 1, 1, 4),
    "tensor parallel": (SPLIT, 2, 1, 4),
    "pipeline parallel": ({"pipeline_model_parallel_size": 2}, 2, 1, 2),
    "distributed optimizer, bf16": ({"bf16": True, "use_distributed_optimizer": True}, 2, 2, 4),
    "LoRA": ({"lora_rank": 8, "lora_alpha": 8.0}, 1, 1, 4),
    "reward model": ({}, 1, 1, 4),
    "actor and critic": (FULL, 1, 1, 4),
}
ALGORITHMS = {"reward model": {"loss_type": "rm_loss"}, "actor and critic": {"advantage_estimator": "ppo"}}
CHEAP = "full recomputation"


def peaks(flags, algorithm, world, replicas, micro):
    port = free_port()
    given = {"model": MODEL, "flags": flags, "algorithm": algorithm}
    given |= {"world": world, "port": port, "replicas": replicas}
    given |= {"samples": SAMPLES, "length": LENGTH, "micro": micro}
    program = [sys.executable, str(Path(__file__).parents[1] / "support" / "measured_rank.py")]
    ranks = [
        subprocess.Popen([*program, json.dumps(given | {"rank": rank})], stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    try:
        answers = [rank.communicate(timeout=270)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [int(line.split()[1]) for answer in answers for line in answer.splitlines() if line.startswith("PEAK ")]


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == CHEAP else pytest.mark.full) for case in CASES]
)
def test_a_rank_takes_what_the_plan_says(case):
    flags, world, replicas, micro = CASES[case]
    words = [
        "--hf-checkpoint",
        "hf",
        "--load",
        "hf",
        "--prompt-data",
        "p",
        "--num-rollout",
        "1",
        "--rollout-batch-size",
        "4",
        "--rollout-num-gpus",
        "1",
    ]
    settings = parse_train([*words, "--actor-num-gpus-per-node", str(world)])
    algorithm = ALGORITHMS.get(case, {})
    settings = dataclasses.replace(
        settings,
        megatron=dataclasses.replace(settings.megatron, load=None, **flags),
        algorithm=AlgorithmConfig(**algorithm),
    )
    shape = ModelShape.from_hf_config(MODEL)
    planned = trainer_memory(
        settings,
        shape,
        find_device("cpu", None),
        tokens=micro * LENGTH,
        micro_batches=SAMPLES // micro,
        overrides={},
    )
    measured = max(peaks(flags, algorithm, world, replicas, micro))
    print(f"{case}: planned {planned.total / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert planned.total == pytest.approx(measured, rel=0.15)
