"""Hooks that SGLang's plugin framework applies in each of its processes before the server starts."""

import multiprocessing
import socket

from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_cpu_shims import attention, experts, prefill, products, sampling, tokenizers

BACKEND = "torch_native"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
SAMPLER = "sglang.srt.layers.sampler"


def register():
    """Register all hooks. SGLang calls this."""
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    for target, function, kind in HOOKS:
        HookRegistry.register(target, function, kind)


def _fork_children(_result, *_args):
    """Fork scheduler and detokenizer from the server instead of starting new interpreters.

    All three import the same modules, which is nearly all of their start-up. When they are forked, the server has
    neither threads of its own nor a device, the two things that forbid forking.
    """
    multiprocessing.set_start_method("fork", force=True)


def _meet_on_one_address(original, hostname, port, rank, world_size, timeout, *args, **kwargs):
    """Have torch's store, by which the ranks of an engine meet, listen on the address they meet at, not on all."""
    if rank != 0:
        return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
    from torch.distributed import TCPStore

    family, _, _, _, where = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
    listen = socket.create_server(where, family=family).detach()
    return TCPStore(hostname, port, world_size, True, timeout, master_listen_fd=listen)


HOOKS = (
    # `--enable-deterministic-inference`, which makes `sampling_seed` count, for the torch-native backend. SGLang
    # refuses it there because its batch-invariant kernels are Triton's. In their place `products` pads what torch
    # computes, in fp32; the random numbers depend on seed and position alone.
    ("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", products.enable, HookType.REPLACE),
    ("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", sampling.murmur_hash32, HookType.REPLACE),
    (f"{SAMPLER}.multinomial_with_seed", sampling.multinomial_with_seed, HookType.REPLACE),
    (f"{SAMPLER}.top_k_top_p_min_p_sampling_from_probs_torch", sampling.narrowed_sampling, HookType.AROUND),
    (f"{SAMPLER}.sampling_from_probs_torch", sampling.sampling_from_probs, HookType.AROUND),
    (f"{ATTENTION}._run_sdpa_forward_decode", attention.decode, HookType.AROUND),
    (f"{ATTENTION}._run_sdpa_forward_extend", attention.extend, HookType.AROUND),
    (f"{ATTENTION}.init_forward_metadata", attention.forget, HookType.AFTER),
    ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", prefill.add, HookType.AROUND),
    ("sglang.srt.layers.moe.topk.fused_topk", experts.fused_topk, HookType.REPLACE),
    # The experts that are asked for are noted in plain memory.
    ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *_args, **_kwargs: None, HookType.REPLACE),
    ("sglang.srt.utils.hf_transformers.tokenizer.get_tokenizer", tokenizers.once, HookType.AROUND),
    ("sglang.srt.entrypoints.engine.Engine._launch_scheduler_processes", tokenizers.read_ahead, HookType.BEFORE),
    ("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER),
    ("torch.distributed.rendezvous._create_c10d_store", _meet_on_one_address, HookType.AROUND),
)
"""What is changed, by what, and how."""
