"""A stand-in for host memory of a GPU, where there is none; imported in trainer ranks alone.

Every tensor counts as one of the GPU's, but what Megatron-core's optimizer copies to the CPU: that is `Host`. An
operation on tensors of both, other than a copy, is an error, as on a GPU. Core's optimizer is the real one.
"""

import functools
from unittest import mock

import torch
from megatron.core.optimizer.cpu_offloading import hybrid_optimizer
from torch.utils._pytree import tree_leaves

_CLASS = hybrid_optimizer.HybridDeviceOptimizer


class Host(torch.Tensor):
    """In host memory."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        if func.__name__ not in ("copy_", "as_subclass") and len({isinstance(each, Host) for each in tensors}) > 1:
            raise RuntimeError(f"{func.__name__} of tensors in host memory and on the GPU")
        return super().__torch_function__(func, types, args, kwargs)


def _to(tensor, device):
    if isinstance(tensor, Host) == (device == "cpu"):
        return tensor
    return tensor.clone().as_subclass(Host if device == "cpu" else torch.Tensor)


class _Torch:
    """torch, as core's optimizer sees it."""

    def __getattr__(self, name):
        return getattr(torch, name)

    @staticmethod
    def empty(*shape, device, pin_memory, **how):
        assert device == "cpu" and pin_memory
        return torch.empty(*shape, **how).as_subclass(Host)


def _with(method, **attributes):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with mock.patch.multiple(torch.Tensor, create=True, **attributes):
            return method(*args, **kwargs)

    return call


def install():
    """Have core's optimizer keep its part in `Host`; once."""
    if isinstance(hybrid_optimizer.torch, _Torch):
        return
    hybrid_optimizer.torch = _Torch()
    _CLASS._get_sub_optimizer_param_groups = _with(
        _CLASS._get_sub_optimizer_param_groups,
        is_cuda=property(lambda tensor: not isinstance(tensor, Host)),
        cpu=lambda tensor: _to(tensor, "cpu"),
        pin_memory=lambda tensor: tensor,
    )
    _CLASS._move_new_state_to_right_device = _with(_CLASS._move_new_state_to_right_device, to=_to)
