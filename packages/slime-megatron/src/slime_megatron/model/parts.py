"""The parts of Megatron's GPTModel that are replaced, so that its own forward takes packed rows.

Notation: T packed tokens, D hidden channels, E half the rotated channels of a head, or experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime_convert.shape import ModelShape
from slime_megatron.model.attention import PackedParams
from slime_megatron.model.routing import ExpertChoice

VALUE_HEAD = "value_head.weight"
"""The name of a value head in checkpoints."""


class Rotary(torch.nn.Module):
    """Rotary angles by explicit position; Megatron's own counts from 0 in every row.

    Megatron asks it for a length and then for the angles of that length: the length is the packed row itself. One is
    shared by all layers, and computes the angles of a row once.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._frequencies_E = rotary_frequencies(shape)
        self._interleaved = shape.rotary_interleaved and not shape.multi_latent_attention
        self._latent = shape.multi_latent_attention
        self._scale = yarn_scale(shape) if shape.rope_type == "yarn" else None

    def get_rotary_seq_len(
        self, context: None, block: Any, inputs: Any, config: Any, packed: PackedParams, *unused: Any
    ) -> PackedParams:
        """The row itself."""
        return packed

    def forward(self, packed: PackedParams, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        """Angles of every token, T × 1 × 1 × 2E, or T × 1 × 2E in latent attention; with YaRN, also its scale."""
        if packed.angles is None:
            positions_T = packed.positions_T
            angles_TE = torch.outer(positions_T.float(), self._frequencies_E.to(positions_T.device))
            both = angles_TE.repeat_interleave(2, dim=-1) if self._interleaved else torch.cat([angles_TE, angles_TE], 1)
            packed.angles = both[:, None] if self._latent else both[:, None, None]
        return packed.angles if self._scale is None else (packed.angles, self._scale)


class HiddenOutput(ColumnParallelLinear):  # type: ignore[misc]
    """The output layer as the place of its weight: gives the hidden states back, whole under sequence parallelism."""

    def forward(self, hidden_T1D: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """The hidden states that came in."""
        if self.sequence_parallel:
            # The log-probs' gradient is already that of the whole vocabulary, so it is split here and not summed.
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden_T1D, None


class ValueHead(torch.nn.Module):
    """In place of the output layer: one number per token, in fp32. Every tensor-parallel rank has it whole.

    It starts at 0, so that a new critic says that all is worth 0, and a new reward model prefers nothing. In
    checkpoints it has a name of its own: a language model's, which have none, can be loaded too.
    """

    def __init__(self, config: Any, group: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=_device(config))
        )
        self.sequence_parallel = config.sequence_parallel
        # Each rank then sees the tokens of its part alone, and the gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._group = group

    def forward(self, hidden_T1D: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> Any:
        """The numbers of all tokens, T × 1 × 1, and no bias."""
        values_T11 = torch.nn.functional.linear(hidden_T1D.float(), self.weight.float())
        if self.sequence_parallel:
            values_T11 = gather_from_sequence_parallel_region(
                values_T11, tensor_parallel_output_grad=False, group=self._group
            )
        return values_T11, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight, under its checkpoint name."""
        name = f"{prefix}weight"
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {name: self.weight},
            "",
            {},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        state[name].key = VALUE_HEAD
        return state


class RMSNorm(torch.nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich, 2019, equation 4).

    Megatron-core's own wrapper refuses sequence parallelism; all that is missing there is the tag by which the
    weight's gradient is summed over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input. A GPU has fused kernels for it (not run on CUDA)."""
        if input.device.type != "cpu":
            return super().forward(input)
        output: torch.Tensor = _Normalise.apply(input, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return output


class _Normalise(torch.autograd.Function):
    """RMSNorm whose backward pass takes fewer passes over memory than torch's on a CPU, which is made of small parts.

    With x̂ = x · r and r = 1 / √(mean(x²) + eps), the gradient of x is (g · w − x̂ · mean(g · w · x̂)) · r, all in fp32.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        output, scale = torch.ops.aten._fused_rms_norm(input, list(weight_D.shape), weight_D, eps)
        ctx.save_for_backward(input, weight_D, scale)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Gradients of input and weight."""
        input, weight_D, scale = ctx.saved_tensors
        exact_D = weight_D.to(scale.dtype)
        normalised = torch.mul(input, scale)
        slope = torch.mul(grad, normalised)
        grad_weight_D = slope.reshape(-1, len(exact_D)).sum(0)
        mean = torch.matmul(slope, exact_D / len(exact_D)).unsqueeze(-1)
        grad_input = torch.mul(grad, exact_D).sub_(normalised.mul_(mean)).mul_(scale)
        return grad_input.to(input.dtype), grad_weight_D.to(weight_D.dtype), None


class WholeLinear(torch.nn.Module):
    """A linear layer that every tensor-parallel rank has whole, for the down-projections of latent attention.

    Megatron-core 0.16.1 splits them without Transformer Engine, and then leaves the other ranks' part out of the
    gradient of the rotated key channels, which all heads share.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Callable[..., Any], **unused: Any
    ) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=_device(config))
        self.weight = torch.nn.Parameter(weight)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_T1D: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The product, and no bias."""
        return torch.nn.functional.linear(input_T1D, self.weight), None


# Megatron-core 0.16.1 asks whether a down-projection is of one of these classes; two are mocks without Transformer
# Engine.
multi_latent_attention.Linear = WholeLinear
for _name in ("TELinear", "TEColumnParallelLinear"):
    if not isinstance(getattr(multi_latent_attention, _name), type):
        setattr(multi_latent_attention, _name, type(_name, (), {}))
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class LoadRouter(TopKRouter):  # type: ignore[misc]
    """A router that counts no padding as load, and can be told which experts to choose.

    Megatron-core 0.16.1 crashes at padding where routers have a bias.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.router_replay = ExpertChoice()

    def apply_z_loss(self, logits_TE: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attach this rank's part of ST-MoE's loss (Zoph et al., 2022, equation 5): the mean of log² Σ exp.

        It is the mean over the tokens of all ranks that share the micro-batch. Megatron-core takes that of the ranks'
        own means, so there a token counts more on a rank that has more padding.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits_TE
        squares_T = logits_TE.logsumexp(-1).square()
        counted_T = torch.ones_like(squares_T, dtype=torch.bool) if padding_mask is None else ~padding_mask
        total = counted_T.sum()
        dist.all_reduce(total, group=self.tp_cp_group)
        loss = coefficient * (squares_T * counted_T).sum() / total.clamp(min=1)
        attached: torch.Tensor = moe_utils.MoEAuxLossAutoScaler.apply(logits_TE, loss)
        return attached

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        super()._apply_expert_bias(routing_map if padding_mask is None else routing_map & ~padding_mask[:, None])


def _some_tokens(count: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's count of tokens, at least 1: a balance loss is divided by it, and a filler has padding alone."""

    def count_some(*args: Any, **kwargs: Any) -> Any:
        per_expert, own, total = count(*args, **kwargs)
        return per_expert, own, total.clamp(min=1) if torch.is_tensor(total) else total

    return count_some


router_module.get_tokens_per_expert_and_token_count = _some_tokens(router_module.get_tokens_per_expert_and_token_count)
# Megatron would keep sums of these losses for its log, for as many layers as the process's first model had.
router_module.save_to_aux_losses_tracker = lambda *args, **kwargs: None


class PostNormLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose attention and MLP outputs are normalised before they join the residual stream."""

    def __init__(
        self, config: Any, *args: Any, after_attention: bool = True, after_mlp: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(config, *args, **kwargs)
        self.self_attn_bda: Callable[..., Any]
        self.mlp_bda: Callable[..., Any]
        if after_attention:
            self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.self_attn_bda = _normalised(self.self_attn_bda, self.post_self_attn_layernorm)
        if after_mlp:
            self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            self.mlp_bda = _normalised(self.mlp_bda, self.post_mlp_layernorm)


def _normalised(make_bda: Callable[..., Any], norm: torch.nn.Module) -> Callable[..., Any]:
    """Megatron's maker of the function that adds bias, dropout and residual, with ``norm`` on what is added."""

    def make(*args: Any) -> Callable[..., Any]:
        add = make_bda(*args)

        def normalise_and_add(output_with_bias: Any, residual: torch.Tensor, dropout: float) -> Any:
            # The linear layers of these models have no biases.
            output, bias = output_with_bias
            return add((norm(output), bias), residual, dropout)

        return normalise_and_add

    return make


def _device(config: Any) -> torch.device | None:
    return None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())


def rotary_frequencies(shape: ModelShape) -> torch.Tensor:
    """Radians per position of each pair of channels.

    The frequency of pair e is base^(−e/E) (Su et al., 2021, section 3.2.2). Llama 3.1's scaling divides it by
    ``rope_scaling_factor`` where the wavelength exceeds the original context over ``rope_low_freq_factor``, leaves
    it alone below the original context over ``rope_high_freq_factor``, and goes over linearly in between. YaRN's (Peng
    et al., 2023, section 3.2) divides by ``rotary_scaling_factor`` the pairs that turn less than ``beta_slow`` times in
    the original context, leaves those alone that turn more than ``beta_fast`` times, and goes over linearly in e.

    Returns:
        Frequencies of shape E, fp32 on the CPU.
    """
    latent = shape.multi_latent_attention
    channels = int((shape.qk_pos_emb_head_dim or 0) if latent else shape.kv_channels * shape.rotary_percent)
    frequencies_E = 1.0 / shape.rotary_base ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    if shape.rope_type == "yarn":
        first, last = (_yarn_pair(shape, channels, turns) for turns in (shape.beta_fast, shape.beta_slow))
        if shape.yarn_rounds_range:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, channels - 1)
        pair_E = torch.arange(channels // 2, dtype=torch.float32)
        scaled_E = ((pair_E - first) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies_E * (1 - scaled_E + scaled_E / shape.rotary_scaling_factor)
    if not shape.use_rope_scaling:
        return frequencies_E
    context = shape.rope_original_max_position_embeddings
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    wavelengths_E = 2 * math.pi / frequencies_E
    kept_E = ((context / wavelengths_E - low) / (high - low)).clamp(0, 1)
    return frequencies_E * (kept_E + (1 - kept_E) / shape.rope_scaling_factor)


def _yarn_pair(shape: ModelShape, channels: int, turns: float) -> float:
    """The pair, not rounded, that turns this often in the original context (Peng et al., 2023, equation 17)."""
    context = shape.original_max_position_embeddings
    return channels * math.log(context / (2 * math.pi * turns)) / (2 * math.log(shape.rotary_base))


def yarn_scale(shape: ModelShape) -> float:
    """YaRN's factor on the rotated channels of queries and keys, as DeepSeek has it: of ``mscale``'s two settings."""
    rotated, everywhere = (
        1.0 if shape.rotary_scaling_factor <= 1 else 0.1 * coefficient * math.log(shape.rotary_scaling_factor) + 1.0
        for coefficient in (shape.mscale, shape.mscale_all_dim)
    )
    return rotated / everywhere
