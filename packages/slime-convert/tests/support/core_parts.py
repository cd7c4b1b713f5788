"""Megatron's process of ``check-model``, with small parts for what stock megatron-core 0.16.1 lacks on a CPU.

With them every family can be compared in a whole forward pass. Notation: S positions, B rows, D channels.
"""

import copy
import sys

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.ssm import gated_delta_net as gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from slime_convert.check import megatron

STOCK_LLAMA3 = (1.0, 4.0, 8192)
stock_build, stock_spec = megatron.build, megatron.layer_spec
stock_module_spec = gpt_layer_specs.get_gpt_mtp_block_spec


def build(shape, padded_vocab_size):
    megatron.FOR_A_CPU |= {
        "deterministic_mode": shape.linear_attention_freq is not None,
        "dsa_indexer_loss_coeff": 0.0,
    }
    full = []  # a layer as core makes it: a module has full attention, whatever the model's layers have

    def layer_spec(config):
        spec = stock_spec(config)
        full.append(spec.layer_specs[-1])
        return change_spec(spec, shape)

    def module_spec(config, _, **named):
        return stock_module_spec(config, full[-1], **named)

    megatron.layer_spec = layer_spec
    # Core's own is asked for by name when a model is built, so it is put there before, and put back for the next one.
    gpt_layer_specs.get_gpt_mtp_block_spec = module_spec if shape.linear_attention_freq else stock_module_spec
    return change_model(stock_build(shape, padded_vocab_size), shape)


def change_spec(spec, shape):
    """Put parts into the spec of a model's layers."""
    if shape.multi_latent_attention:
        sparse = shape.experimental_attention_variant == "dsa"
        for layer in spec.layer_specs:
            part = sparse_attention() if sparse else LatentAttention
            layer.submodules.self_attention.submodules.core_attention = part
        if sparse:
            dsa.rotate_activation = hadamard
    if shape.linear_attention_freq:
        gdn.HAVE_FLA, gdn.l2norm = True, l2_norm
        for number, is_linear in enumerate(shape.linear_attention_freq):
            if is_linear:
                spec.layer_specs[number] = linear_attention_layer(spec.layer_specs[number])
    return spec


def change_model(model, shape):
    """Put parts into a model."""
    if shape.post_self_attn_layernorm:
        for layer in model.decoder.layers:
            add_norm(layer, "post_self_attn_layernorm", layer.self_attention, shape)
            add_norm(layer, "post_mlp_layernorm", layer.mlp, shape)
    if shape.layernorm_zero_centered_gamma:
        for module in model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.__class__ = ZeroCentredNorm
    if shape.scale_embeddings:
        model.embedding.register_forward_hook(lambda _module, _given, output: output * shape.hidden_size**0.5)
    if shape.rotary_base_local is not None:
        use_local_base(model, shape)
    llama3 = (shape.rope_low_freq_factor, shape.rope_high_freq_factor, shape.rope_original_max_position_embeddings)
    if shape.use_rope_scaling and llama3 != STOCK_LLAMA3:
        rotary = rotary_embedding(shape, shape.rotary_base)
        model.rotary_pos_emb.inv_freq = rotary._apply_scaling(rotary.inv_freq, shape.rope_scaling_factor, *llama3)
    return model


class ZeroCentredNorm(torch.nn.RMSNorm):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


class LatentAttention(DotProductAttention):
    """Core attention that is given the width of values; core's own takes it to be ``kv_channels``."""

    def __init__(self, *args, k_channels=0, v_channels=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class WholeLinear(torch.nn.Linear):
    """A linear layer that is whole on every rank; local layers have none."""

    def __init__(self, inputs, outputs, **_):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return super().forward(x), None


class KeyNorm(torch.nn.LayerNorm):
    """The indexer's norm, with the epsilon that its models fix."""

    def __init__(self, hidden_size, **_):
        super().__init__(hidden_size, eps=1e-6)


def sparse_attention():
    linear = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), WholeLinear)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(**linear, k_norm=KeyNorm))
    return ModuleSpec(module=dsa.DSAttention, submodules=dsa.DSAttentionSubmodules(indexer=indexer))


def hadamard(x):
    """Core's ``rotate_activation``, which wants bfloat16 and a CUDA package."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix * x.shape[-1] ** -0.5


def l2_norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def linear_attention_layer(layer):
    layer = copy.deepcopy(layer)
    parts = {"in_proj": ColumnParallelLinear, "out_norm": WrappedTorchNorm, "out_proj": RowParallelLinear}
    attention = ModuleSpec(module=gdn.GatedDeltaNet, submodules=gdn.GatedDeltaNetSubmodules(**parts))
    layer.submodules.self_attention = attention
    layer.submodules.sharded_state_dict_keys_map["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    return layer


def add_norm(layer, name, behind, shape):
    norm = torch.nn.RMSNorm(shape.hidden_size, eps=shape.norm_epsilon)
    setattr(layer, name, norm)
    behind.register_forward_hook(lambda _module, _given, output: (norm(output[0]), output[1]))


def rotary_embedding(shape, base):
    return RotaryEmbedding(shape.kv_channels, shape.rotary_percent, rotary_base=base, use_cpu_initialization=True)


def use_local_base(model, shape):
    rotary = rotary_embedding(shape, shape.rotary_base_local)

    def with_local_base(_module, given, named):
        (hidden_SBD, *_) = given
        return given, named | {"rotary_pos_emb": rotary(len(hidden_SBD))}

    slides = shape.window_attn_skip_freq or (1,) * shape.num_layers
    for layer, has_window in zip(model.decoder.layers, slides, strict=True):
        if has_window:
            layer.self_attention.register_forward_pre_hook(with_local_base, with_kwargs=True)


if __name__ == "__main__":
    megatron.build = build
    for name in ("TELinear", "TEColumnParallelLinear"):  # core asks whether the layers are these
        setattr(multi_latent_attention, name, type(name, (), {}))
    megatron.main(*sys.argv[1:])
