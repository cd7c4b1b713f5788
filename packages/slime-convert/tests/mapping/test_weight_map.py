"""Notation: H hidden size, E channels per head, G groups, Q query heads per group."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from slime_convert import ModelShape
from slime_convert.errors import WeightError
from slime_convert.mapping import WeightMap
from slime_convert.mapping.families import TABLES
from slime_convert.shape import FAMILIES


@st.composite
def shapes(draw):
    groups = draw(st.sampled_from([1, 2, 4]))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    extra = {}
    if FAMILIES[family].experts:
        extra |= {"num_experts": 3, "moe_ffn_hidden_size": 4, "moe_router_topk": 2}
    if FAMILIES[family].sigmoid_router:
        extra |= {"num_dense_layers": draw(st.integers(0, 1)), "mtp_num_layers": draw(st.integers(0, 2))}
        extra["moe_shared_expert_intermediate_size"] = draw(st.sampled_from([None, 8]))
    if FAMILIES[family].latent_attention:
        extra |= {"multi_latent_attention": True, "q_lora_rank": draw(st.sampled_from([None, 3])), "kv_lora_rank": 5}
        extra |= {"qk_head_dim": 3, "qk_pos_emb_head_dim": 2, "v_head_dim": 4}
    return ModelShape(
        family=family,
        num_layers=draw(st.integers(1, 3)),
        hidden_size=4 * draw(st.integers(1, 2)),
        ffn_hidden_size=4 * draw(st.integers(1, 3)),
        num_attention_heads=groups * draw(st.integers(1, 3)),
        num_query_groups=groups,
        kv_channels=2 * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 20)),
        max_position_embeddings=8,
        add_qkv_bias=draw(st.booleans()),
        untie_embeddings_and_output_weights=draw(st.booleans()),
        **extra,
    )


def random_weights(weight_map, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight_map.megatron_shape(name), generator=generator) for name in weight_map.megatron_names()
    }


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(0, 2**31))
def test_to_hf_and_back_is_the_identity(shape, seed):
    weight_map = WeightMap(shape)
    weights = random_weights(weight_map, seed)
    hf = dict(pair for name, tensor in weights.items() for pair in weight_map.to_hf(name, tensor))
    assert list(hf) == list(weight_map.hf_names())
    hf_size = sum(tensor.numel() for name, tensor in hf.items() if name not in weight_map.hf_copies())
    assert hf_size == sum(tensor.numel() for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(weight_map.from_hf(name, hf.__getitem__), tensor)


@settings(max_examples=40, deadline=None)
@given(shapes(), st.integers(0, 60), st.integers(0, 2**31))
def test_padding_is_zero_and_trimmed_again(shape, extra, seed):
    padded = WeightMap(shape, shape.vocab_size + extra)
    plain = random_weights(WeightMap(shape), seed)["embedding.word_embeddings.weight"]
    whole = padded.from_hf("embedding.word_embeddings.weight", lambda _: plain)
    assert whole.shape == padded.megatron_shape("embedding.word_embeddings.weight")
    assert not whole[shape.vocab_size :].any()
    ((name, back), *_) = WeightMap(shape).to_hf("embedding.word_embeddings.weight", whole)
    assert name == "model.embed_tokens.weight" and torch.equal(back, plain)


BY_HEADS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
)


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_merging_the_shards_of_tensor_parallel_ranks_is_the_identity(shape, tp, seed):
    weight_map = WeightMap(shape, shape.padded_vocab_size(tp, 1))
    for name, tensor in random_weights(weight_map, seed).items():
        units = shape.num_attention_heads if shape.multi_latent_attention else shape.num_query_groups
        if units % tp and name.endswith(BY_HEADS):
            with pytest.raises(WeightError, match="do not divide"):
                weight_map.split_tp(name, tensor, tp)
            continue
        shards = weight_map.split_tp(name, tensor, tp)
        assert len(shards) == tp and len({shard.shape for shard in shards}) == 1
        assert torch.equal(weight_map.merge_tp(name, shards), tensor)


@pytest.fixture
def small():
    return ModelShape(
        family="qwen3",
        num_layers=2,
        hidden_size=3,
        ffn_hidden_size=4,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=2,
        vocab_size=6,
        max_position_embeddings=8,
        qk_layernorm=True,
    )


def test_qkv_rows_stand_group_by_group(small):
    """Megatron's layout, element by element: row ((g (Q + 2) + s) E + e) is slot s of group g."""
    E, Q = 2, 2
    parts = {
        "q_proj": 100 + torch.arange(8.0)[:, None].expand(8, 3),
        "k_proj": 200 + torch.arange(4.0)[:, None].expand(4, 3),
        "v_proj": 300 + torch.arange(4.0)[:, None].expand(4, 3),
    }
    whole_XH = WeightMap(small).from_hf(
        "decoder.layers.1.self_attention.linear_qkv.weight", lambda name: parts[name.split(".")[-2]]
    )
    for g in range(2):
        for slot in range(Q + 2):
            for e in range(E):
                kind, head = ("q_proj", g * Q + slot) if slot < Q else (("k_proj", "v_proj")[slot - Q], g)
                assert torch.equal(whole_XH[(g * (Q + 2) + slot) * E + e], parts[kind][head * E + e])


def test_a_tensor_parallel_rank_holds_its_gates_then_its_ups(small):
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    whole = torch.arange(8.0)[:, None].expand(8, 3)
    first, second = WeightMap(small).split_tp(name, whole, 2)
    assert first[:, 0].tolist() == [0, 1, 4, 5] and second[:, 0].tolist() == [2, 3, 6, 7]


def test_row_parallel_weights_are_split_along_their_input(small):
    shards = WeightMap(small).split_tp("decoder.layers.0.mlp.linear_fc2.weight", torch.arange(12.0).view(3, 4), 2)
    assert [shard[0].tolist() for shard in shards] == [[0, 1], [2, 3]]


def test_names_and_shapes_are_those_of_transformers(origin):
    files = [load_file(path) for path in origin.glob("*.safetensors")]
    weight_map = WeightMap(ModelShape.from_hf_config(origin))
    theirs = {name: tuple(tensor.shape) for file in files for name, tensor in file.items()}
    weights = random_weights(weight_map, seed=0)
    ours = [pair for name, tensor in weights.items() for pair in weight_map.to_hf(name, tensor)]
    assert {name: tuple(tensor.shape) for name, tensor in ours} == theirs


def test_transformer_engine_names_of_norms(small):
    norm = torch.ones(3)
    weight_map = WeightMap(small)
    ((first, _),) = weight_map.to_hf("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", norm)
    ((second, _),) = weight_map.to_hf("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", norm)
    assert first == "model.layers.1.input_layernorm.weight"
    assert second == "model.layers.1.post_attention_layernorm.weight"


def test_tied_output_layer_yields_nothing(small):
    assert WeightMap(small).to_hf("output_layer.weight", torch.zeros(6, 3)) == []


@pytest.mark.parametrize(
    ("name", "tensor_shape", "words"),
    [
        ("decoder.layers.2.mlp.linear_fc2.weight", (3, 4), "no weight of a qwen3 model with 2 layers"),
        ("module.decoder.final_layernorm.weight", (3,), "no wrapper's prefix"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (4, 3), r"\(4, 3\), but the model's config says \(3, 4\)"),
        ("embedding.word_embeddings.weight", (5, 3), r"\(5, 3\), but the model's config says \(6, 3\)"),
        ("decoder.final_layernorm.weight", (4,), r"\(4,\), but the model's config says \(3,\)"),
    ],
)
def test_wrong_weights_are_refused(small, name, tensor_shape, words):
    with pytest.raises(WeightError, match=words):
        WeightMap(small).to_hf(name, torch.zeros(tensor_shape))


def test_a_hugging_face_weight_of_another_shape_is_refused(small):
    with pytest.raises(WeightError, match=r"k_proj\.weight has shape \(8, 3\)"):
        WeightMap(small).from_hf("decoder.layers.0.self_attention.linear_qkv.weight", lambda _: torch.zeros(8, 3))


def test_padding_below_the_vocabulary_is_refused(small):
    with pytest.raises(WeightError, match="at least the vocabulary size 6"):
        WeightMap(small, 5)


def test_every_family_has_a_table():
    assert TABLES.keys() == FAMILIES.keys()
