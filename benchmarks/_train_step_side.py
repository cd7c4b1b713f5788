"""One side of `train_step.py` in a process of its own: it builds its trainer, then takes a step for each line it reads.

    python _train_step_side.py SIDE DIRECTORY THREADS

Notation: B samples, L tokens of each, N trained tokens.
"""

from __future__ import annotations

import copy
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _quickstart_step import RESPONSE, rollout
from torch.profiler import ProfilerActivity, profile

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.types import Rendezvous
from slime_megatron.settings.config import MegatronConfig

KL_COEF, LEARNING_RATE, CLIP = 0.001, 1e-6, 1.0
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

Step = Callable[[], tuple[float, float]]
"""Takes a step; its loss and gradient norm."""


def main(side: str, directory: str, threads: str) -> None:
    """Answer `step` and `profile` with numbers until the input ends."""
    torch.set_num_threads(int(threads))
    builders = {"transformers": transformers_side, "bare core": bare_core_side, "trainer, unshared": unshared_side}
    step = builders.get(side, trainer_side)(Path(directory), int(threads))
    for _ in range(2):  # the first makes gradients and states
        loss, grad_norm = step()
    print(json.dumps({"loss": loss, "grad_norm": grad_norm}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"step": timed, "profile": share_of_products}[line.strip()](step)), flush=True)


def timed(step: Step) -> dict[str, float]:
    """Clock and CPU seconds of a step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return {"time": time.perf_counter() - wall, "CPU time": time.process_time() - cpu}


def share_of_products(step: Step) -> dict[str, float]:
    """The part of a step's operations, by time, that are matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    times = {each.key: each.self_cpu_time_total for each in found.key_averages()}
    return {"products": sum(times.get(name, 0.0) for name in PRODUCTS) / sum(times.values())}


def unshared_side(directory: Path, threads: int) -> Step:
    """The trainer, which computes every sample whole as transformers does."""
    return trainer_side(directory, threads, share_prompts=False)


def trainer_side(directory: Path, threads: int, *, share_prompts: bool = True) -> Step:
    """The trainer, of whichever commit is on the path."""
    from slime_megatron.service import start_worker

    config = megatron_config(directory, threads, share_prompts=share_prompts)
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=KL_COEF)
    worker = start_worker(config, algorithm, ModelShape.from_hf_config(directory / "hf"), meeting())
    shard = rollout()

    def step() -> tuple[float, float]:
        [metrics] = worker.train(shard).steps
        return metrics["loss"], metrics["grad_norm"]

    return step


def bare_core_side(directory: Path, threads: int) -> Step:
    """The same GPTModel, gradient buffers and optimizer, and nothing of the trainer's around them.

    The reference is the model itself: its pass takes as long as another's.
    """
    from slime_megatron.ranks.device import select_device

    device = select_device(threads)
    from megatron.core.distributed import finalize_model_grads

    from slime_megatron.checkpoints.contents import load_weights
    from slime_megatron.checkpoints.find import find_checkpoint
    from slime_megatron.model.build import build_model, run
    from slime_megatron.model.packing import MicroBatch
    from slime_megatron.ranks.parallel import join_ranks, seed_everything
    from slime_megatron.step.optimizer import build_optimizer, wrap_model
    from slime_megatron.step.passes import Head

    config, shape, shard = megatron_config(directory, threads), ModelShape.from_hf_config(directory / "hf"), rollout()
    join_ranks(config, meeting(), device)
    seed_everything(config.seed)
    chunks = build_model(shape, config, device, random_weights=False)
    load_weights(find_checkpoint(directory / "torch_dist"), shape, chunks)
    [model] = wrapped = wrap_model(chunks, shape, config, device)
    optimizer, head = (
        build_optimizer(wrapped, shape, config, device),
        Head(vocab_size=shape.vocab_size, temperature=1.0),
    )
    batch = MicroBatch(shard.samples, share_prompts="on").pack()
    advantages_N = torch.tensor([sample.reward for sample in shard.samples]).repeat_interleave(RESPONSE)

    def log_probs() -> torch.Tensor:
        found: torch.Tensor = head(model, run(model, batch), batch)[0]
        return found

    def step() -> tuple[float, float]:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with torch.no_grad():
            reference_N = log_probs()
        loss = grpo_loss(log_probs(), reference_N, advantages_N)
        torch.autograd.backward(loss)
        finalize_model_grads(wrapped)
        _, grad_norm, _ = optimizer.step()
        return float(loss), float(grad_norm)

    return step


def transformers_side(directory: Path, threads: int) -> Step:
    """transformers' model in bf16 with fp32 weights behind it, every sample whole, and torch's fused AdamW."""
    from transformers import AutoModelForCausalLM

    samples = rollout().samples
    tokens_BL = torch.tensor([sample.tokens.tolist() for sample in samples])
    advantages_N = torch.tensor([sample.reward for sample in samples]).repeat_interleave(RESPONSE)
    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
    reference = copy.deepcopy(model).bfloat16().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01, fused=True)

    def log_probs(which: Any) -> torch.Tensor:
        # As rows of one matrix: with logits_to_keep, torch would multiply sample by sample, many times slower.
        hidden_ND = which.model(tokens_BL[:, :-1]).last_hidden_state[:, -RESPONSE:].flatten(0, 1)
        logits_NV = which.lm_head(hidden_ND).float()
        found_N1: torch.Tensor = logits_NV.log_softmax(-1).gather(-1, tokens_BL[:, -RESPONSE:].reshape(-1, 1))
        return found_N1[:, 0]

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                reference_N = log_probs(reference)
            loss = grpo_loss(log_probs(model), reference_N, advantages_N)
        torch.autograd.backward(loss)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return float(loss), float(grad_norm)

    return step


def grpo_loss(found_N: torch.Tensor, reference_N: torch.Tensor, advantages_N: torch.Tensor) -> torch.Tensor:
    """The first step's: a ratio of 1, and Schulman's estimator k3 of the KL divergence. All samples are as long."""
    difference_N = reference_N - found_N
    gain_N = advantages_N * torch.exp(found_N - found_N.detach())
    return (KL_COEF * (difference_N.exp() - difference_N - 1) - gain_N).mean()


def megatron_config(directory: Path, threads: int, *, share_prompts: bool = True) -> MegatronConfig:
    """The same for all but the sharing; `share_prompts` was yes or no in earlier commits."""
    by_name = {True: "on", False: "off"}
    share: Any = by_name[share_prompts] if isinstance(MegatronConfig().share_prompts, str) else share_prompts
    return MegatronConfig(
        load=str(directory / "torch_dist"),
        bf16=True,
        share_prompts=share,
        trainer_threads=threads,
        lr=LEARNING_RATE,
        clip_grad=CLIP,
    )


def meeting() -> Rendezvous:
    """Of one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Rendezvous(rank=0, world_size=1, address="127.0.0.1", port=probe.getsockname()[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
