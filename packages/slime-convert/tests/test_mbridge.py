"""The same tensors as mbridge's mapping gives, which others wrote."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from slime_convert import ModelShape
from slime_convert.mapping import WeightMap


def bridge_of(config):
    """mbridge's names and reshaping, without the model object and the process group that it would build."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    bridge = object.__new__(_MODEL_REGISTRY[config.model_type])
    bridge.hf_config = config
    bridge.config = SimpleNamespace(num_layers=config.num_hidden_layers, mtp_num_layers=None)
    bridge.dtype = bridge.make_vocab_size_divisible_by = None
    return bridge


# It does not know dense GLM-4, GLM-4.7-Flash and Kimi-K2.
KNOWN = ["llama-tied", "llama3-scaled", "qwen2-tied", "qwen3-untied", "qwen3-moe", "glm4-moe", "deepseek", "moonlight"]


@pytest.mark.parametrize("origin", KNOWN, indirect=True)
def test_mbridge_maps_to_the_same_tensors(origin):
    config = AutoConfig.from_pretrained(origin)
    bridge, weight_map = bridge_of(config), WeightMap(ModelShape.from_hf_config(origin))
    weights = {name: tensor for path in origin.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name in weight_map.megatron_names():
        ours = weight_map.from_hf(name, weights.__getitem__)
        te_name = weight_map.te_name(name)
        hf_names = bridge._weight_name_mapping_mcore_to_hf(te_name)
        theirs = bridge._weight_to_mcore_format(te_name, [weights[hf_name] for hf_name in hf_names])
        assert torch.equal(ours, theirs), name
        theirs_back = dict(zip(*bridge._weight_to_hf_format(te_name, theirs), strict=True))
        ours_back = dict(weight_map.to_hf(te_name, ours))
        assert theirs_back.keys() == ours_back.keys(), name
        assert all(torch.equal(tensor, theirs_back[hf_name]) for hf_name, tensor in ours_back.items()), name
