"""Tiny random models, made by transformers: the independent side of every comparison."""

import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slime_convert.torch_dist.parts import _ChecksummedStream

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
GLM = {"tie_word_embeddings": False, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_mtp_layers": 0,
    "tie_word_embeddings": False,
}
LATENT = {
    **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-scaled": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "glm": lambda: GlmConfig(**SIZES, **GLM, attention_bias=True),
    "glm4": lambda: Glm4Config(**SIZES, **GLM, attention_bias=True),
    "glm4-unbiased": lambda: Glm4Config(**SIZES, **GLM, attention_bias=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "glm4-moe": lambda: Glm4MoeConfig(**SIZES, **ROUTED, pad_token_id=0, attention_bias=True, use_qk_norm=True),
    "glm4-air": lambda: Glm4MoeConfig(**SIZES, **ROUTED, pad_token_id=0, attention_bias=True),
    "deepseek": lambda: DeepseekV3Config(
        **LATENT, **ROUTED, q_lora_rank=14, n_group=4, topk_group=2, rope_parameters=YARN
    ),
    "moonlight": lambda: DeepseekV3Config(**LATENT, **ROUTED, q_lora_rank=None, n_group=1, topk_group=1),
    "glm4-flash": lambda: Glm4MoeLiteConfig(**LATENT, **ROUTED, q_lora_rank=14, n_group=1, topk_group=1),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
}
# What only a bridge knows.
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
SHARED = {
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
BRIDGED_CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-tied": lambda: MixtralConfig(**WITHOUT_HEAD_DIM, num_local_experts=4, tie_word_embeddings=True),
    "qwen2-moe": lambda: Qwen2MoeConfig(**WITHOUT_HEAD_DIM, **SHARED),
    "qwen2-moe-normed": lambda: Qwen2MoeConfig(**WITHOUT_HEAD_DIM, **SHARED, norm_topk_prob=True, qkv_bias=False),
    # Becomes MiMo in the tests: transformers has no class for it.
    "qwen2-untied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make_origin(name, path, **changes):
    """A Hugging Face directory in several shards, with a stand-in for the tokenizer's files."""
    torch.manual_seed(0)
    config = (CONFIGS | BRIDGED_CONFIGS)[name]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def origin(request, tmp_path_factory):
    """Each of the models. Not to be changed."""
    return make_origin(request.param, tmp_path_factory.mktemp(request.param) / "origin")


@pytest.fixture(scope="session")
def origin_maker():
    """Makes one of the models in a directory: ``(name, path, **changes of its config)``."""
    return make_origin


@pytest.fixture(scope="session")
def one_origin(tmp_path_factory):
    """One of the models, where the family does not matter. Not to be changed."""
    return make_origin("qwen3-untied", tmp_path_factory.mktemp("one") / "origin")


@pytest.fixture(scope="session")
def make_model():
    """:func:`make_origin`."""
    return make_origin


@pytest.fixture
def origin_of(tmp_path):
    """Makes one of the models, to be changed."""
    return lambda name: make_origin(name, tmp_path / name)


@pytest.fixture
def with_prediction_module(origin_of):
    """DeepSeek's tiny model with the weights that transformers leaves out, under Kimi-K2's model type."""
    directory = origin_of("deepseek")
    (directory / "model.safetensors.index.json").unlink()
    weights = {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}
    last, further = "model.layers.2.", "model.layers.3."
    own = {name.replace(last, further): tensor + 1 for name, tensor in weights.items() if name.startswith(last)}
    norms = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    own |= {further + name: torch.randn(24).bfloat16() for name in norms}
    own[further + "eh_proj.weight"] = torch.randn(24, 48).bfloat16()
    own[further + "embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    own[further + "shared_head.head.weight"] = weights["lm_head.weight"]
    save_file({name: tensor.clone() for name, tensor in own.items()}, directory / "further.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "model_type": "kimi_k2"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


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


def _in_child(run):
    """Run a function in a forked process, which has torch imported already; how the process ended."""
    child = os.fork()
    if not child:
        try:
            run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def in_child():
    """:func:`_in_child`."""
    return _in_child


class Writes:
    """Counts the bytes of tensors that are written, and kills the process when there are too many.

    Args:
        limit: Bytes that can be written; the rest of the write in which they end is not.
    """

    def __init__(self, limit=float("inf")):
        self.done, self.limit = 0, limit

    def take(self, size):
        """How many of the next bytes can be written."""
        return min(size, self.limit - self.done)

    def count(self, size):
        self.done += size
        if self.done >= self.limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(self, monkeypatch):
        """Count what goes to safetensors and to ``.distcp`` files."""
        pwrite, write_all = os.pwrite, _ChecksummedStream._write_all

        def counted_pwrite(descriptor, data, offset):
            written = pwrite(descriptor, data[: self.take(len(data))], offset)
            self.count(written)
            return written

        def counted_write_all(stream, data):
            part = data[: self.take(len(data))]
            write_all(stream, part)
            self.count(len(part))

        monkeypatch.setattr(os, "pwrite", counted_pwrite)
        monkeypatch.setattr(_ChecksummedStream, "_write_all", counted_write_all)


@pytest.fixture(scope="session")
def bytes_written():
    """Runs a conversion and counts the bytes that it writes."""

    def run(convert):
        with pytest.MonkeyPatch.context() as patch:
            writes = Writes()
            writes.hook(patch)
            convert()
        return writes.done

    return run


@pytest.fixture
def killed_at(monkeypatch):
    """Runs a conversion in a process that kills itself when it has written some bytes."""

    def run(convert, limit):
        def limited():
            Writes(limit).hook(monkeypatch)
            convert()

        assert _in_child(limited) == -signal.SIGKILL

    return run


@pytest.fixture
def converted(origin, tmp_path):
    """The ``torch_dist`` checkpoint of ``origin``."""
    from slime_convert.convert import hf_to_torch_dist

    hf_to_torch_dist(origin, tmp_path / "converted")
    return tmp_path / "converted"


# What a real megatron-core model on two ranks writes: the model and the parallel sizes. An uneven first stage of two
# of three layers; two virtual stages of one layer on each rank.
LEGACY_RUNS = {
    "llama-tied": {"tp": 1},
    "qwen3-untied": {"tp": 2},
    "qwen3-tied": {"pp": 2, "first": 2},
    "llama3-scaled": {"pp": 2, "vpp": 2},
}


@pytest.fixture(scope="session")
def legacy_runs(tmp_path_factory):
    """Legacy checkpoints, by model: where they are (``save``) and the model they came from (``origin``).

    Not to be changed.
    """
    from slime_convert.convert import hf_to_torch_dist

    root, jobs = tmp_path_factory.mktemp("legacy"), {}
    for name, layout in LEGACY_RUNS.items():
        origin = make_origin(name, root / name / "origin", **({"num_hidden_layers": 4} if "vpp" in layout else {}))
        hf_to_torch_dist(origin, root / name / "torch_dist")
        paths = {"origin": origin, "torch_dist": root / name / "torch_dist" / "release", "save": root / name / "legacy"}
        jobs[name] = {key: str(path) for key, path in paths.items()} | layout
    program = Path(__file__).parent / "legacy" / "megatron_ranks.py"
    words = [str(root), json.dumps(list(jobs.values()))]
    ranks = [subprocess.Popen([sys.executable, program, str(rank), *words], stderr=subprocess.PIPE) for rank in (0, 1)]
    try:
        errors = [rank.communicate(timeout=150)[1].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(errors)
    return {name: SimpleNamespace(origin=Path(job["origin"]), save=Path(job["save"])) for name, job in jobs.items()}
