"""Hooks that SGLang's plugin framework applies in each of its processes before the server starts."""

import multiprocessing

from sglang.srt.arg_groups import choices
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_cpu_shims import attention, sampling

BACKEND = "torch_native"
ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register():
    """Register all hooks. SGLang calls this."""
    _allow_reproducible_sampling()
    _attend_to_many_sequences_at_once()
    _fork_children()


def _allow_reproducible_sampling():
    """``--enable-deterministic-inference``, which makes ``sampling_seed`` count, for the torch-native backend.

    SGLang refuses it there because its batch-invariant kernels are Triton's. Without them a log-prob may still change
    in its last bits with the size of the batch; the random numbers depend on seed and position alone.
    """
    choices.add_deterministic_attention_backend_choices([BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([BACKEND])
    _replace("sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode", lambda self: None)
    _replace("sglang.kernels.ops.sampling.murmur_hash.murmur_hash32", sampling.murmur_hash32)
    _replace("sglang.srt.layers.sampler.multinomial_with_seed", sampling.multinomial_with_seed)


def _attend_to_many_sequences_at_once():
    HookRegistry.register(f"{ATTENTION}._run_sdpa_forward_decode", attention.decode, HookType.AROUND)
    HookRegistry.register(f"{ATTENTION}._run_sdpa_forward_extend", attention.extend, HookType.AROUND)


def _fork_children():
    """Fork scheduler and detokenizer from the server instead of starting them anew.

    All three import the same modules, which is nearly all of their start-up. When they are forked, the server has
    neither threads of its own nor a device, the two things that forbid forking.
    """
    HookRegistry.register(
        "sglang.srt.entrypoints.engine._set_envs_and_config",
        lambda _result, *_args: multiprocessing.set_start_method("fork", force=True),
        HookType.AFTER,
    )


def _replace(target, function):
    HookRegistry.register(target, function, HookType.REPLACE)
