"""Save adapters as PEFT does, so that PEFT and `slime-convert merge-lora` merge them into the Hugging Face model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slime_convert.shape import ModelShape
from slime_core.files import write_whole
from slime_megatron.model.build import Chunks, bare
from slime_megatron.settings.trained import Lora
from slime_megatron.weights.sync import WeightExport

DIRECTORY = "adapter"
"""The directory of the adapters in a checkpoint's."""


def gather_adapters(model: Chunks, shape: ModelShape) -> dict[str, torch.Tensor]:
    """On rank 0, all factors under PEFT's names, on the CPU; all ranks call this, and others get nothing.

    A layer that Hugging Face has in parts gives each part the same A, and its rows of B.
    """
    found = WeightExport(model, shape, adapters=True).tensors()
    return {name: factor.detach().to("cpu", copy=True).contiguous() for name, factor in found}


def write_adapter(directory: Path, factors: dict[str, torch.Tensor], lora: Lora) -> None:
    """Write a directory as PEFT's ``save_pretrained`` does."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(factors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }
    write_whole(directory / "adapter_config.json", json.dumps(config, indent=2) + "\n")


def lora_of(model: Chunks) -> Lora | None:
    """The settings of a model's adapters, if it has any."""
    return getattr(bare(model[0]), "lora", None)
