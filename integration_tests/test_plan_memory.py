"""The memory that a plan says an engine takes is what a real one takes, on a CPU, within 15%."""

import dataclasses
import os

import psutil
import pytest
import torch
from tiny import make_tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from slime_convert.shape import ModelShape
from slime_launch.devices import find_device
from slime_launch.flags import parse_train
from slime_launch.plan.engines import engine_groups, engine_memory
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec, SGLangEngine
from slime_rollout.http import call

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def bytes_of(processes):
    """Memory of processes, files that they share counted once. Other engines map those too, so no Pss of them."""
    own, files = 0, {}
    for process in processes:
        for part in psutil.Process(process).memory_maps():
            if part.path.startswith("["):  # of no file
                own += part.pss
            else:
                own += part.anonymous
                files[part.path] = max(files.get(part.path, 0), part.rss - part.anonymous)
    return own + sum(files.values())


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_takes_what_the_plan_says(dtype, tmp_path):
    model = tmp_path / "model"
    make_tokenizer(model)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(getattr(torch, dtype)).save_pretrained(model)
    words = f"--hf-checkpoint {model} --load {model} --prompt-data p --num-rollout 1 --rollout-batch-size 4 --colocate"
    settings = parse_train(words.split())
    megatron = dataclasses.replace(settings.megatron, bf16=dtype == "bfloat16")
    settings = dataclasses.replace(settings, megatron=megatron)
    [group] = engine_groups(settings, None)
    planned = engine_memory(settings, ModelShape.from_hf_config(model), find_device("cpu", None), group).total
    config = EngineConfig(sglang_python=os.environ["SLIME_ENGINE_PYTHON"])
    spec = EngineSpec(model_path=str(model), dtype=dtype, context_length=2048)
    with SGLangEngine.start(config, spec, log_path=tmp_path / "engine.log") as engine:
        engine.wait_until_ready()
        prompt = {"input_ids": list(range(3, 300)), "sampling_params": {"max_new_tokens": 16}}
        call("POST", f"{engine.url}/generate", prompt, timeout=120)
        measured = bytes_of(engine.process_ids())
    print(f"{dtype}: planned {planned / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert planned == pytest.approx(measured, rel=0.15)
