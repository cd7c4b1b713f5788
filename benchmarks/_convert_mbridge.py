"""mbridge's load and save, for `_conversions.measure`: `_convert_mbridge.py PACKAGES INPUT OUTPUT`.

mbridge is made for GPUs. What it is given here: a model of megatron-core's local layers instead of Transformer
Engine's, whose norms have other names; a process group of one on gloo; the rotary base where mbridge 0.15 looks for it,
since transformers 5 keeps it elsewhere; and weights that are not initialized before they are loaded. Reading, reshaping
and writing are its own.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from _conversions import serve
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from transformers import AutoConfig

ENGINE_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def bridge_on_cpu(directory: str) -> Any:
    """mbridge's bridge for a model, with local layers."""
    from mbridge.core.bridge import _MODEL_REGISTRY

    config = AutoConfig.from_pretrained(directory)
    config.rope_theta = config.rope_parameters["rope_theta"]

    base: Any = _MODEL_REGISTRY[config.model_type]

    class OnCpu(base):  # type: ignore[misc]
        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            self.has_vp_stage = True
            return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)

        def _weight_name_mapping_mcore_to_hf(self, name: str) -> Any:
            for ours, engines in ENGINE_NAMES.items():
                name = name.replace(ours, engines)
            return super()._weight_name_mapping_mcore_to_hf(name)

    bridge = OnCpu(config, dtype=torch.float32)
    bridge.set_extra_args(use_cpu_initialization=True, perform_initialization=False)
    return bridge


def main(source: str, output: str) -> None:
    """Build the model, load it, save it."""
    bridge = bridge_on_cpu(source)
    model = bridge._model_provider([])(pre_process=True, post_process=True)
    with torch.no_grad():
        bridge.load_weights([model], source)
        bridge.save_weights([model], output)


if __name__ == "__main__":
    packages, *places = sys.argv[1:]
    sys.path.append(packages)
    import mbridge  # noqa: F401 - importing is not measured

    with tempfile.TemporaryDirectory() as meeting:
        dist.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        serve(lambda: main(*places))
        dist.destroy_process_group()
