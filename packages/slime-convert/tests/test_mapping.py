"""Notation: H hidden size, E channels per head, G groups, Q query heads per group."""

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_convert import ModelShape
from slime_convert.errors import WeightError
from slime_convert.mapping import WeightMap, hf_copies
from support.family_models import weights_of
from support.generated_models import configs


def random_weights(weight_map, seed):
    """Numbers to which one can be added without rounding."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(weight_map.megatron_shape(name), generator=generator).mul(1024).round() / 1024
        for name in weight_map.megatron_names()
    }


def test_rows_of_another_matrix_are_cut_as_the_weights_are(made):
    """As a LoRA adapter's factor B is: the same columns of the weight give the same parts."""
    weight_map = WeightMap(ModelShape.from_hf_config(made("qwen3-moe")))
    for name, tensor in random_weights(weight_map, 3).items():
        if tensor.dim() == 2 and "word_embeddings" not in name and "output_layer" not in name:
            wanted = [part[:, :3] for _, part in weight_map.to_hf(name, tensor)]
            found = weight_map.cut_rows(name, tensor[:, :3])
            assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    with pytest.raises(WeightError, match="has shape"):
        weight_map.cut_rows(name, torch.zeros(3, 3))


@settings(max_examples=60, deadline=None)
@given(configs(), st.integers(0, 2**31))
def test_to_hf_and_back_is_the_identity(config, seed):
    weight_map = WeightMap(ModelShape.from_hf_config(config))
    weights, copies = random_weights(weight_map, seed), hf_copies(weight_map.shape)
    hf = {name: weight_map.huggingface(name, weights.__getitem__) for name in weight_map.hf_names()}
    assert not copies.keys() & hf.keys() and set(copies.values()) <= hf.keys()
    assert {name: tuple(tensor.shape) for name, tensor in hf.items()} == {
        name: weight_map.hf_shape(name) for name in hf
    }
    assert sum(tensor.numel() for tensor in hf.values()) == sum(tensor.numel() for tensor in weights.values())
    for name, tensor in weights.items():
        assert torch.equal(weight_map.from_hf(name, hf.__getitem__), tensor)
        parts = weight_map.hf_parts(name)
        if any(len(weight_map.megatron_parts(part)) > 1 for part in parts):
            with pytest.raises(WeightError, match="lies with those of other experts"):
                weight_map.to_hf(name, tensor)
            continue
        found = weight_map.to_hf(name, tensor)
        assert [part for part, _ in found if part not in copies] == parts
        assert all(torch.equal(part, hf[copies.get(part_name, part_name)]) for part_name, part in found)


@settings(max_examples=40, deadline=None)
@given(configs(), st.integers(0, 60), st.integers(0, 2**31))
def test_padding_is_zero_and_cut_off_again(config, extra, seed):
    shape = ModelShape.from_hf_config(config)
    padded = WeightMap(shape, shape.vocab_size + extra)
    plain = random_weights(WeightMap(shape), seed)["embedding.word_embeddings.weight"]
    whole = padded.from_hf("embedding.word_embeddings.weight", lambda _: plain)
    assert whole.shape == padded.megatron_shape("embedding.word_embeddings.weight")
    assert not whole[shape.vocab_size :].any()
    ((name, back), *_) = WeightMap(shape).to_hf("embedding.word_embeddings.weight", whole)
    assert name == "model.embed_tokens.weight" and torch.equal(back, plain)


@settings(max_examples=80, deadline=None)
@given(configs(), st.sampled_from([1, 2, 4]), st.integers(0, 2**31))
def test_merging_the_shards_of_tensor_parallel_ranks_is_the_identity(config, tp, seed):
    """Where the units that may not be cut divide over the ranks; what they are is checked below, by hand."""
    shape = ModelShape.from_hf_config(config)
    weight_map = WeightMap(shape, shape.padded_vocab_size(tp, 1))
    whole_anyway = set()
    for name, tensor in random_weights(weight_map, seed).items():
        try:
            shards = weight_map.split_tp(name, tensor, tp)
        except WeightError as error:
            assert tp > 1 and f"do not divide over {tp} tensor-parallel ranks; use a divisor" in str(error)
            continue
        assert len(shards) == tp and len({shard.shape for shard in shards}) == 1
        assert torch.equal(weight_map.merge_tp(name, shards), tensor)
        axis = weight_map.split_axis(name)
        assert list(shards[0].shape) == [n // tp if place == axis else n for place, n in enumerate(tensor.shape)]
        if shards[0].numel() == tensor.numel():
            whole_anyway.add(name.split(".")[-2] + ".bias" * name.endswith(".bias"))
    assert tp == 1 or whole_anyway <= WHOLE, whole_anyway - WHOLE


# What every tensor-parallel rank holds whole, in Megatron: norms, routers, projections to latents, the sparse indexer,
# biases behind a sum over the ranks.
WHOLE = {"input_layernorm", "pre_mlp_layernorm", "final_layernorm", "q_layernorm", "kv_layernorm", "k_layernorm"}
WHOLE |= {"post_self_attn_layernorm", "post_mlp_layernorm", "out_norm", "enorm", "hnorm", "router", "shared_experts"}
WHOLE |= {"linear_q_down_proj", "linear_kv_down_proj", "linear_wq_b", "linear_wk", "linear_weights_proj", "k_norm"}
WHOLE |= {"linear_proj.bias", "linear_fc2.bias", "k_norm.bias", "router.bias"}


BY_HEADS = (
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_q_proj.weight",
    "linear_q_up_proj.weight",
    "linear_kv_up_proj.weight",
    "linear_proj.weight",
)


@pytest.mark.parametrize("name", ["qwen2-tied", "deepseek", "moonlight"])
def test_attention_is_split_in_whole_groups(made, name):
    """Two groups of three heads, or six heads of latent attention, do not divide over four ranks."""
    weight_map = WeightMap(ModelShape.from_hf_config(made(name)))
    weights = {name: tensor for name, tensor in random_weights(weight_map, 0).items() if name.endswith(BY_HEADS)}
    assert len(weights) >= 3
    for name, tensor in weights.items():
        with pytest.raises(WeightError, match="do not divide over 4 tensor-parallel ranks"):
            weight_map.split_tp(name, tensor, 4)
        assert torch.equal(weight_map.merge_tp(name, weight_map.split_tp(name, tensor, 2)), tensor)


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
    weight_map = WeightMap(ModelShape.from_hf_config(origin))
    if weight_map.shape.mtp_num_layers:  # transformers saves no prediction modules
        weight_map = WeightMap(replace(weight_map.shape, mtp_num_layers=0))
    theirs = {name: tuple(tensor.shape) for name, tensor in weights_of(origin).items()}
    assert {name: weight_map.hf_shape(name) for name in weight_map.hf_names()} == theirs


def test_the_first_expert_of_a_layer_stands_for_all_of_them(origin):
    """By number and by size, in Megatron and in Hugging Face files, prediction modules among them."""
    shape = ModelShape.from_hf_config(origin)
    every, counted = WeightMap(shape), WeightMap(shape, one_expert=True)

    def numbers(weight_map):
        return [(weight_map.count(name), prod(weight_map.megatron_shape(name))) for name in weight_map.megatron_names()]

    assert {count for count, _ in numbers(every)} == {1}
    assert sum(count for count, _ in numbers(counted)) == len(numbers(every))
    assert sum(map(prod, numbers(counted))) == sum(map(prod, numbers(every)))
    assert counted.hf_count() == every.hf_count() == len(list(every.hf_names()))


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
        ("decoder.layers.2.mlp.linear_fc2.weight", (3, 4), "is not a weight of a qwen3 model with 2 layers"),
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
