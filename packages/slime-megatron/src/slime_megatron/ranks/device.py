"""The device of a trainer rank: CUDA with NCCL, or a CPU with gloo. Importing this changes nothing.

On a CPU-only torch, stand-ins answer what Megatron-core asks of ``torch.cuda``. They change the whole process, so they
are installed only inside trainer workers, and never where CUDA is available. What they cover is what Megatron-core
0.16.1 touches on this package's paths, found by running it: the current device, streams and synchronisation that have
nothing to wait for, a generator for the "device" random state, ``device="cuda"`` in five tensor factories, ``.cuda()``,
and type names such as ``torch.cuda.FloatTensor``, by which its optimizers distinguish precisions.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._device

from slime_core.errors import SlimeError
from slime_megatron.ranks.gloo import suit_gloo

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers that glibc's mallopt gives them
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")
_MARK = "_slime_cpu_device"
_COMPILED_NEVER = "__dynamo_disable"  # torch/_compile.py keeps there what it calls instead
_LARGE = 1 << 20
_PAGE = mmap.PAGESIZE
_zeros, _empty = torch.zeros, torch.empty


class DeviceError(SlimeError):
    """The device layer was asked for where it cannot work."""


@dataclass(frozen=True)
class Device:
    """A kind of device that a trainer rank runs on; ``synchronize`` waits until its queued work is done.

    ``memory_bytes`` is all that the device has; a CPU's is shared by all ranks of a machine.
    """

    torch_device: torch.device
    backend: str
    synchronize: Callable[[], None]
    memory_bytes: int

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU standing in for a GPU."""
        return self.torch_device.type == "cpu"

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the device's memory."""
        return tensor.device.type == self.torch_device.type


def select_device(threads: int | None = None, *, deterministic: bool = False) -> Device:
    """Make this process ready for Megatron: call it once, before anything imports Megatron.

    With CUDA, the process takes the first GPU it may see (the launcher gives each rank one) and NCCL; this branch
    has not been run on CUDA. Without CUDA, the CPU stand-ins are installed and gloo is used.

    Args:
        threads: CPU threads of this rank; torch's own choice unless given.
        deterministic: Let torch refuse kernels whose result differs from run to run, and have cuBLAS and NCCL sum in
            one order; what they read must be set before their first use.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Megatron asks for it, of Transformer Engine
    if deterministic != torch.are_deterministic_algorithms_enabled():  # torch imports its compiler for it: seconds
        torch.use_deterministic_algorithms(deterministic)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        memory = torch.cuda.get_device_properties(0).total_memory
        return Device(torch.device("cuda", 0), "nccl", torch.cuda.synchronize, memory)
    install_cpu_device()
    _keep_freed_memory()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(torch.device("cpu"), "gloo", lambda: None, memory)


def install_cpu_device() -> None:
    """Install the stand-ins in this process. A second call does nothing.

    Raises:
        DeviceError: CUDA is available, or Megatron was imported before.
    """
    if getattr(torch.cuda, _MARK, False):
        return
    if torch.cuda.is_available():
        raise DeviceError("the CPU stand-ins are for machines without CUDA, and CUDA is available here; use the GPU")
    if "megatron.core" in sys.modules:
        raise DeviceError("megatron.core was imported before the CPU stand-ins; call install_cpu_device() first")
    setattr(torch.cuda, _MARK, True)
    _stand_in_for_the_runtime()
    _stand_in_for_random_state()
    _redirect_factories()
    _redirect_methods()
    suit_gloo()
    # Megatron decorates small functions with torch.compile. On a CPU that would start a C++ compiler for each of them.
    torch.compile = lambda function: function  # type: ignore[assignment]
    _keep_out_the_compiler()


def _keep_out_the_compiler() -> None:
    """Have an optimizer be made and loaded as it is. torch imports its compiler, half a second, to switch it off there.

    A torch that asks elsewhere whether it is switched off imports it as ever.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict"):
        function = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if function is not None:
            setattr(function, _COMPILED_NEVER, function)


def _keep_freed_memory() -> None:
    """Have the C library reuse what large tensors lay in. By default it gives each of over 32 MB back to the kernel.

    The kernel clears every page that it hands out: of a train step on a CPU that was a tenth. A sleeping trainer gives
    its memory back in any case.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 30)
        mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)


def _set(owner: object, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _nothing() -> Callable[..., None]:
    """A new function that does nothing: torch refuses to register one function under two names."""
    return lambda *args, **kwargs: None


class _Stream:
    """A stream or an event: nothing is ever queued on it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *args, **kwargs: _Stream()


def _stand_in_for_the_runtime() -> None:
    _set(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        device_count=lambda: 1,
        set_device=_nothing(),
        synchronize=_nothing(),
        empty_cache=_nothing(),
        stream=lambda *args, **kwargs: contextlib.nullcontext(),
        Stream=_Stream,
        current_stream=lambda *args, **kwargs: _Stream(),
        Event=_Stream,
        _lazy_init=_nothing(),
        _lazy_call=lambda call, **kwargs: call(),
    )
    _set(torch.cuda.nvtx, range_push=_nothing(), range_pop=_nothing())


def _stand_in_for_random_state() -> None:
    """A separate generator for the "device": the CPU's random state stays what the program made it."""
    generator = torch.Generator()
    of_state: dict[str, Any] = {
        "get_rng_state": lambda device=None: generator.get_state(),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
    }
    _set(torch.cuda, **of_state, manual_seed=lambda seed: generator.manual_seed(seed))
    _set(torch.cuda, default_generators=collections.defaultdict(lambda: generator))
    _set(torch.cuda.random, **of_state)


def _redirect_factories() -> None:
    # torch remembers its factories on first use to honour `with torch.device("meta")`. It must remember the
    # original ones, or code that builds a model that way (transformers does) silently gets wrong tensors.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(_lazy_zeros if name == "zeros" else getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of a tensor's shape, dtype and device; on a CPU in pages that the kernel clears when they are first used.

    ``torch.zeros_like`` writes each of them at once: of gradients and Adam's state that is a second of the start.
    """
    if tensor.device.type != "cpu":
        return torch.zeros_like(tensor)
    return _cleared(torch.empty_like(tensor, memory_format=torch.contiguous_format))


def _lazy_zeros(*size: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.zeros``; of large ones on a CPU as :func:`zeros_like`."""
    if str(kwargs.get("device")) != "cpu" or kwargs.get("requires_grad"):
        return _zeros(*size, **kwargs)
    return _cleared(_empty(*size, **kwargs))


def _cleared(tensor: torch.Tensor) -> torch.Tensor:
    """A new contiguous tensor, filled with zeros: its whole pages are given back, and are zero when they come again.

    They may come 2 MiB at once: 4 KiB at a time, those of 135M parameters took 2 s of the first step.
    """
    size = tensor.numel() * tensor.element_size()
    if size < _LARGE:
        return tensor.zero_()
    start = tensor.data_ptr()
    first, end = -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE
    pages = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
    if ctypes.CDLL(None).madvise(*pages, mmap.MADV_DONTNEED) != 0:
        return tensor.zero_()
    ctypes.CDLL(None).madvise(*pages, mmap.MADV_HUGEPAGE)
    ctypes.memset(start, 0, first - start)
    ctypes.memset(end, 0, start + size - end)
    return tensor


def _redirect_methods() -> None:
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original_type(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    def itself(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    _set(torch.Tensor, type=type_name, cuda=itself)
    _set(torch.nn.Module, cuda=itself)
