"""A converted model gives transformers' logits, however it is split over ranks."""

import pytest
import torch

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("name", ["llama-tied", "llama3-rope", "qwen2-tied", "qwen3", "glm", "glm4"])
@pytest.mark.parametrize("layout", LAYOUTS)
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
