"""Keys of weights in a torch_dist checkpoint."""

import pytest

from slime_convert.formats.torch_dist_names import StoredPlace, is_optimizer, layers_under, other_names, places, stacked


def test_layers_of_a_stack_are_found_back():
    key, shape = "decoder.layers.mlp.linear_fc2.weight", (3, 5, 4)
    layers = dict(layers_under(key, shape))
    assert set(layers.values()) == {(5, 4)} and len(layers) == 3
    for number, name in enumerate(layers):
        assert StoredPlace((key,), number) in places(name) and stacked(name) == (key, number)
    for alone in ("decoder.layers.2.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"):
        assert list(layers_under(alone, (5,))) == [(alone, (5,))]


def test_an_expert_lies_in_a_stack_or_alone():
    found = places("decoder.layers.2.mlp.experts.local_experts.5.linear_fc1.weight")
    stack, alone = "decoder.layers.mlp.experts.experts.", "decoder.layers.2.mlp.experts.experts."
    assert found[0] == StoredPlace((f"{stack}linear_fc1.weight",), 2, 5) and found[0].index == (2, 5)
    assert StoredPlace((f"{alone}linear_fc1.weight",), None, 5) in found
    assert StoredPlace((f"{alone}5.linear_fc1.weight",), None) in found
    assert StoredPlace((f"{alone}5.linear_fc1.weight_w", f"{alone}5.linear_fc1.weight_v"), None) in found


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("decoder.layers.pre_mlp_layernorm.weight", ["decoder.layers.mlp.linear_fc1.layer_norm_weight"]),
        ("decoder.final_layernorm.weight", []),
    ],
)
def test_other_names_of_a_norm(key, others):
    assert other_names(key) == others


def test_optimizer_state_is_told_by_its_key():
    keys = ("optimizer.state.exp_avg.a", "chained_0.optimizer.state.a", "x.optimizer.a", "decoder.optimizer_x")
    assert [is_optimizer(key) for key in keys] == [True, True, True, False]
