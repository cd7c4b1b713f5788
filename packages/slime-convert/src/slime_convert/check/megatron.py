"""Tiny models in megatron-core, on a CPU: ``python -m slime_convert.check.megatron JOBS RESULTS``.

``JOBS`` is a JSON list with the arguments of :func:`run` for each model; what it returns is a line of ``RESULTS``. A
process of its own, because the CPU device changes all of it. Notation: B rows, S positions, V vocabulary, K the model
and its prediction modules.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from slime_convert.mapping import WeightMap
from slime_convert.shape import ModelShape

FOR_A_CPU: dict[str, Any] = {
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": torch.float32,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
}


def main(jobs: str, results: str) -> None:
    """Run all jobs, each whatever became of the one before."""
    _use_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.moe import moe_utils

    with tempfile.TemporaryDirectory() as directory, Path(results).open("w") as file:  # written: the parent's folder
        torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/rank", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True)  # which keeps no random state of a device
        moe_utils.te_general_gemm = None  # core 0.16 asks for it, and defines it only with Transformer Engine
        for job in json.loads(Path(jobs).read_text()):
            try:
                outcome = run(**job)
            except BaseException as error:  # as megatron-core's CheckpointException is
                traceback.print_exc()
                *_, last = str(error).strip().splitlines() or [""]
                outcome = {"error": f"{type(error).__name__}: {last}"}
            print(json.dumps(outcome), file=file, flush=True)
        torch.distributed.destroy_process_group()


def _use_cpu() -> None:
    """Let the current device be the CPU, and make masks there: all that a forward pass in eval mode asks of CUDA."""
    stock_ones = torch.ones

    def ones(*args: Any, **kwargs: Any) -> torch.Tensor:
        return stock_ones(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

    torch.ones = ones
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def run(origin: str, checkpoint: str, expected: str, padded_vocab_size: int) -> dict[str, Any]:
    """Load a checkpoint into a stock GPTModel, compute logits, and export its weights.

    Args:
        origin: The Hugging Face directory that the checkpoint was converted from.
        checkpoint: One iteration of it.
        expected: A file with ``tokens`` and transformers' ``logits``, K × B × S × V, with or without the modules'.
        padded_vocab_size: Rows of the embedding in the checkpoint.

    Returns:
        ``difference``: the largest between logits; ``exported``: how many weights; ``wrong``: which differ.
    """
    from megatron.core import dist_checkpointing

    shape = ModelShape.from_hf_config(origin)
    model = build(shape, padded_vocab_size)
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, checkpoint)
    model.load_state_dict(state["model"])
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    exported, original = _export(WeightMap(shape, padded_vocab_size), weights), load_file(f"{origin}/model.safetensors")
    wrong = {name for name, tensor in original.items() if not torch.equal(exported.get(name, torch.empty(0)), tensor)}
    wrong |= exported.keys() - original.keys()
    stored = load_file(expected)
    with torch.no_grad():
        found_KBSV = _logits(model, stored["tokens"])[: len(stored["logits"]), ..., : shape.vocab_size]
    difference = (found_KBSV - stored["logits"]).abs().max().item()
    return {"difference": difference, "exported": len(exported), "wrong": sorted(wrong)}


def _export(weight_map: WeightMap, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The Hugging Face weights of a model's state, of one Megatron weight at a time where that is possible."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        first, *_ = weight_map.hf_parts(name)
        if len(weight_map.megatron_parts(first)) > 1:  # all experts of a layer lie in it
            found[first] = weight_map.huggingface(first, weights.__getitem__)
        else:
            found |= dict(weight_map.to_hf(name, tensor))
    return found


def _logits(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    """K × B × S × V: of the model, then of its prediction modules."""
    found: list[torch.Tensor] = []

    def keep(_module: Any, _given: Any, output: Any) -> None:
        found.append(output[0].transpose(0, 1).clone())  # the loss changes it in place

    model.output_layer.register_forward_hook(keep)
    positions_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    model(tokens_BS, positions_BS, None, labels=tokens_BS)  # core 0.16's prediction modules fail without labels
    return torch.stack([found[-1], *found[:-1]])


def build(shape: ModelShape, padded_vocab_size: int) -> Any:
    """A GPTModel of local layers in float32."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = _transformer_config(shape)
    spec = layer_spec(config)
    full = [layer for number, layer in enumerate(spec.layer_specs) if shape.has_layer("full", number)]
    inner = full[-1] if full else spec  # a module's layer is as the last with full attention
    modules = get_gpt_mtp_block_spec(config, inner, use_transformer_engine=False) if shape.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        position_embedding_type=shape.position_embedding_type,
        rotary_percent=shape.rotary_percent,
        rotary_base=shape.rotary_base,
        rope_scaling=shape.use_rope_scaling,
        rope_scaling_factor=shape.rope_scaling_factor,
        seq_len_interpolation_factor=shape.rotary_seq_len_interpolation_factor,
        mtp_block_spec=modules,
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
    ).eval()


def layer_spec(config: Any) -> Any:
    """The spec of the model's layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")


def _transformer_config(shape: ModelShape) -> Any:
    """Megatron's config of a model: what its shape sets, and what core asks for beyond."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if shape.multi_latent_attention else TransformerConfig
    gelu_tanh = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    values = shape.megatron_values({field.name for field in dataclasses.fields(kind)}) | {
        "activation_func": torch.nn.functional.silu if shape.swiglu else quick_gelu if shape.quick_geglu else gelu_tanh,
        "layernorm_zero_centered_gamma": False,  # local norms refuse it
        "mtp_num_layers": shape.mtp_num_layers or None,
        "window_size": None if shape.window_size is None else (shape.window_size, 0),
    }
    config = kind(**values, **FOR_A_CPU)
    if shape.position_embedding_type == "yarn":
        # None of its fields in core 0.16, whose GPTModel reads them all the same.
        config.yarn_rotary_scaling_factor = shape.rotary_scaling_factor
        config.yarn_correction_range_round_to_int = shape.yarn_rounds_range
        for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            setattr(config, f"yarn_{name}", getattr(shape, name))
    return config


if __name__ == "__main__":
    main(*sys.argv[1:])
