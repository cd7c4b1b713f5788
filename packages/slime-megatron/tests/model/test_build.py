"""The model: transformers' logits; log-probs from hidden states, without holding logits."""

import numpy as np
import pytest
import torch

from slime_convert.shape import ModelShape
from support.tiny_models import DENSE, EXPERTS, LATENT

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


SPLIT = [("glm4", "tp2"), ("llama-tied", "tp2+sp"), ("glm4-moe", "tp2+sp"), ("deepseek", "tp2+sp")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Every family on one rank, and a few on two; the product in the full run.
        pytest.param(name, layout, marks=[] if layout == "tp1" or (name, layout) in SPLIT else [pytest.mark.full])
        for name in DENSE + EXPERTS + LATENT
        for layout in LAYOUTS
        if layout != "tp2" or name in DENSE
    ],
)
def test_logits_equal_transformers(ranks, tiny_model, tiny_config, make_samples, hf_logits, name, layout):
    model = tiny_model(name)
    samples = make_samples(groups=2, per_group=3, prompt=20)
    config = tiny_config(load=model.checkpoint, **LAYOUTS[layout])
    ranks.start(config.tensor_model_parallel_size, config, model.shape)
    with torch.no_grad():
        expected = hf_logits(model.hf, samples)
    assert expected.abs().max() > 1
    for logits in ranks.call("logits", samples):
        assert (torch.from_numpy(logits) - expected).abs().max() < 1e-4


VOCABULARY = 151_936


@pytest.mark.parametrize(
    ("world", "values"),
    [
        (1, {}),
        (2, {"tensor_model_parallel_size": 2}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    ],
    ids=["one", "tp2", "tp2 + sp"],
)
@pytest.mark.parametrize("name", ["llama-tied", pytest.param("qwen3", marks=pytest.mark.full)])
def test_gradients_equal_those_through_the_logits(ranks, tiny_model, tiny_config, make_samples, name, world, values):
    model, samples = tiny_model(name), make_samples(masks=True)
    ranks.start(world, tiny_config(load=model.checkpoint, **values), model.shape)
    ours = ranks.call("gradients", samples, temperature=0.7, through_logits=False)
    theirs = ranks.call("gradients", samples, temperature=0.7, through_logits=True)
    for (values, grads), (expected, expected_grads) in zip(ours, theirs, strict=True):
        for key, value in expected.items():
            np.testing.assert_allclose(values[key], value, rtol=1e-6, atol=1e-6, err_msg=key)
        for key, value in expected_grads.items():
            norm = np.linalg.norm(value.astype(np.float64))
            assert norm > 1e-3, key
            assert np.linalg.norm(grads[key].astype(np.float64) - value) <= 1e-6 * norm, key


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    ("responses", "limit"), [(4, 300e6), pytest.param(64, 1e9, marks=pytest.mark.full)], ids=["2k tokens", "32k tokens"]
)
def test_memory_of_the_loss_at_a_large_vocabulary(ranks, tiny_config, make_samples, make_shards, responses, limit):
    """Logits alone would take 1.2 and 20 GB, and as much again for their gradient."""
    shape = ModelShape(
        family="llama",
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=16,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    samples = make_samples(groups=1, per_group=responses, prompt=2, response=512, vocab=VOCABULARY)
    ranks.start(1, tiny_config(), shape)
    ranks.seconds = 900  # of 32k tokens, on a busy machine
    peak = ranks.first("peak_of_training", make_shards(samples))
    tokens = sum(sample.response_length for sample in samples)
    print(f"{tokens} tokens: {peak / 1e6:.0f} MB")
    assert peak < limit


FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("values", "recomputed"),
    [
        ({}, 0),
        ({"recompute_activations": True}, 2),
        ({"recompute_granularity": "selective"}, 2),
        ({**FULL, "recompute_method": "uniform"}, 2),
        ({**FULL, "recompute_method": "block"}, 1),
    ],
)
def test_recomputation_takes_place(ranks, tiny_model, tiny_config, make_samples, make_shards, values, recomputed):
    """Two layers, one micro-batch: one attention each, and another for each that is recomputed."""
    model = tiny_model("qwen3")
    ranks.start(1, tiny_config(load=model.checkpoint, **values), model.shape)
    assert ranks.first("attention_calls", make_shards(make_samples(groups=1))) == 2 + recomputed
