"""The prediction modules of a tiny model in transformers' layers; transformers itself leaves them out.

DeepSeek V3's report (arXiv:2412.19437, section 2.2) has the formula. Notation: B rows, S positions, D hidden size,
V vocabulary, K the model and its modules.
"""

import copy
import json

import torch
from safetensors.torch import load_file

from slime_convert.check.tiny import CONFIG, EAGER, TOKENS_BS, WEIGHTS, config_of, save
from slime_convert.families import FAMILIES

# The parts of a module besides its layer, by how their names end: norms of the next token's embedding and of the state
# before, the projection of both, the last norm.
PARTS = {
    "embedding": ("enorm", "token_layernorm", "pre_fc_norm_embedding"),
    "state": ("hnorm", "hidden_layernorm", "pre_fc_norm_hidden"),
    "projection": ("eh_proj", "input_proj", "mtp.fc"),
    "last": ("shared_head.norm", "final_layernorm", "mtp.norm"),
}


def all_logits(tiny):
    """K × B × S × V of the model, then of its modules. What follows the last token is token 0."""
    use_config_epsilon(tiny.model)
    tokens_BS, model = TOKENS_BS, tiny.model
    with torch.no_grad():
        states = [model.model(tokens_BS, use_cache=False)[0]]
        for number in range(tiny.map.shape.mtp_num_layers):
            tokens_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1))
            states.append(module_state(tiny, number, model.model.embed_tokens(tokens_BS), states[-1]))
        logits = [model.lm_head(state_BSD) for state_BSD in states]
    assert all(logits_BSV.abs().max() > 1 for logits_BSV in logits)  # near zero they would prove nothing
    return torch.stack(logits)


def module_state(tiny, number, embedding_BSD, state_BSD):
    """The state, B × S × D, that a module hands on."""
    weights, shape = load_file(tiny.directory / WEIGHTS), tiny.map.shape
    prefix = FAMILIES[shape.family].mtp_layer
    prefix = prefix.replace("{i}", str(shape.num_layers + number)).replace("{m}", str(number))
    names = part_names(tiny.map, number)
    layer = {
        name.replace(prefix, "model.layers.0.", 1): weights[name]
        for name in tiny.map.module_names()
        if name.startswith(prefix) and name not in names.values()
    }
    inner = layer | {"model.norm.weight": weights[names["last"]]}
    inner |= {name: weights[name] for name in ("model.embed_tokens.weight", "lm_head.weight") if name in weights}
    config = one_layer(tiny)
    directory = tiny.directory.with_suffix(f".module{number}")
    save(inner, json.loads((tiny.directory / CONFIG).read_text()), directory)
    module = type(tiny.model).from_pretrained(directory, config=config, dtype=torch.float32, **EAGER)
    use_config_epsilon(module)

    def normed(part, x_BSD):
        norm = copy.deepcopy(module.model.norm)
        norm.weight.data = weights[names[part]]
        return norm(x_BSD)

    joined = [normed("embedding", embedding_BSD), normed("state", state_BSD)]
    if "input_proj" in names["projection"]:  # MiMo joins (state, embedding), the others (embedding, state)
        joined.reverse()
    projected = torch.cat(joined, dim=-1) @ weights[names["projection"]].T
    return module.model(inputs_embeds=projected, use_cache=False)[0]


def part_names(weight_map, number):
    """The names of a module's weights besides those of its layer, by part."""
    names = {}
    for name in weight_map.module_names():
        (megatron, *_) = weight_map.megatron_parts(name)
        if megatron.startswith(f"mtp.layers.{number}.") and "transformer_layer" not in megatron:
            stem = name.removesuffix(".weight")
            names[next(part for part, endings in PARTS.items() if stem.endswith(endings))] = name
    assert names.keys() == PARTS.keys()
    return names


def one_layer(tiny):
    """The config of a model of one layer, the kind that is inside a prediction module."""
    config, shape = config_of(tiny.directory), tiny.map.shape
    config.num_hidden_layers = 1
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if kinds := getattr(config, key, None):
            is_full = key == "layer_types" and {"full_attention", "linear_attention"} & set(kinds)
            setattr(config, key, ["full_attention" if is_full else kinds[-1]])
    if shape.has_layer("experts", shape.num_layers) and hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    return config


def use_config_epsilon(model):
    """Give the norms of latents the config's epsilon, as inference engines and Megatron do.

    transformers has 1e-6, whatever ``rms_norm_eps`` says.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
