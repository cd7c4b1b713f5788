"""The vocabulary that slime's packages share. Importing it does not import torch."""

from slime_core.types.rollout import Drop, EvalReport, Keep, RolloutBatch, RolloutColumns, Verdict
from slime_core.types.sample import Group, Message, Prompt, Sample, Status
from slime_core.types.train import (
    Rendezvous,
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
    "Status",
    "SyncReport",
    "TrainReport",
    "TrainSample",
    "TrainShard",
    "TrainStep",
    "Verdict",
    "WeightUpdate",
]
