"""Modules that engines on a CPU do without, in a fresh interpreter that finds the shims as engines do."""

import os
import subprocess
import sys

import pytest

from slime_rollout.engine.sglang_flags import CPU_SHIMS


def run(code):
    environment = {**os.environ, "PYTHONPATH": str(CPU_SHIMS)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


LEFT_OUT = """
import sys, torch
import torch._dynamo, torch.distributed.tensor
from torch.distributed.tensor import DTensor, Shard

assert "sympy" not in sys.modules and "torch._decomp" not in sys.modules

@torch.compile
def add(x):
    return x + 1

@torch.compile(dynamic=True)
def twice(x):
    return 2 * x

@torch.compiler.disable
def minus(x):
    return x - 1

assert (add(1), twice(3), minus(3)) == (2, 6, 2)
assert not torch._dynamo.is_compiling() and not isinstance(torch.zeros(1), DTensor)
linear = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
linear(torch.ones(1, 2)).sum().backward()
optimizer.step()  # torch asks its compiler to leave it alone
try:
    torch.distributed.tensor.distribute_tensor(torch.zeros(1))
except NotImplementedError as error:
    assert "torch.distributed.tensor.distribute_tensor was called" in str(error), error
    assert "SLIME_ENGINE_IMPORT_ALL=1" in str(error), error
else:
    raise AssertionError("a function that is left out could be called")
print("good")
"""


def test_what_compiles_is_left_out_and_functions_stay_as_they_are():
    assert run(LEFT_OUT) == "good\n"


@pytest.mark.parametrize("case", [pytest.param("asked for", marks=pytest.mark.full), "another release"])
def test_modules_are_imported_as_they_are(case, monkeypatch):
    """Where the user asks for it, and where the release is not the one that was tested."""
    code = "import torch.distributed.tensor as found; print(found.__file__ is not None)"
    if case == "asked for":
        monkeypatch.setenv("SLIME_ENGINE_IMPORT_ALL", "1")
    else:
        old = 'import slime_cpu_shims.left_out as it; it.FEATURES = tuple(f._replace(release=(f.release[0], "0.")) '
        code = f"{old} for f in it.FEATURES)\n{code}"
    assert run(code) == "True\n"
