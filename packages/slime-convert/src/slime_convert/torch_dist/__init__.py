"""Megatron's ``torch_dist`` checkpoints, read and written without Megatron and without a process group.

A checkpoint is a directory: ``latest_checkpointed_iteration.txt`` names ``release`` (converted weights) or a step
(``iter_0000010``); that subdirectory holds ``.metadata`` (which tensor lies where), ``__*_*.distcp`` (the tensors),
``common.pt`` (plain values, the model's arguments among them) and ``metadata.json`` (the format's name).
"""

from slime_convert.torch_dist.layout import find_iteration
from slime_convert.torch_dist.reader import TorchDistReader
from slime_convert.torch_dist.writer import WeightSource, write_release

__all__ = ["TorchDistReader", "WeightSource", "find_iteration", "write_release"]
