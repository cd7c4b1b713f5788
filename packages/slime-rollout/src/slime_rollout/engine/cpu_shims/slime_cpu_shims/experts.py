"""Routing of tokens to experts without compiled kernels, which SGLang has for CUDA and for CPUs with AMX only."""

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def register():
    """Compute the top-k in torch, and note the experts that are asked for in plain memory."""
    for target, function in (
        ("sglang.srt.layers.moe.topk.fused_topk", fused_topk),
        ("sglang.srt.mem_cache.pool_host.common._cuda_host_register", lambda *_args, **_kwargs: None),
    ):
        HookRegistry.register(target, function, HookType.REPLACE)


def fused_topk(
    hidden_states,
    gating_output,
    topk,
    renormalize,
    correction_bias=None,
    scoring_func="softmax",
    routed_scaling_factor=None,
    apply_routed_scaling_factor_on_output=False,
    **_of_kernels,
):
    """The weights and numbers of each token's experts."""
    from sglang.srt.layers.moe import topk as of_sglang

    weights, ids = of_sglang.fused_topk_torch_native(
        hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func
    )
    if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
        weights = weights * routed_scaling_factor
    return weights.float(), ids.int()
