import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_core.errors import ConfigError
from slime_core.flops import FlopsModel

SMALL = FlopsModel(num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2)


def counted(model, tokens):
    """Every matrix product of a forward pass, one token and one layer at a time."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    groups = heads if model.num_query_groups is None else model.num_query_groups
    width = hidden // heads if model.head_dim is None else model.head_dim
    values = width if model.value_dim is None else model.value_dim
    total = 0
    for position in range(tokens):
        for _ in range(model.num_layers):
            if model.latent_dim is None:
                total += 2 * hidden * heads * width  # queries
                total += 2 * hidden * groups * (width + values)  # keys and values
            else:
                if model.query_latent_dim is None:
                    total += 2 * hidden * heads * width
                else:
                    total += 2 * hidden * model.query_latent_dim
                    total += 2 * model.query_latent_dim * heads * width
                total += 2 * hidden * (model.latent_dim + model.rotary_dim)
                for _ in range(heads):
                    total += 2 * model.latent_dim * (width - model.rotary_dim)  # keys
                    total += 2 * model.latent_dim * values
            for _ in range(heads):
                for _ in range(position + 1):
                    total += 2 * width  # a score
                    total += 2 * values  # a value added
            total += 2 * heads * values * hidden  # output projection
            total += (3 if model.gated else 2) * 2 * hidden * model.ffn_hidden_size
        total += 2 * model.further_weights
        total += 2 * hidden * model.vocab_size
    return total


@given(
    st.builds(
        FlopsModel, num_layers=st.integers(1, 3), hidden_size=st.sampled_from([8, 12]),
        ffn_hidden_size=st.integers(1, 30), num_attention_heads=st.sampled_from([2, 4]),
        num_query_groups=st.none() | st.integers(1, 2), head_dim=st.none() | st.integers(1, 5),
        vocab_size=st.integers(0, 40), gated=st.booleans(), value_dim=st.none() | st.integers(1, 5),
        latent_dim=st.none() | st.integers(1, 9), rotary_dim=st.integers(0, 1),
        query_latent_dim=st.none() | st.integers(1, 9), further_weights=st.integers(0, 9),
    ),
    st.integers(0, 12),
)  # fmt: skip
def test_against_a_count_of_every_product(model, tokens):
    assert model.forward(tokens) == counted(model, tokens)
    assert model.training(tokens) == 3 * model.forward(tokens)
    pairs = sum(range(tokens + 1))
    assert model.forward(tokens) == tokens * model.per_token + pairs * model.per_pair
    assert model.forward(tokens) == model.packed(tokens=tokens, pairs=pairs, logits=tokens)
    assert model.forward(tokens) - model.packed(tokens=tokens, pairs=pairs, logits=0) == tokens * model.per_logit


def test_sizes_are_checked():
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "head_dim"):
        with pytest.raises(ConfigError, match=f"{name} 0 of the FLOPs model must be 1 or more"):
            dataclasses.replace(SMALL, **{name: 0})
    with pytest.raises(ConfigError, match="vocab_size -1 of the FLOPs model must be 0 or more"):
        dataclasses.replace(SMALL, vocab_size=-1)
    with pytest.raises(ConfigError, match="hidden_size 8 of the FLOPs model is no multiple of num_attention_heads 3"):
        dataclasses.replace(SMALL, num_attention_heads=3)
    assert dataclasses.replace(SMALL, num_attention_heads=3, head_dim=5).per_pair == 4 * 3 * 5
