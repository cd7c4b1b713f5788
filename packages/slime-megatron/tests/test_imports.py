"""Importing the package changes nothing."""

import subprocess
import sys

CODE = """
import sys
import slime_megatron, slime_megatron.start, slime_megatron.config, slime_megatron.checkpoint
import slime_megatron.operations, slime_megatron.overrides
assert "torch" not in sys.modules and "megatron" not in sys.modules
import torch
def parts():
    return [torch.empty, torch.tensor, torch.compile, torch.Tensor.type, torch.cuda.current_device]
before = parts()
import slime_megatron.device, slime_megatron.packing
assert before == parts()
"""


def test_importing_changes_nothing():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=240)
