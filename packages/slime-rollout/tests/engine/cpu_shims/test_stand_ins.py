"""The stand-ins, in a fresh interpreter that finds them as engines do: on its PYTHONPATH."""

import os
import subprocess
import sys

import pytest

from slime_rollout.engine.sglang_flags import CPU_SHIMS

CODE = """
import importlib.metadata, sys
import sgl_kernel, triton, triton.language as tl
from triton.runtime.jit import JITFunction

assert "torch" not in sys.modules
assert triton.cdiv(7, 2) == 4 and triton.next_power_of_2(5) == 8 and triton.next_power_of_2(8) == 8

@triton.jit
def kernel(x, BLOCK: tl.constexpr, y: tl.tensor | None = None):
    return x + 1

@triton.autotune(configs=[triton.Config({"BLOCK": 1}, num_warps=4)], key=["x"])
@triton.jit
def tuned(x):
    return x + 2

assert (kernel(1, 2), tuned(1)) == (2, 3) and not isinstance(kernel, JITFunction)

class Mine(triton.runtime.KernelInterface):
    pass

from sgl_kernel import some_kernel
try:
    some_kernel(1)
except NotImplementedError as error:
    assert "sgl_kernel.some_kernel was called" in str(error)
try:
    import sgl_kernel.scalar_type
except ImportError:
    pass
else:
    raise AssertionError("a submodule of the stand-in was found")
(entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="slime_cpu_shims")
assert entry.value == "slime_cpu_shims.plugin:register"
print("good", *sys.argv[1:])
"""


def run(*paths, code=CODE):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_what_sglang_imports_is_there():
    assert run(CPU_SHIMS) == "good\n"


def test_the_interpreters_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('own')\n")
    assert run(CPU_SHIMS, tmp_path) == "own\ngood\n"


@pytest.mark.parametrize("library", [None, pytest.param("broken", marks=pytest.mark.full), "fits"])
def test_torchvision_has_its_operators_once(library, tmp_path):
    """Its library may be missing, may be of another build of torch, or fits and registers them."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("import torch\nassert torch.ops.torchvision.nms\n")
    if library:
        (tmp_path / "torchvision" / "_C.so").write_text("not a library")
    loads = """
def load_library(path):
    assert path.endswith("torchvision/_C.so")
    for name in ("nms", "qnms"):
        torch.library.define("torchvision::" + name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.ops.load_library = load_library
"""
    code = f"import torch\n{loads if library == 'fits' else ''}\nimport torchvision\nprint('good')"
    assert run(CPU_SHIMS, tmp_path, code=code) == "good\n"
