"""The tiny model of ``check-model``: a small config of the same kind as a given one, random weights in transformers.

Notation: B rows, S positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from slime_convert.errors import CheckError, ConvertError
from slime_convert.families import FAMILIES
from slime_convert.families.config import HfConfig
from slime_convert.mapping import WeightMap, hf_copies
from slime_convert.shape import ModelShape

MOST_LAYERS = 12
"""Layers of a tiny model; enough for all kinds of layers to occur."""

_FEWEST_LAYERS = 3
_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern")
_MODULES = ("num_nextn_predict_layers", "num_mtp_layers")
# What every config in transformers has says nothing of a decoder; `num_labels` and others take any room and time.
_GENERAL = {*dir(PreTrainedConfig), "transformers_weights", "attn_implementation", "experts_implementation"}
_LEFT_OUT = {"quantization_config", "compression_config", "auto_map"} | _GENERAL - {"model_type", "rope_scaling"}

TOKENS_BS = torch.randint(101, (2, 24), generator=torch.Generator().manual_seed(7))
"""The tokens whose logits are computed."""

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""transformers' plain implementations."""

WEIGHTS, CONFIG = "model.safetensors", "config.json"
# Standard deviations with which logits are above 1, and rounding in float32 moves them by less than 1e-4. An embedding
# as large as what the layers add to it keeps them from magnifying each other's rounding.
_VECTOR_STD, _ZERO_CENTRED_STD, _MATRIX_STD, _ROUTER_BIAS_STD = 1.0, 0.5, 0.2, 0.3
# Kimi-K2 is DeepSeek V3 under another name, and MiMo's layers are Qwen2's.
_SAME_LAYERS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
_Weights = dict[str, torch.Tensor]


def tiny_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A config like the given one, of a model that fits into a megabyte.

    Sizes are odd and differ from one another, so that a mistaken one shows.

    Args:
        source: A model directory, a ``config.json``, or the config as a mapping.

    Raises:
        HfConfigError: The config cannot be read, or an entry is missing or of a wrong type.
        UnsupportedModelError: The model is not supported.
        CheckError: No tiny model has all that the model has.
    """
    config = HfConfig.read(source)
    shape = ModelShape.from_hf_config(source)
    tiny = _resized(config, shape)
    wanted = _kinds(shape)
    for layers in range(min(_FEWEST_LAYERS, shape.num_layers), min(MOST_LAYERS, shape.num_layers) + 1):
        cut = _with_layers(tiny, layers, shape)
        try:
            if _kinds(ModelShape.from_hf_config(cut)) == wanted:
                return cut
        except ConvertError as error:
            raise CheckError(f"no tiny model can be made of {config.where}: {error}") from error
    raise CheckError(
        f"the {len(wanted)} kinds of layers of {config.where} do not all occur in its first {MOST_LAYERS} layers; "
        "allowed: a model whose kinds of layers repeat sooner; check it with a config of fewer layers"
    )


def _kinds(shape: ModelShape) -> set[tuple[bool, bool, bool]]:
    """The kinds of layers: with experts, with linear attention, with a window."""
    slides = shape.window_attn_skip_freq or (int(shape.window_size is not None),) * shape.num_layers
    return {
        (shape.has_layer("experts", layer), shape.has_layer("linear", layer), bool(slides[layer]))
        for layer in range(shape.num_layers)
    }


def _resized(config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    known = {**FAMILIES[shape.family].defaults, **config.values}
    sizes = _sizes(shape) | _expert_sizes(shape)
    tiny = {key: value for key, value in config.values.items() if key not in _LEFT_OUT and key[:1] != "_"}
    tiny |= {key: size for key, size in sizes.items() if known.get(key)}
    # transformers takes ids of its classes' vocabularies where these are left out.
    tiny |= {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if shape.window_size is not None:
        tiny["sliding_window"] = 5
    if shape.multi_latent_attention:
        tiny.pop("head_dim", None)  # it follows from others
    return tiny


def _sizes(shape: ModelShape) -> dict[str, int]:
    ratio = min(shape.num_attention_heads // shape.num_query_groups, 3)
    groups = 2 if ratio > 1 else 3  # several, so that their order matters
    hidden, heads = 24, groups * ratio
    has_own_width = shape.kv_channels * shape.num_attention_heads != shape.hidden_size or shape.rotary_percent != 1
    linear_heads = shape.linear_num_value_heads or 0
    key_heads = min(shape.linear_num_key_heads or 1, 2)
    return {
        "hidden_size": hidden,
        "intermediate_size": 40,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": 16 if has_own_width else hidden // heads,
        "q_lora_rank": 14,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 14,
        "v_head_dim": 12,
        "index_topk": 7,
        "index_n_heads": 3,
        "index_head_dim": 32,
        "linear_conv_kernel_dim": min(shape.linear_conv_kernel_dim or 4, 4),
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * min(linear_heads // (shape.linear_num_key_heads or 1), 3),
    }


def _expert_sizes(shape: ModelShape) -> dict[str, int]:
    """Few experts, for which the router's rules still hold: twice as many for a token as groups are chosen."""
    experts, topk = 5, min(shape.moe_router_topk or 1, 2)
    sizes = {"moe_intermediate_size": 14, "shared_expert_intermediate_size": 18, "n_shared_experts": 2}
    groups, chosen = shape.moe_router_num_groups or 1, shape.moe_router_group_topk or 1
    if groups > 1:
        fewer = min(chosen, 2)
        experts, topk = 8, 2 * fewer
        sizes |= {"n_group": 4 if chosen < groups else fewer, "topk_group": fewer}
    if shape.moe_ffn_hidden_size and shape.moe_shared_expert_intermediate_size == shape.moe_ffn_hidden_size:
        sizes["n_shared_experts"] = 1
    sizes |= dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), experts)
    return sizes | {"num_experts_per_tok": topk}


def _with_layers(config: Mapping[str, Any], layers: int, shape: ModelShape) -> dict[str, Any]:
    """A config with fewer layers: the first ones, of dense ones before those with experts only one."""
    cut = dict(config) | {"num_hidden_layers": layers}
    for key in _PER_LAYER:
        if config.get(key) is not None:
            cut[key] = config[key][:layers]
    for key in _MODULES:
        if isinstance(config.get(key), int):
            cut[key] = min(config[key], 2)
    if config.get("mlp_only_layers"):
        cut["mlp_only_layers"] = [layer for layer in config["mlp_only_layers"] if layer < layers]
    has_experts = [shape.has_layer("experts", layer) for layer in range(shape.num_layers)]
    dense = min(has_experts.index(True), 1) if any(has_experts) else layers
    if config.get("first_k_dense_replace") is not None:
        cut["first_k_dense_replace"] = dense
    if config.get("mlp_layer_types") is not None:
        cut["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    return cut


@dataclass(frozen=True)
class TinyModel:
    """A random model of float32 weights, saved under the config that it was made of.

    ``model`` is the one in transformers, which leaves prediction modules out; ``map`` has its weights under both names.
    """

    directory: Path
    map: WeightMap
    model: Any

    def logits(self) -> torch.Tensor:
        """Logits of the model, B × S × V."""
        with torch.no_grad():
            logits_BSV: torch.Tensor = self.model(TOKENS_BS, use_cache=False).logits
        return logits_BSV

    def loaded_from(self, directory: Path) -> TinyModel:
        """The same model with the weights of another directory."""
        model = type(self.model).from_pretrained(directory, config=config_of(directory), dtype=torch.float32, **EAGER)
        return TinyModel(directory, self.map, model)

    def save_bfloat16(self, directory: Path) -> None:
        """Save it in bfloat16, but a router's bias, which models keep in float32."""
        weights = load_file(self.directory / WEIGHTS)
        weights |= {name: t.bfloat16() for name, t in weights.items() if not name.endswith("e_score_correction_bias")}
        save(weights, json.loads((self.directory / CONFIG).read_text()), directory)


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings and progress bars of transformers, and random numbers as they were."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def build(config: Mapping[str, Any], directory: Path) -> TinyModel:
    """Make a random model of a ``config.json``, in a new directory; a :class:`CheckError` if transformers cannot."""
    generator = torch.Generator().manual_seed(0)
    save({}, config, directory)
    try:
        model = _random_model(config_of(directory), generator)
        model.save_pretrained(directory)
    except (OSError, SafetensorError):  # a full disk
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckError(
            f"transformers cannot build a tiny {config['model_type']} model ({reason}); use the model's original config"
        ) from error
    weight_map = WeightMap(ModelShape.from_hf_config(config))
    weights = load_file(directory / WEIGHTS)  # under the names that files have: transformers has others in memory
    for name in weight_map.module_names():
        size = weight_map.hf_shape(name)
        weights[name] = torch.randn(size, generator=generator) * (_MATRIX_STD if len(size) > 1 else _ZERO_CENTRED_STD)
    weights |= {name: weights[original].clone() for name, original in hf_copies(weight_map.shape).items()}
    save(weights, config, directory)
    return TinyModel(directory, weight_map, model)


def save(weights: _Weights, config: Mapping[str, Any], directory: Path) -> None:
    """Write a model directory."""
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config))  # written: a private folder


def config_of(directory: Path) -> Any:
    """The config of a directory in transformers."""
    values = json.loads((directory / CONFIG).read_text())
    model_type = values.pop("model_type")
    return AutoConfig.for_model(_SAME_LAYERS.get(model_type, model_type), **values)


def _random_model(config: Any, generator: torch.Generator) -> Any:
    """A model in which every weight matters: a norm's is not one, a bias not zero."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(std=_std(name, parameter), generator=generator)
            if name.endswith("linear_attn.norm.weight"):
                parameter.abs_().add_(0.5)  # Megatron has it less one, which is exact from 0.5 on
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=_ROUTER_BIAS_STD, generator=generator)
    return model


def _std(name: str, parameter: torch.Tensor) -> float:
    if name.endswith("norm.weight") and not parameter.any():  # it multiplies by one more than its weight
        return _ZERO_CENTRED_STD
    is_vector = parameter.dim() == 1 or name.endswith(("bias", "embed_tokens.weight"))
    return _VECTOR_STD if is_vector else _MATRIX_STD
