"""Tiny random models, made by transformers: the independent side of every comparison."""

import resource
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

# 101 rows need padding; the head's width is not hidden size / heads; three query heads share a key-value head.
SIZES = {
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-scaled": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_origin(name, path):
    """A Hugging Face directory in several shards, with a stand-in for the tokenizer's files."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def origin(request, tmp_path_factory):
    """Each of the models. Not to be changed."""
    return make_origin(request.param, tmp_path_factory.mktemp(request.param) / "origin")


@pytest.fixture(scope="session")
def one_origin(tmp_path_factory):
    """One of the models, where the family does not matter. Not to be changed."""
    return make_origin("qwen3-untied", tmp_path_factory.mktemp("one") / "origin")


@pytest.fixture
def full_disk():
    """A stand-in for a full disk: within it no file grows beyond some bytes."""

    @contextmanager
    def limit(nbytes):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def converted(origin, tmp_path):
    """The ``torch_dist`` checkpoint of ``origin``."""
    from slime_convert.convert import hf_to_torch_dist

    hf_to_torch_dist(origin, tmp_path / "converted")
    return tmp_path / "converted"
