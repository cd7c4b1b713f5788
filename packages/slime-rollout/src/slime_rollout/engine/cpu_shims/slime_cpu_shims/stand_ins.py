"""Modules in the place of packages that SGLang imports unconditionally but, on a CPU, never calls.

- triton: SGLang defines kernels with ``@triton.jit`` everywhere; none is launched on a CPU. The package has 1 GB and is
  slow to import.
- sgl_kernel: compiled kernels, published for CUDA and for CPUs with AMX only. The torch-native code paths don't use it.
- torchvision: the published build is for CUDA. With a CPU build of torch its import fails, because two operators have
  no schema; declaring the schemas is enough. A torchvision that fits its torch has them
  itself; declaring them twice ends the process.
"""

import contextlib
import importlib.abc
import importlib.machinery
import types
from pathlib import Path

_TRITON_VERSION = "3.0.0"


class _StandInBase:
    """Base of the classes that a stand-in hands out: takes any arguments, can be subclassed."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


class StandIn(types.ModuleType):
    """A module that has every attribute. Names in CamelCase are classes; the others can be used as decorators."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        value = type(name, (_StandInBase,), {"__module__": self.__name__}) if name[0].isupper() else StandIn(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args, **kwargs):
        """``@triton.jit`` and ``@triton.jit(...)`` both leave the function as it is."""
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function: function

    def __or__(self, other):  # in annotations such as ``tl.constexpr | None``
        return object

    __ror__ = __or__


class _SglKernel(types.ModuleType):
    """Has every kernel: importing one is fine, calling it is not.

    Submodules are not there: SGLang has fall-backs for them, and takes these on ImportError.
    """

    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_args, **_kwargs):
            raise NotImplementedError(
                f"sgl_kernel.{name} was called, but this machine has only a stand-in for sgl_kernel; "
                "this model or option of SGLang does not run on a CPU with slime's shims"
            )

        return refuse


def _fill_triton(module):
    """The few things of Triton that SGLang calls or compares while it is imported."""
    module.__version__ = _TRITON_VERSION
    module.cdiv = lambda a, b: -(a // -b)
    module.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return _SglKernel(spec.name) if spec.name == "sgl_kernel" else StandIn(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            _fill_triton(module)


class StandInFor(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel" or name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, _Loader(), is_package=name != "sgl_kernel")
        if name == "torchvision":
            _declare_torchvision_operators()
        return None


def _declare_torchvision_operators():
    """Importing torchvision looks for its operators. A build for CUDA has none where this torch is built without."""
    import torch

    found = importlib.machinery.PathFinder.find_spec("torchvision")
    for library in Path(found.origin).parent.glob("_C*.so") if found and found.origin else ():
        with contextlib.suppress(OSError):
            torch.ops.load_library(str(library))
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
