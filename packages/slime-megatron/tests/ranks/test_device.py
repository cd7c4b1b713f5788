"""The CPU stand-ins do what they say, once, and only before Megatron. Each case in a process of its own."""

import subprocess
import sys

import pytest
import torch

from slime_megatron.ranks import device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without CUDA")


def run(code):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)


def test_stand_ins():
    result = run("""
import torch
from slime_megatron.ranks.device import install_cpu_device
install_cpu_device()
made = torch.empty
install_cpu_device()
assert torch.empty is made
assert torch.zeros(2, device="cuda").device.type == "cpu"
assert torch.zeros(2, device=torch.cuda.current_device()).cuda().type() == "torch.cuda.FloatTensor"
assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
with torch.device("meta"):
    assert torch.empty(2).is_meta and torch.nn.Linear(2, 2).weight.is_meta
torch.manual_seed(1); state = torch.get_rng_state()
torch.cuda.manual_seed(5); saved = torch.cuda.get_rng_state()
assert torch.equal(torch.get_rng_state(), state)
torch.cuda.manual_seed(6); assert not torch.equal(torch.cuda.get_rng_state(), saved)
torch.cuda.set_rng_state(saved); assert torch.equal(torch.cuda.get_rng_state(), saved)
""")
    assert result.returncode == 0, result.stderr


def test_memory_that_was_freed_is_kept():
    result = run("""
import ctypes, torch
from slime_megatron.ranks.device import select_device
class Figures(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Figures
def kept():  # bytes that were freed and are still the process's own
    torch.ones(64 << 20, dtype=torch.uint8)
    return mallinfo().fordblks
before = kept()
select_device(1)
after = kept()
assert before < 16 << 20 and after >= 64 << 20, (before, after)
""")
    assert result.returncode == 0, result.stderr


def test_an_optimizer_is_made_and_loaded_without_the_compiler():
    result = run("""
import sys, torch
from slime_megatron.ranks.device import install_cpu_device
install_cpu_device()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo" not in sys.modules
weight.sum().backward()
optimizer.step()
assert weight[0] < 1
""")
    assert result.returncode == 0, result.stderr


def test_too_late():
    result = run("""
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from slime_megatron.ranks.device import install_cpu_device
install_cpu_device()
""")
    assert "megatron.core was imported before" in result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 20) + 3])
def test_zeros_are_zeros_where_something_else_lay(dtype, size):
    for _ in range(3):
        torch.full((size + 64,), 7.0, dtype=dtype)  # freed at once: its memory comes again
        zeros = device.zeros_like(torch.empty(size, dtype=dtype))
        assert (zeros.shape, zeros.dtype) == ((size,), dtype)
        assert not zeros.any()
        zeros += 1
        assert zeros.sum(dtype=torch.float64) == size


def test_the_threads_of_a_rank_are_those_given(ranks, tiny_model, tiny_config):
    model, found = tiny_model("qwen3"), []
    for threads in (2, 1):
        ranks.start(1, tiny_config(trainer_threads=threads), model.shape)
        found.append(ranks.first("threads"))
    assert found == [2, 1]
