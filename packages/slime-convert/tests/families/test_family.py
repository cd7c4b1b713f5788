"""Rows of weight tables."""

import pytest

from slime_convert.families.family import WHOLE, HfPart, WeightRule, also, expert, gate_and_up, in_module, norm, weight
from slime_convert.families.known import FAMILIES

NAME = "decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight"


def test_a_weight_in_a_layer_has_whole_names_and_its_own_dimensions():
    row = weight("mlp.linear_fc2.weight", "hidden ffn", "mlp.down_proj.weight", 1)
    assert row.megatron == "decoder.layers.{i}.mlp.linear_fc2.weight" and row.split == 1
    assert row.hf == (HfPart("model.layers.{i}.mlp.down_proj.weight", "hidden ffn"),)


def test_a_name_without_a_number_holds_all_experts():
    own, all_ = (expert("linear_fc2.bias", "hidden", name).hf[0] for name in ("mlp.{e}.bias", "mlp.bias"))
    assert not own.stacked and all_.stacked


def test_sections_are_what_ranks_split_alone():
    row = gate_and_up("mlp.linear_fc1.weight", "ffn", "mlp.gate_proj.weight", "mlp.up_proj.weight")
    assert row.sections == ["ffn", "ffn"] and [part.dims for part in row.hf] == ["ffn hidden"] * 2
    (whole,) = also([row], split=WHOLE)
    assert whole.sections == []


def test_a_row_moves_into_a_prediction_module():
    row = in_module(norm("pre_mlp_layernorm", "norm", fused_into="mlp.linear_fc1"), FAMILIES["mimo"])
    assert row.megatron == "mtp.layers.{m}.transformer_layer.pre_mlp_layernorm.weight"
    assert row.te_name == "mtp.layers.{m}.transformer_layer.mlp.linear_fc1.layer_norm_weight"
    assert row.hf[0].name == "model.mtp_layers.{m}.norm.weight"


@pytest.mark.parametrize(
    "make",
    [
        lambda **name: WeightRule("a", "hidden", (), **name),
        lambda **name: weight("a", "hidden", "b", **name),
        lambda **name: also([weight("a", "hidden", "b")], **name)[0],
    ],
    ids=["class", "function", "change"],
)
def test_the_former_name_of_te_name_warns(make):
    with pytest.warns(DeprecationWarning, match=r"engine_name= of a weight's row is now te_name=; .* next release"):
        row = make(engine_name=NAME)
    assert row == make(te_name=NAME) and row.te_name == row.engine_name == NAME
