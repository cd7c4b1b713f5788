"""Operations of a model: counted from its shape, and by torch while transformers computes."""

import copy
import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from slime_convert.shape import ModelShape
from slime_core.flops import FlopsModel
from slime_megatron.settings.operations import flops_model

SHAPE = ModelShape(
    family="qwen3", num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2,
    kv_channels=32, vocab_size=50, max_position_embeddings=4096,
)  # fmt: skip
TOKENS = 11


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "glm4-moe", "deepseek", "moonlight"])
@torch.no_grad()
def test_torch_counts_the_same(tiny_model, name):
    model = tiny_model(name)
    hf = copy.deepcopy(model.hf)
    hf.set_attn_implementation("eager")  # every token with every other, hidden or not
    hf.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        hf(torch.arange(TOKENS)[None])
    rotary = sum(sum(ops.values()) for path, ops in counter.get_flop_counts().items() if path.endswith("rotary_emb"))
    counted = counter.get_total_flops() - rotary
    assert flops_model(model.shape).packed(tokens=TOKENS, pairs=TOKENS**2, logits=TOKENS) == counted


def test_layers_of_two_kinds():
    expected = FlopsModel(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, num_query_groups=2, head_dim=32,
        vocab_size=50,
    )  # fmt: skip
    assert flops_model(SHAPE).training(7) == expected.training(7)
    assert flops_model(dataclasses.replace(SHAPE, kv_channels=16)).training(7) < expected.training(7)
    experts = {"family": "qwen3_moe", "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
    routed = dataclasses.replace(expected, further_weights=2 * 64 * 4)
    assert flops_model(dataclasses.replace(SHAPE, **experts)).training(7) == routed.training(7)
    one_dense = dataclasses.replace(SHAPE, **experts, moe_layer_freq=(0, 1), moe_shared_expert_intermediate_size=49)
    both = dataclasses.replace(expected, ffn_hidden_size=120, further_weights=64 * (3 + 4))
    assert flops_model(one_dense).training(7) == both.training(7)
