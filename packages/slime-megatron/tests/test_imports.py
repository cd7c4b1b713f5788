"""Importing the package changes nothing."""

import subprocess
import sys

CODE = """
import sys
import slime_megatron, slime_megatron.start, slime_megatron.settings.config, slime_megatron.checkpoints.find
import slime_megatron.settings.operations, slime_megatron.settings.overrides
assert "torch" not in sys.modules and "megatron" not in sys.modules
import torch
def parts():
    return [torch.empty, torch.tensor, torch.compile, torch.Tensor.type, torch.cuda.current_device]
before = parts()
import slime_megatron.ranks.device, slime_megatron.model.packing
assert before == parts()
"""


def test_importing_changes_nothing():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=240)
