import pytest
import torch

from slime_megatron.model.parts import rotary_frequencies


@pytest.mark.parametrize("name", ["qwen3", "llama3-rope", "glm4", "moonlight", "deepseek", "kimi-k2"])
def test_frequencies_are_those_of_transformers(tiny_model, name):
    model = tiny_model(name)
    torch.testing.assert_close(rotary_frequencies(model.shape), model.hf.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
