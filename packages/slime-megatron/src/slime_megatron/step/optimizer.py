"""Megatron's gradient buffers, Adam and learning-rate schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import clip_grads, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_scale

from slime_convert.shape import ModelShape
from slime_megatron.errors import TrainingError
from slime_megatron.model.build import Chunks
from slime_megatron.model.megatron_configs import ddp_config, optimizer_config
from slime_megatron.ranks.device import Device, zeros_like
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.host_optimizer import MASTER, adams_of, prepare_offload

# Also where Transformer Engine or Apex bring an Adam, torch's is used: what is done to it below is of that one, and a
# checkpoint's step lies elsewhere in theirs.
megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
distrib_optimizer.HAVE_APEX_OR_TE = False
_STEPS = "steps of a rank that trains nothing"


def wrap_model(model: Chunks, shape: ModelShape, config: MegatronConfig, device: Device) -> Chunks:
    """Give the model Megatron's fp32 gradient buffers, reduced over the data-parallel ranks."""
    settings = ddp_config(shape, config, device)
    transformer = model[0].config
    wrap = functools.partial(DistributedDataParallel, transformer, settings)
    wrapped = [wrap(chunk, disable_bucketing=number > 0) for number, chunk in enumerate(model)]
    transformer.finalize_model_grads_func = finalize_model_grads
    if settings.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in wrapped]
        transformer.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def build_optimizer(wrapped: Chunks, shape: ModelShape, config: MegatronConfig, device: Device) -> Any:
    """Megatron's optimizer with AdamW inside."""
    optimizer = get_megatron_optimizer(optimizer_config(shape, config, device), wrapped)
    # With all dense weights or all experts frozen, the optimizer of one of them is none, on every rank.
    optimizer = ChainedOptimizer([part for part in optimizer.chained_optimizers if part.optimizer is not None])
    for part in optimizer.chained_optimizers:
        for adam in adams_of(part):
            _prepare_adam(adam)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            prepare_offload(part)
        elif isinstance(part, DistributedOptimizer):
            _keep_step_on_load(part)
    _check_norm_before_step(optimizer)
    return optimizer


def check_finite(metrics: Mapping[str, float]) -> None:
    """Raise TrainingError, naming them, if metrics of an optimizer step that has not been taken are not finite."""
    if broken := [name for name, value in metrics.items() if not math.isfinite(value)]:
        raise TrainingError(
            f"{', '.join(broken)} of an optimizer step must be finite; the step was not taken, and the weights are as "
            "before; continue from the last checkpoint with a smaller --lr or --clip-grad"
        )


def _check_norm_before_step(optimizer: Any) -> None:
    """Megatron's ``step`` takes the gradient's norm before it clips and changes weights, and looks at no value."""
    norm = optimizer.get_grad_norm

    def finite_norm() -> float:
        found = float(norm())
        check_finite({"grad_norm": found})
        return found

    optimizer.get_grad_norm = finite_norm


def _scale(chunk_size: int, unused: torch.Tensor, tensors: list[list[torch.Tensor]], factor: float) -> None:
    for source, target in zip(*tensors, strict=True):
        torch.mul(source, factor, out=target)


# Without Transformer Engine and Apex, Megatron-core 0.16.1 clips every gradient by way of a copy of it.
if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
    clip_grads.multi_tensor_scale_impl = _scale


def load_optimizer(optimizer: Any, tensors: dict[Any, Any], step: float) -> None:
    """Put a checkpoint's state into the optimizer: the tensors that its ``sharded_state_dict`` asked for.

    Hyperparameters stay as they are: a checkpoint holds those of rank 0's optimizers alone, and another pipeline stage,
    or another layout, has other ones. ``step`` is the number of optimizer steps that were taken.
    """
    chain = optimizer.chained_optimizers
    parts = [tensors] if len(chain) == 1 else [tensors.get(key, {}) for key in range(len(chain))]
    for part, found in zip(chain, parts, strict=True):
        state = part.state_dict()
        inner = state.get("optimizer", state)
        if isinstance(part, DistributedOptimizer):
            for group in inner["param_groups"]:
                group["step"] = step
            state |= {"param_state": found.get("param_state", {}), "param_state_sharding_type": "fully_reshardable"}
        else:
            own: dict[Any, Any] = {_STEPS: {}} if _STEPS in part.optimizer.state else {}
            own |= found.get("optimizer", found).get("state", {})
            inner["state"] = own | {"common_step": torch.tensor(step)}
            if "fp32_from_fp16_params" in found:
                state["fp32_from_fp16_params"] = found["fp32_from_fp16_params"]
        part.load_state_dict(state)
        for param_state in part.optimizer.state.values():
            # Megatron-core 0.16.1 gives all parameters one step tensor, which each of them would then count up.
            param_state["step"] = param_state["step"].clone()
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def reset_adam(optimizer: Any) -> None:
    """Have the next step be Adam's first: its moments and its count of steps are 0 again; the learning rate goes on."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            for name, tensor in state.items():
                if name != MASTER:
                    tensor.zero_()


def saved_step(state: Any) -> float:
    """The optimizer steps that were taken, from a checkpoint's common state; Megatron-core 0.16.1 leaves 0 out."""
    if isinstance(state, dict):
        own = [float(state[name]) for name in ("common_step", "step") if name in state]
        return max(own + [saved_step(value) for value in state.values()], default=0.0)
    return max(map(saved_step, state), default=0.0) if isinstance(state, list) else 0.0


def _keep_step_on_load(part: DistributedOptimizer) -> None:
    """Let the distributed optimizer load torch's Adam.

    Megatron-core 0.16.1 takes Adam's step from the parameter groups, does not keep it per parameter in a checkpoint,
    and then asks for it per parameter (its own Adams have none).
    """
    load = part._set_main_param_and_optimizer_states

    def load_with_step(model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, place = part.model_param_group_index_map[model_param]
        main_param = part.optimizer.param_groups[group]["params"][place]
        load(model_param, {"step": part.optimizer.state[main_param]["step"], **tensors})

    part._set_main_param_and_optimizer_states = load_with_step


def _prepare_adam(adam: torch.optim.Optimizer | None) -> None:
    """Use torch's fused kernel, and make Adam's state now: checkpoints are loaded into it, before the first step."""
    if not isinstance(adam, torch.optim.AdamW):
        return
    for group in adam.param_groups:
        group["fused"], group["foreach"] = True, False
        for param in group["params"]:
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            adam.state[param] = {"step": step, "exp_avg": zeros_like(param.data), "exp_avg_sq": zeros_like(param.data)}
    if not adam.state:  # Megatron takes the steps from a parameter's state, and this rank has none that trains
        adam.state[_STEPS] = {"step": torch.zeros(())}  # type: ignore[index]
        adam.register_step_post_hook(lambda own, *unused: own.state[_STEPS]["step"].add_(1))


def build_scheduler(optimizer: Any, config: MegatronConfig) -> Any:
    """The course of the learning rate, in optimizer steps.

    As in Megatron, step k has the rate that belongs to k − 1 finished steps: the first has the start of the course, the
    last of N decay steps is one N-th above ``min_lr``. A resumed run follows today's flags, from the saved step on.
    """
    # Megatron wants a length even of a constant rate.
    decay_steps = config.lr_decay_iters or config.lr_warmup_iters + 1
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
