"""The vocabulary that slime's packages share. Importing it imports neither torch nor numpy, and nor does `Sample`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.types.rollout import Drop, EvalReport, Keep, RolloutBatch, RolloutColumns, Verdict
    from slime_core.types.sample import Group, Message, Prompt, Sample, Status
    from slime_core.types.train import (
        Rendezvous,
        SleepReport,
        Span,
        SyncReport,
        TrainReport,
        TrainSample,
        TrainShard,
        TrainStep,
        WeightUpdate,
    )

__all__ = [
    "Drop",
    "EvalReport",
    "Group",
    "Keep",
    "Message",
    "Prompt",
    "Rendezvous",
    "RolloutBatch",
    "RolloutColumns",
    "Sample",
    "SleepReport",
    "Span",
    "Status",
    "SyncReport",
    "TrainReport",
    "TrainSample",
    "TrainShard",
    "TrainStep",
    "Verdict",
    "WeightUpdate",
]

_MODULES = {
    **dict.fromkeys(("Drop", "EvalReport", "Keep", "RolloutBatch", "RolloutColumns", "Verdict"), "rollout"),
    **dict.fromkeys(("Group", "Message", "Prompt", "Sample", "Status"), "sample"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'train')}"), name)
    globals()[name] = value  # so that it is found at once from now on
    return value
