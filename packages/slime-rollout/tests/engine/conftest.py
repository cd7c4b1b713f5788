"""One fleet of real engines for all tests here: two SGLang servers on the CPU behind sglang-router."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.fleet import EngineFleet
from slime_rollout.engine.server import ServerSpec, server_environment
from slime_rollout.supervise import reaper

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def engine_python():
    python = Path(os.environ.get("SLIME_ENGINE_PYTHON", REPOSITORY / ".venv-engine/bin/python"))
    if not python.exists():
        pytest.skip(f"no engine interpreter at {python}; set SLIME_ENGINE_PYTHON")
    return str(python)


@pytest.fixture(scope="session")
def engine_config(engine_python):
    return EngineConfig(engine_python=engine_python, engine_threads=1)


@pytest.fixture(scope="session")
def engine_environment(engine_config, tiny_model):
    return server_environment(engine_config, ServerSpec(model_path=tiny_model, port=1))


@pytest.fixture(scope="session")
def tiny_model(tokenizer_dir, tmp_path_factory):
    """A tiny random Qwen3 in fp32, with a tokenizer that was really trained."""
    directory = tmp_path_factory.mktemp("tiny")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(directory)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        eos_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    network = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    network.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def fleet(engine_config, tiny_model, tmp_path_factory):
    seen = []
    fleet = EngineFleet.start(
        engine_config,
        model_path=tiny_model,
        num_engines=2,
        dtype="float32",
        context_length=None,
        seed=1,
        log_dir=tmp_path_factory.mktemp("logs"),
        on_progress=lambda ready, total, seconds: seen.append((ready, total, seconds)),
    )
    print(f"two engines and the router were up after {fleet.startup_seconds:.1f} s")
    assert seen[-1][:2] == (3, 3)
    yield fleet
    processes = reaper.descendants(os.getpid())
    assert processes
    fleet.stop()
    left = {process.pid for process in reaper.descendants(os.getpid())} & {process.pid for process in processes}
    # Torch's helper for shared memory is this process's own, and ends with it.
    assert not [pid for pid in left if "torch_shm_manager" not in Path(f"/proc/{pid}/cmdline").read_text()]
