"""Routing of tokens to experts without compiled kernels, which SGLang has for CUDA and for CPUs with AMX only."""


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
    """The weights and numbers of each token's experts, in place of SGLang's ``fused_topk``."""
    from sglang.srt.layers.moe import topk as of_sglang

    weights, ids = of_sglang.fused_topk_torch_native(
        hidden_states, gating_output, topk, renormalize, correction_bias, scoring_func
    )
    if apply_routed_scaling_factor_on_output and routed_scaling_factor is not None:
        weights = weights * routed_scaling_factor
    return weights.float(), ids.int()
