"""Megatron-core's optimizer whose state and steps are in host memory, of ``--optimizer-cpu-offload`` on a GPU.

It is Megatron-core 0.16.1's own `HybridDeviceOptimizer`, with what it lacks here. (Not run on CUDA.)
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MASTER = "master_param"
"""Under which name its state has the fp32 weights."""
_NOT_ADAMS = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "bias_correction"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
)


class HostAdamW(torch.optim.AdamW):
    """torch's AdamW of what is in host memory; by the class, Megatron tells it from the one on the GPU."""


# Also where Transformer Engine or Apex bring an Adam: see `slime_megatron.step.optimizer`.
megatron_optimizer.Adam, megatron_optimizer.CPUAdam = torch.optim.AdamW, HostAdamW


def adams_of(part: Any) -> list[torch.optim.Optimizer]:
    """The Adams of an optimizer of Megatron's: one, or those that are together its one in host memory."""
    if not isinstance(part.optimizer, HybridDeviceOptimizer):
        return [part.optimizer]
    for group in part.optimizer.param_groups:
        for name in _NOT_ADAMS:  # classes among them, which a checkpoint would hold
            group.pop(name, None)
    if not part.optimizer.sub_optimizers:  # nothing trains on this rank
        part.optimizer = torch.optim.AdamW(part.optimizer.param_groups)
        return [part.optimizer]
    return list(part.optimizer.sub_optimizers)


def prepare_offload(part: DistributedOptimizer) -> None:
    """Have Megatron's optimizer show the state of its Adams, which was made before, and load a checkpoint's."""
    optimizer: HybridDeviceOptimizer = part.optimizer
    optimizer._sync_sub_optimizers_state_to_hdo()

    def load(model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        """Copy: Megatron-core would keep parts of the tensors that were read, and with them the whole ones."""
        group, place = part.model_param_group_index_map[model_param]
        state = optimizer.state[optimizer.param_groups[group]["params"][place]]
        for name, tensor in tensors.items():
            state[MASTER if name == "param" else name].copy_(tensor)

    part._set_main_param_and_optimizer_states = load
