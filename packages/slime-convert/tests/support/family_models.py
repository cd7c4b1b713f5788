"""Tiny random models of every family, made by transformers: the independent side of the comparisons."""

import json
import re
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from slime_convert import ModelShape, WeightMap
from slime_convert.files.reading import TensorReader
from slime_convert.formats.gguf import name_in_gguf
from slime_convert.mapping import hf_copies

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
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
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
}
INDEXER = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 4}
WITHOUT_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama3-scaled": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=64),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "mixtral-tied": lambda: MixtralConfig(**WITHOUT_HEAD_DIM, num_local_experts=4, tie_word_embeddings=True),
    "qwen2-tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-untied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen2-moe": lambda: Qwen2MoeConfig(**WITHOUT_HEAD_DIM, **SHARED, mlp_only_layers=[1]),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "qwen3-next": lambda: Qwen3NextConfig(**SIZES | {"num_hidden_layers": 5}, **SHARED, **LINEAR),
    "glm": lambda: GlmConfig(**SIZES, **GLM, attention_bias=True),
    "glm4": lambda: Glm4Config(**SIZES, **GLM, attention_bias=True),
    "glm4-unbiased": lambda: Glm4Config(**SIZES, **GLM, attention_bias=False),
    "glm4-moe": lambda: Glm4MoeConfig(**SIZES, **ROUTED, pad_token_id=0, attention_bias=True, use_qk_norm=True),
    "glm4-air": lambda: Glm4MoeConfig(**SIZES, **ROUTED, pad_token_id=0, attention_bias=True),
    "glm4-flash": lambda: Glm4MoeLiteConfig(**LATENT, **ROUTED, q_lora_rank=14, n_group=1, topk_group=1),
    "deepseek": lambda: DeepseekV3Config(
        **LATENT, **ROUTED, q_lora_rank=14, n_group=4, topk_group=2, rope_parameters=YARN
    ),
    "moonlight": lambda: DeepseekV3Config(**LATENT, **ROUTED, q_lora_rank=None, n_group=1, topk_group=1),
    "deepseek-v32": lambda: DeepseekV32Config(
        **LATENT, **ROUTED, **INDEXER, q_lora_rank=14, n_group=4, topk_group=2, rope_parameters=YARN
    ),
    "glm5": lambda: GlmMoeDsaConfig(
        **LATENT, **ROUTED, **INDEXER, q_lora_rank=14, n_group=1, topk_group=1, pad_token_id=0
    ),
    "gpt-oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "gemma3": lambda: Gemma3TextConfig(**SIZES | {"num_hidden_layers": 7}, sliding_window=16),
}


def make_model(name, path, dtype=torch.bfloat16, **changes):
    """A Hugging Face directory in several files, with a stand-in for the tokenizer's files."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.save_pretrained(path, max_shard_size="20KB")
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def add_prediction_module(directory, *, copies=True, model_type=None):
    """The weights of a prediction module, which transformers leaves out, in a file of their own."""
    change_config(directory, num_nextn_predict_layers=1, **({"model_type": model_type} if model_type else {}))
    weights, weight_map = weights_of(directory), WeightMap(ModelShape.from_hf_config(directory))
    own = {name: torch.randn(weight_map.hf_shape(name)).bfloat16() for name in weight_map.module_names()}
    if copies:
        own |= {copy: weights[original].clone() for copy, original in hf_copies(weight_map.shape).items()}
    save_file(own, directory / "module.safetensors")
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    return directory


def weights_of(directory):
    """The weights in a directory, read by the safetensors library."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def read(weights, name):
    """One weight of an opened checkpoint, by slime-convert's own reader."""
    with TensorReader() as reader:
        tensor = reader.load(weights.tensor(name))
        reader.finish()
    return tensor


def change_config(directory, **changes):
    """Replace entries of ``config.json``; ``...`` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def write_model(directory, weights, config):
    """A Hugging Face directory in one file."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    text = config.read_text() if isinstance(config, Path) else json.dumps(config)
    (directory / "config.json").write_text(text)
    return directory


def write_adapter(origin, path):
    """A LoRA adapter of two kinds of projections, for a model."""
    path.mkdir()
    (path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]})
    )
    weights, factors = weights_of(origin), {}
    for name, tensor in weights.items():
        if name.split(".")[-2] in ("q_proj", "down_proj"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{stem}.lora_A.weight"] = torch.randn(2, tensor.shape[1])
            factors[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], 2)
    save_file(factors, path / "adapter_model.safetensors")


def write_gguf(origin, path):
    """A tiny Qwen3 model as a GGUF file, without a tokenizer."""
    config = json.loads((origin / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for name, tensor in weights_of(origin).items():
        writer.add_tensor(name_in_gguf(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_bits(ours, theirs):
    """Whether two tensors have the same type, shape and bytes."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    # Not `contiguous`, which leaves a single element its stride.
    plain = (side.clone(memory_format=torch.contiguous_format) for side in (ours, theirs))
    return not ours.numel() or torch.equal(*(side.reshape(-1).view(torch.uint8) for side in plain))


def assert_same_weights(ours, theirs):
    """Two directories, or dicts of tensors, hold the same weights bit by bit."""
    ours, theirs = (weights_of(side) if isinstance(side, Path) else side for side in (ours, theirs))
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    assert not [name for name, tensor in theirs.items() if not same_bits(ours[name], tensor)]


def tree(root):
    """All that lies below a directory: kind, mode and content of each entry by path."""
    found = {}
    for path in sorted(root.rglob("*")):
        state = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        target = str(path.readlink()) if path.is_symlink() else None
        found[str(path.relative_to(root))] = (oct(state.st_mode), target or content)
    return found


def without_progress(text):
    """What a command said on stderr but for the lines about its progress, which there are where it takes long."""
    return re.sub(r"(?m)^ *\d+ %, .* of .*\n", "", text)


def contents(root):
    """Bytes of each file below a directory, but for the list of files that every output has."""
    return {name: data for name, (_, data) in tree(root).items() if data is not None and name != ".slime-convert.json"}
