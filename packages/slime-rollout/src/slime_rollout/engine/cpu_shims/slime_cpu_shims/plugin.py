"""Hooks that SGLang's plugin framework applies in each of its processes before the server starts."""

import multiprocessing
import socket

from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_cpu_shims import attention, experts, prefill, products, sampling, tokenizers

BACKEND = "torch_native"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register():
    """Register all hooks. SGLang calls this."""
    _allow_reproducible_sampling()
    _attend_to_many_sequences_at_once()
    HookRegistry.register("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", prefill.add, HookType.AROUND)
    experts.register()
    tokenizers.register()
    _fork_children()
    _meet_on_one_address()


def _allow_reproducible_sampling():
    """``--enable-deterministic-inference``, which makes ``sampling_seed`` count, for the torch-native backend.

    SGLang refuses it there because its batch-invariant kernels are Triton's. In their place `products` pads what torch
    computes, in fp32; the random numbers depend on seed and position alone.
    """
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    _replace("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", products.enable)
    _replace("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", sampling.murmur_hash32)
    _replace("sglang.srt.layers.sampler.multinomial_with_seed", sampling.multinomial_with_seed)
    narrowed = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"
    HookRegistry.register(narrowed, sampling.narrowed_sampling, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.layers.sampler.sampling_from_probs_torch", sampling.sampling_from_probs, HookType.AROUND
    )


def _attend_to_many_sequences_at_once():
    HookRegistry.register(f"{ATTENTION}._run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(f"{ATTENTION}._run_sdpa_forward_extend", attention.extend, HookType.AROUND)
    HookRegistry.register(f"{ATTENTION}.init_forward_metadata", attention.forget, HookType.AFTER)


def _fork_children():
    """Fork scheduler and detokenizer from the server instead of starting new interpreters.

    All three import the same modules, which is nearly all of their start-up. When they are forked, the server has
    neither threads of its own nor a device, the two things that forbid forking.
    """
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        lambda _result, *_args: multiprocessing.set_start_method("fork", force=True),
        HookType.AFTER,
    )


def _meet_on_one_address():
    """Have torch's store, by which the ranks of an engine meet, listen on the address they meet at, not on all."""
    HookRegistry.register("torch.distributed.rendezvous._create_c10d_store", _store, HookType.AROUND)


def _store(original, hostname, port, rank, world_size, timeout, *args, **kwargs):
    if rank != 0:
        return original(hostname, port, rank, world_size, timeout, *args, **kwargs)
    from torch.distributed import TCPStore

    family, _, _, _, where = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)[0]
    listen = socket.create_server(where, family=family).detach()
    return TCPStore(hostname, port, world_size, True, timeout, master_listen_fd=listen)


def _replace(target, function):
    HookRegistry.register(target, function, HookType.REPLACE)
