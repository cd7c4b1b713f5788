"""Windows in configs of Mistral and Mixtral."""

import pytest

from slime_convert import ModelShape
from slime_convert.errors import UnsupportedModelError
from support.shapes import LLAMA


def shape(model_type, **changes):
    return ModelShape.from_hf_config({**LLAMA, "max_position_embeddings": 8192, "model_type": model_type, **changes})


def test_a_window_that_is_left_out_or_null():
    """Mistral's class has one by default."""
    assert shape("mistral").window_size == 4095
    assert shape("mistral", sliding_window=None).window_size is None
    assert shape("mistral", sliding_window=16).window_size == 15
    # One as long as the context is none.
    assert shape("mistral", max_position_embeddings=128).window_size is None
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    assert shape("mixtral", **experts).window_size is None
    assert shape("mixtral", **experts, sliding_window=16).window_size == 15


def test_one_expert_per_token_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"num_experts_per_tok 1 .* allowed: 2 or more"):
        shape("mixtral", num_experts_per_tok=1)
