"""Recorded arguments, held against a model's."""

from pathlib import Path

import pytest

from slime_convert import ModelShape
from slime_convert.errors import ShapeMismatchError
from slime_convert.shape import check_args
from support.shapes import LLAMA

EXPECTED = ModelShape.from_hf_config(LLAMA).to_megatron_args()
WHERE = Path("iter_0000001")


def test_what_is_equal_not_recorded_or_padded_at_will_passes():
    check_args(EXPECTED, EXPECTED, WHERE)
    check_args(EXPECTED, {}, WHERE)
    loose = {"vocab_size": 128, "max_position_embeddings": 7, "num_layers": None, "norm_epsilon": 1.0000001e-5}
    check_args(EXPECTED, EXPECTED | loose, WHERE)


def test_all_contradictions_stand_in_one_message():
    wrong = EXPECTED | {"num_layers": 3, "hidden_size": 65}
    with pytest.raises(ShapeMismatchError, match=r"num_layers 3 \(config: 2\); hidden_size 65 \(config: 64\); give"):
        check_args(EXPECTED, wrong, WHERE)


def test_the_vocabulary_counts_where_it_is_the_models():
    with pytest.raises(ShapeMismatchError, match="vocab_size 128"):
        check_args(EXPECTED, EXPECTED | {"vocab_size": 128}, WHERE, same_vocabulary=True)


def test_two_names_of_one_family_are_one_model():
    kimi = EXPECTED | {"hf_model_type": "kimi_k2"}
    check_args(kimi, kimi | {"hf_model_type": "deepseek_v3"}, WHERE)
    with pytest.raises(ShapeMismatchError, match="hf_model_type llama"):
        check_args(kimi, EXPECTED, WHERE)


@pytest.mark.parametrize("name", ["moe_mlp_glu_interleave_size", "layernorm_zero_centered_gamma"])
def test_weights_that_mean_something_else_are_refused(name):
    with pytest.raises(ShapeMismatchError, match=f"{name} 2, which gives weights another meaning"):
        check_args(EXPECTED, EXPECTED | {name: 2}, WHERE)
