"""A command line that passes every check that can be made without torch, to be broken in one place by each test."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

HF_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 499,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


WORDS = json.dumps(
    {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate([*map(str, range(10)), *"+=?"])},
            "unk_token": "?",
        },
    }
)
"""A tokenizer whose tokens are words."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Prompts, a Hugging Face directory and a checkpoint, as far as the checks before a run look at them."""
    rows = [{"prompt": f"{i} + 1 =", "label": str(i + 1)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(HF_CONFIG))
    (hf / "tokenizer.json").write_text(WORDS)
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    (hf / "model.safetensors").write_bytes(b"")
    checkpoint = tmp_path / "dist" / "release"
    checkpoint.mkdir(parents=True)
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("release")
    (checkpoint / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    torch.save({"args": {}}, checkpoint / "common.pt")
    return tmp_path


@pytest.fixture
def tokenizer(workspace: Path) -> None:
    """A tokenizer in the workspace's model, whose tokens are words, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate([*map(str, range(10)), *"+=?", "user", "assistant"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(workspace / "hf" / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (workspace / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))


SERVER_ARGS = """
import argparse
class ServerArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model-path")
        parser.add_argument("--mem-fraction-static", type=float, help="part of memory")
        parser.add_argument("--sleep-on-idle", action="store_true")
        parser.add_argument("--enable-memory-saver", action="store_true")
        parser.add_argument("--lora-strict-loading", action=argparse.BooleanOptionalAction)
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--log-level", default="info")
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
"""


@pytest.fixture(scope="session")
def site_with_sglang(tmp_path_factory):
    """An SGLang as far as a launcher looks at it: a package with a parser of its flags, and a cache of what it says."""
    root = tmp_path_factory.mktemp("site")
    (root / "sglang" / "srt").mkdir(parents=True)
    (root / "sglang" / "__init__.py").write_text("")
    (root / "sglang" / "srt" / "server_args.py").write_text(SERVER_ARGS)
    return root


@pytest.fixture(autouse=True)
def installed_sglang(site_with_sglang, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(site_with_sglang), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(site_with_sglang / "cache"))


@pytest.fixture
def flags(workspace: Path) -> dict[str, str | None]:
    """The flags of a good command; a switch has the value ``None``."""
    return {
        "--hf-checkpoint": str(workspace / "hf"),
        "--load": str(workspace / "dist"),
        "--save": str(workspace / "save"),
        "--output-dir": str(workspace / "out"),
        "--prompt-data": str(workspace / "train.jsonl"),
        "--rollout-batch-size": "4",
        "--n-samples-per-prompt": "2",
        "--global-batch-size": "8",
        "--num-rollout": "2",
        "--colocate": None,
    }


def words(flags: dict[str, str | None]) -> list[str]:
    return [word for name, value in flags.items() for word in ([name] if value is None else [name, value])]


@pytest.fixture
def to_words():
    return words


@pytest.fixture(scope="module")
def group(request):
    """A placement group of a Ray with two trainer ranks and an engine, which has the classes of the test's file."""
    from slime_launch.calls import Watch
    from slime_launch.config import ClusterConfig
    from slime_launch.placement import plan_layout, reserve
    from slime_launch.ray_runtime import ray_runtime

    cluster = ClusterConfig(actor_num_gpus_per_node=2, rollout_num_gpus=1)
    with ray_runtime(cluster, address=None) as runtime:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])  # which no worker can import
        yield reserve(plan_layout(cluster, cuda=runtime.cuda), timeout=60, watch=Watch())
