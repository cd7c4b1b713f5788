import pytest

from slime_convert.check import tiny
from slime_convert.check.proofs import prove
from slime_convert.check.tiny import MOST_LAYERS, tiny_config
from slime_convert.errors import CheckError
from slime_convert.shape import ModelShape

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 262144,
}


def test_sizes_shrink_and_settings_stay():
    few = tiny_config(DEEPSEEK)
    kept = ("norm_topk_prob", "num_nextn_predict_layers", "rms_norm_eps", "rope_scaling", "routed_scaling_factor")
    assert {key: few[key] for key in kept} == {key: DEEPSEEK[key] for key in kept}
    assert "quantization_config" not in few
    assert (few["num_hidden_layers"], few["first_k_dense_replace"]) == (3, 1)
    assert (few["n_group"], few["topk_group"], few["num_experts_per_tok"], few["n_routed_experts"]) == (4, 2, 4, 8)
    assert few["n_shared_experts"] == 1
    assert ModelShape.from_hf_config(few).vocab_size == 101


def test_what_is_absent_stays_absent():
    few = tiny_config(DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 0, "num_nextn_predict_layers": 0})
    assert (few["q_lora_rank"], few["n_shared_experts"], few["num_nextn_predict_layers"]) == (None, 0, 0)


@pytest.mark.parametrize(
    ("heads", "groups", "few_heads", "few_groups"), [(32, 32, 3, 3), (16, 8, 4, 2), (64, 8, 6, 2), (4, 1, 6, 2)]
)
def test_query_heads_keep_their_ratio_to_the_groups_up_to_three(heads, groups, few_heads, few_groups):
    few = tiny_config(GEMMA | {"num_attention_heads": heads, "num_key_value_heads": groups})
    assert (few["num_attention_heads"], few["num_key_value_heads"]) == (few_heads, few_groups)


def test_layers_are_as_many_as_all_kinds_need():
    assert tiny_config(GEMMA)["num_hidden_layers"] == 6
    lists = {"layer_types": ["sliding_attention", "full_attention"] * 13}
    few = tiny_config(GEMMA | lists)
    assert few["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert few["sliding_window"] == 5


def test_a_kind_of_layer_that_comes_too_late_is_refused():
    late = {"layer_types": ["sliding_attention"] * MOST_LAYERS + ["full_attention"] * 14}
    with pytest.raises(CheckError, match=f"2 kinds of layers .* in its first {MOST_LAYERS} layers"):
        tiny_config(GEMMA | late)


def test_sizes_that_break_the_family_s_rules_are_refused(monkeypatch):
    monkeypatch.setattr(tiny, "_expert_sizes", lambda shape: {"num_experts_per_tok": 3})
    with pytest.raises(CheckError, match="no tiny model can be made of the given config: num_experts_per_tok 3"):
        tiny.tiny_config(DEEPSEEK)


NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    "large", [{"linear_conv_kernel_dim": 10**9}, {"num_labels": 10**9}, {"id2label": {"5": "a"}, "_name": "b"}]
)
def test_what_would_take_any_room_is_cut_or_left_out(large):
    few = tiny_config(NEXT | {"norm_topk_prob": True, "unknown": 1} | large)
    assert few["norm_topk_prob"] and few["unknown"] == 1
    assert {key: few[key] for key in large if key in few} in ({}, {"linear_conv_kernel_dim": 4})
    assert tiny_config(NEXT | {"linear_conv_kernel_dim": 3})["linear_conv_kernel_dim"] == 3


@pytest.mark.parametrize("room", [0, 1000, 20_000])
def test_a_full_disk_is_told(tmp_path, full_disk, room):
    (tmp_path / "work").mkdir()
    with full_disk(room), pytest.raises(CheckError, match=r"cannot write .*work .*; make room, or set TMPDIR"):
        prove([tiny_config(GEMMA)], tmp_path / "work", megatron=False)
