"""Speed of a train step, of `scripts/gpu-check`: the trainer's, and bare Megatron-core's on the same rows.

Both have the same GPTModel sizes, kind of layers, gradient buffers and optimizer. Bare Megatron-core computes its own
cross entropy from logits, with stock layers and nothing of slime's in the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_check.ranks import working
from slime_convert.mapping import WeightMap
from slime_convert.published import PUBLISHED
from slime_convert.shape import ModelShape
from slime_core.types import Rendezvous, TrainSample, TrainShard, TrainStep
from slime_megatron.settings.config import MegatronConfig

MODELS = ("smollm2-135M", "qwen2.5-0.5B", "qwen2.5-7B", "qwen3-30B-A3B")
TOKENS, ROWS = 8192, 4
WARM_UP, MEASURED = 2, 5
# bf16 weights, and in fp32 gradients, weights and Adam's two means; activations need the rest.
BYTES_PER_WEIGHT, PART_FOR_WEIGHTS = 18, 0.6


def fitting(name: str, gpu_bytes: int) -> tuple[str, ModelShape]:
    """A published shape, with as many of its layers as one GPU can train, and what to call it."""
    shape = PUBLISHED[name].shape
    sizes = WeightMap(shape)
    numbers = {weight: math.prod(sizes.megatron_shape(weight)) for weight in sizes.megatron_names()}
    per_layer = sum(number for weight, number in numbers.items() if weight.startswith("decoder.layers.0."))
    others = sum(number for weight, number in numbers.items() if not weight.startswith("decoder.layers."))
    room = gpu_bytes * PART_FOR_WEIGHTS / BYTES_PER_WEIGHT - others
    layers = min(shape.num_layers, max(1, int(room // per_layer)))
    label = name if layers == shape.num_layers else f"{name}, {layers} of {shape.num_layers} layers"
    return label, dataclasses.replace(shape, num_layers=layers)


def tiny(*, experts: bool = False) -> ModelShape:
    """For a CPU: only that everything runs."""
    moe: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32} if experts else {}
    return dataclasses.replace(
        PUBLISHED["qwen3-30B-A3B" if experts else "smollm2-135M"].shape,
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=500,
        **moe,
    )


def settings(impl: str) -> MegatronConfig:
    """Of both sides."""
    return MegatronConfig(bf16=True, transformer_impl=impl, share_prompts="off", trainer_threads=1)


def trainer(meeting: Rendezvous, impl: str, shape: ModelShape, tokens: int) -> dict[str, Any]:
    """Seconds of a step of `MegatronWorker.train`, and the most bytes on the device."""
    rng = np.random.default_rng(0)
    samples = [
        TrainSample(
            index=number,
            group_index=number,
            tokens=rng.integers(0, shape.vocab_size, tokens + 1).astype(np.int32),
            response_length=tokens,
            loss_mask=np.ones(tokens, np.uint8),
            trajectory_tokens=tokens,
            reward=1.0 - 2.0 * (number % 2),
            raw_reward=0.0,
        )
        for number in range(ROWS)
    ]
    step = TrainStep(
        micro_batches=[[number] for number in range(ROWS)], global_trajectories=ROWS, global_tokens=ROWS * tokens
    )
    shard = TrainShard.of(rollout_id=0, temperature=1.0, samples=samples, steps=[step])
    with working(meeting, settings(impl), shape) as worker:
        return _timed(lambda: worker.train(shard))


def bare(meeting: Rendezvous, impl: str, shape: ModelShape, tokens: int) -> dict[str, Any]:
    """The same of stock Megatron-core."""
    from slime_megatron.ranks.device import select_device

    device = select_device(1)
    config = settings(impl)
    import torch
    from megatron.core.distributed import finalize_model_grads

    from slime_megatron.ranks.parallel import join_ranks, leave_ranks, seed_everything
    from slime_megatron.step.optimizer import build_optimizer, wrap_model

    join_ranks(config, meeting, device)
    try:
        seed_everything(config.seed)
        [chunk] = wrapped = wrap_model([_stock_model(config, shape, device, tokens)], shape, config, device)
        optimizer = build_optimizer(wrapped, shape, config, device)
        rows_RT = torch.randint(0, shape.vocab_size, (ROWS, tokens + 1), device=device.torch_device)
        positions_1T = torch.arange(tokens, device=device.torch_device)[None]

        def step() -> None:
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            for number, row_T in enumerate(rows_RT):
                # The gradients of all but the last are only added up, as in Megatron's schedule.
                with chunk.no_sync() if number < ROWS - 1 else contextlib.nullcontext():
                    losses_1T = chunk(row_T[None, :-1], positions_1T, None, labels=row_T[None, 1:])
                    (losses_1T.mean() / ROWS).backward()
            finalize_model_grads(wrapped)
            optimizer.step()

        return _timed(step)
    finally:
        leave_ranks()


def _stock_model(config: MegatronConfig, shape: ModelShape, device: Any, tokens: int) -> Any:
    """Megatron's GPTModel of its own parts alone."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from slime_megatron.model.megatron_configs import transformer_config

    transformer = transformer_config(shape, config, device)
    engine = config.transformer_impl == "transformer_engine"
    return GPTModel(
        transformer,
        get_gpt_decoder_block_spec(transformer, use_transformer_engine=engine, normalization="RMSNorm"),
        vocab_size=shape.padded_vocab_size(1),
        max_sequence_length=tokens,
        position_embedding_type="rope",
        rotary_base=int(shape.rotary_base),
        share_embeddings_and_output_weights=not shape.untie_embeddings_and_output_weights,
    )


def _timed(step: Callable[[], object]) -> dict[str, Any]:
    """The median of several steps, after some that are not counted; the most memory, and the GPU's peak."""
    import torch

    from slime_megatron.worker.timer import peak_tflops

    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(WARM_UP + MEASURED):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    found: dict[str, Any] = {"seconds": statistics.median(seconds), "peak_bytes": None, "peak_tflops": None}
    if on_gpu:
        found |= {"peak_bytes": torch.cuda.max_memory_allocated()}
        found |= {"peak_tflops": peak_tflops(torch.cuda.get_device_name())}
    return found
