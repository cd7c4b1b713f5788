"""Stand-ins on a CPU for the modules of Transformer Engine 2.2 that Megatron-core builds dense and MoE layers of.

They have the parameters, attributes and extra states that Transformer Engine's have, and compute the same in plain
PyTorch. Megatron-core's own wrappers around them are the real ones. Nothing here shows that a kernel is right.
"""

import contextlib
import sys
import types

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention


class _Module(torch.nn.Module):
    """Keeps an extra state, as Transformer Engine's modules do for fp8."""

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state.numel() == 0


class Linear(_Module):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        sequence_parallel,
        tp_group,
        tp_size,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        fuse_wgrad_accumulation,
        **unused,
    ):
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.parallel_mode, self.sequence_parallel = parallel_mode, sequence_parallel
        self.group, self.size, self.return_bias = tp_group, tp_size, return_bias
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        init_method(self.weight)
        # Also of layers that every rank has whole.
        self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1
        self.weight.partition_dim = int(parallel_mode == "row")
        self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=params_dtype)) if bias else torch.Tensor()
        if bias and parallel_mode == "column":
            self.bias.tensor_model_parallel, self.bias.partition_dim, self.bias.partition_stride = True, 0, 1

    def forward(self, inp, is_first_microbatch=None):
        from megatron.core.tensor_parallel import mappings

        split = self.size > 1 and self.parallel_mode is not None
        if split and self.parallel_mode == "column":
            into = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
            inp = into(inp, group=self.group)
        out = linear(inp, self.weight, self.bias if self.bias.numel() and not self.return_bias else None)
        if split and self.parallel_mode == "row":
            out_of = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
            out = out_of(out, group=self.group)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, params_dtype, **how):
        super().__init__(in_features, out_features, params_dtype=params_dtype, **how)
        assert normalization == "RMSNorm"
        self.eps = eps
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=params_dtype))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, inp, is_first_microbatch=None):
        return super().forward(rms_norm(inp, inp.shape[-1:], self.layer_norm_weight, self.eps))


class RMSNorm(_Module):
    def __init__(self, hidden_size, eps, sequence_parallel, params_dtype, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, inp):
        return rms_norm(inp, inp.shape[-1:], self.weight, self.eps)


class GroupedLinear(_Module):
    """A matrix for each of several experts; their tokens come one expert after the other."""

    calls = 0

    def __init__(
        self,
        num_gemms,
        in_features,
        out_features,
        *,
        tp_size,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        params_dtype,
        fuse_wgrad_accumulation,
        **unused,
    ):
        super().__init__()
        assert not bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.num_gemms, self.parallel_mode, self.use_bias = num_gemms, parallel_mode, False
        self.fp8_meta, self.fp8, self.fp8_calibration = {"fp8_checkpoint": False}, False, False
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
            init_method(weight)
            weight.tensor_model_parallel, weight.partition_stride = True, 1
            weight.partition_dim = int(parallel_mode == "row")
            setattr(self, f"weight{number}", weight)

    def init_fp8_metadata(self, num_gemms):
        assert num_gemms == self.num_gemms

    def forward(self, inp, m_splits, is_first_microbatch=None):
        GroupedLinear.calls += 1
        parts = inp.split(m_splits)
        return torch.cat([linear(part, getattr(self, f"weight{number}")) for number, part in enumerate(parts)])


class DotProductAttention(_Module):
    calls = 0

    def __init__(self, num_attention_heads, kv_channels, *, softmax_scale, **unused):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query,
        key,
        value,
        mask,
        *,
        qkv_format,
        attn_mask_type,
        cu_seqlens_q,
        max_seqlen_q,
        cu_seqlens_kv,
        **unused,
    ):
        assert (qkv_format, attn_mask_type) == ("thd", "padding_causal") and query.dim() == 3
        assert cu_seqlens_q[-1] == len(query) and torch.equal(cu_seqlens_q, cu_seqlens_kv)
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        DotProductAttention.calls += 1
        runs = zip(*(tensor.split(cu_seqlens_q.diff().tolist()) for tensor in (query, key, value)), strict=True)
        outputs = [
            scaled_dot_product_attention(
                *(tensor.transpose(0, 1) for tensor in run), is_causal=True, scale=self.softmax_scale, enable_gqa=True
            ).transpose(0, 1)
            for run in runs
        ]
        return torch.cat(outputs).flatten(1)


def _fused_adam(*args, **kwargs):
    raise AssertionError("torch's AdamW is to be used")


def install():
    """Before anything imports Megatron."""

    def module(name, **values):
        made = types.ModuleType(f"transformer_engine{name}")
        made.__dict__.update(values)
        sys.modules[made.__name__] = made
        return made

    class Empty:
        pass

    class NoFp8:
        @staticmethod
        def is_fp8_enabled():
            return False

    fp8 = module(".pytorch.fp8", FP8GlobalStateManager=NoFp8, fp8_autocast=lambda **unused: contextlib.nullcontext())
    distributed = module(
        ".pytorch.distributed",
        CudaRNGStatesTracker=Empty,
        activation_recompute_forward=lambda **unused: contextlib.nullcontext(),
    )
    optimizers = module(".pytorch.optimizers", FusedAdam=_fused_adam, FusedSGD=_fused_adam)
    module(".pytorch.tensor", QuantizedTensor=Empty)
    recipe = module(".common.recipe", DelayedScaling=Empty)
    parts = (Linear, LayerNormLinear, GroupedLinear, RMSNorm, DotProductAttention)
    pytorch = module(
        ".pytorch",
        **{part.__name__: part for part in parts},
        **{"distributed": distributed, "fp8": fp8, "optimizers": optimizers},
        ops=types.SimpleNamespace(Sequential=Empty, FusibleOperation=Empty),
    )
    module("", __version__="2.2.0", pytorch=pytorch, common=module(".common", recipe=recipe))
