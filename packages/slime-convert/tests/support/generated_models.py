"""Generated models: any family, sizes, types, shards, ties, prediction modules, and weights that nobody asked for."""

import json

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from safetensors.torch import save_file

from slime_convert import ConvertError, ModelShape, WeightMap
from slime_convert.families import FAMILIES
from slime_convert.mapping import hf_copies
from support.family_models import CONFIGS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


NAMES = tuple(sorted(CONFIGS))


@st.composite
def configs(draw, names=NAMES):
    """A ``config.json``: one of the tiny models' with other sizes."""
    config = json.loads(CONFIGS[draw(st.sampled_from(names))]().to_json_string(use_diff=False))
    groups, layers = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 3))
    sizes = {
        "vocab_size": draw(st.integers(1, 40)),
        "hidden_size": 4 * draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if "kv_lora_rank" in config else groups,
        "head_dim": 4 * draw(st.integers(1, 3)),
        "moe_intermediate_size": draw(st.integers(1, 5)),
        "shared_expert_intermediate_size": draw(st.integers(1, 5)),
        "kv_lora_rank": draw(st.integers(1, 7)),
        "v_head_dim": draw(st.integers(1, 5)),
        "linear_key_head_dim": draw(st.integers(1, 5)),
        "linear_value_head_dim": draw(st.integers(1, 5)),
    }
    config |= {key: size for key, size in sizes.items() if config.get(key) is not None}
    config |= {key: value[:layers] for key, value in config.items() if isinstance(value, list) and key in _PER_LAYER}
    config["num_hidden_layers"] = layers
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = draw(st.integers(0, layers))
    if FAMILIES[config["model_type"]].mtp:
        config["num_nextn_predict_layers"] = draw(st.integers(0, 1 if config["model_type"] == "qwen3_next" else 2))
    tied = config | {"tie_word_embeddings": draw(st.booleans())}
    for given in (tied, config):
        try:
            ModelShape.from_hf_config(given)
        except ConvertError:
            continue
        return given
    assume(False)
    raise AssertionError


_PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")


@st.composite
def models(draw):
    """A config, and how its weights are made (:func:`write`)."""
    how = {
        "seed": draw(st.integers(0, 2**31)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "other_types": draw(st.sampled_from([0, 0, 0.2])),
        "copies": draw(st.booleans()),
        "files": draw(st.integers(1, 4)),
        "indexed": draw(st.booleans()),
        "tied_output": draw(st.sampled_from(["none", "same", "other"])),
        "extra": draw(
            st.sampled_from([None, None, "model.extra.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
        ),
    }
    return draw(configs()), how


def random_bits(rng, shape, dtype):
    """Any bits: NaN with payloads, infinities, denormals."""
    count = int(np.prod(shape)) * dtype.itemsize
    return (
        torch.frombuffer(bytearray(rng.bytes(count)) or bytearray(1), dtype=torch.uint8)[:count]
        .view(dtype)
        .reshape(shape)
    )


def write(directory, config, how):
    """Make the model's weights, write its directory, and return them."""
    rng = np.random.default_rng(how["seed"])
    weight_map = WeightMap(ModelShape.from_hf_config(config))
    types, weights = {}, {}
    for name in weight_map.megatron_names():
        parts = tuple(weight_map.hf_parts(name))
        other = rng.random() < how["other_types"]
        types.setdefault(parts, DTYPES[rng.integers(3)] if other else how["dtype"])
        for part in parts:
            if part.endswith("linear_attn.norm.weight"):  # Megatron has it less one, which these are exactly
                weights[part] = torch.from_numpy(rng.random(weight_map.hf_shape(part)) + 0.5).to(types[parts])
            elif part not in weights:
                weights[part] = random_bits(rng, weight_map.hf_shape(part), types[parts])
    if how["copies"]:
        weights |= {copy: weights[original].clone() for copy, original in hf_copies(weight_map.shape).items()}
    if not weight_map.shape.untie_embeddings_and_output_weights and how["tied_output"] != "none":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        if how["tied_output"] == "other":
            weights["lm_head.weight"].view(torch.uint8)[..., 0] ^= 1
    if how["extra"] is not None:
        weights[how["extra"]] = torch.ones(3)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(weights)
    rng.shuffle(names)
    files = {f"part-{number}.safetensors": names[number :: how["files"]] for number in range(how["files"])}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, directory / file)
    if how["indexed"]:
        places = {name: file for file, held in files.items() for name in held}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return weights
