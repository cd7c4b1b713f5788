import json

import torch
from safetensors.torch import load_file

from slime_megatron.checkpoints.peft import write_adapter
from slime_megatron.settings.trained import Lora


def test_the_files_of_an_adapter(tmp_path):
    layers = ("base_model.model.model.layers.0.self_attn.q_proj", "base_model.model.model.layers.0.mlp.up_proj")
    factors = {f"{layer}.{factor}.weight": torch.ones(2, 2) for layer in layers for factor in ("lora_A", "lora_B")}
    write_adapter(tmp_path / "adapter", factors, Lora(2, 8.0))
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys() == factors.keys()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    found = {name: config[name] for name in ("peft_type", "r", "lora_alpha", "target_modules")}
    assert found == {"peft_type": "LORA", "r": 2, "lora_alpha": 8.0, "target_modules": ["q_proj", "up_proj"]}
