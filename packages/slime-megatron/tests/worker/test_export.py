import pytest


@pytest.mark.parametrize("call", ["merge_tp", "to_hf"])
def test_a_weight_that_is_gathered_wrong_is_named(ranks, tiny_model, tiny_config, call):
    model, weight = tiny_model("qwen3"), "decoder.layers.1.self_attention.linear_qkv.weight"
    ranks.start(2, tiny_config(load=model.checkpoint, tensor_model_parallel_size=2), model.shape)
    assert ranks.call("mismatches_where", call, weight) == [[weight]] * 2
    ranks.call("weights")
