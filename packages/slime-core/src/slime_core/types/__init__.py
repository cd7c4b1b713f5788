"""The vocabulary that slime's packages share. Importing it does not import torch."""

from slime_core.types.rollout import EvalReport, RolloutBatch, RolloutColumns
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
from slime_core.types.verdict import Drop, Keep, Verdict

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
