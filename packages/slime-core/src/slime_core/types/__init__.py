"""The vocabulary that slime's packages share. Importing it imports neither torch nor numpy, and nor does `Sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime_core.types.rollout import Account as Account
    from slime_core.types.rollout import Drop as Drop
    from slime_core.types.rollout import EvalReport as EvalReport
    from slime_core.types.rollout import Keep as Keep
    from slime_core.types.rollout import Progress as Progress
    from slime_core.types.rollout import RolloutBatch as RolloutBatch
    from slime_core.types.rollout import RolloutColumns as RolloutColumns
    from slime_core.types.rollout import Verdict as Verdict
    from slime_core.types.sample import Group as Group
    from slime_core.types.sample import Message as Message
    from slime_core.types.sample import Prompt as Prompt
    from slime_core.types.sample import Sample as Sample
    from slime_core.types.sample import Status as Status
    from slime_core.types.train import Rendezvous as Rendezvous
    from slime_core.types.train import SleepReport as SleepReport
    from slime_core.types.train import Span as Span
    from slime_core.types.train import SyncReport as SyncReport
    from slime_core.types.train import TrainReport as TrainReport
    from slime_core.types.train import TrainSample as TrainSample
    from slime_core.types.train import TrainShard as TrainShard
    from slime_core.types.train import TrainStep as TrainStep
    from slime_core.types.train import WeightUpdate as WeightUpdate
else:
    from slime_core.faces import face

    __all__, __getattr__, __dir__ = face(
        __name__,
        {
            "types.rollout": "Account Drop EvalReport Keep Progress RolloutBatch RolloutColumns Verdict",
            "types.sample": "Group Message Prompt Sample Status",
            "types.train": "Rendezvous SleepReport Span SyncReport TrainReport TrainSample TrainShard TrainStep "
            "WeightUpdate",
        },
    )
