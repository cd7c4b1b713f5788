"""Megatron's ``torch_dist`` checkpoints, read and written without Megatron and without a process group.

A checkpoint is a directory: ``latest_checkpointed_iteration.txt`` names ``release`` (converted weights) or a step
(``iter_0000010``); that subdirectory holds ``.metadata`` (which tensor lies where), ``__*_*.distcp`` (the tensors),
``common.pt`` (plain values, the model's arguments among them) and ``metadata.json`` (the format's name).

A name here loads its module when it is first asked for: the headers of a checkpoint can be read without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_convert.torch_dist.reader import TorchDistReader
    from slime_convert.torch_dist.writer import WeightSource, write_release

__all__ = ["TorchDistReader", "WeightSource", "write_release"]

_MODULES = {"TorchDistReader": "reader", "WeightSource": "writer", "write_release": "writer"}


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__``."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # so that it is found at once from now on
    return value
