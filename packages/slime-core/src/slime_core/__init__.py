"""The algorithms, types and interfaces of slime.

Importing this imports nothing else: a name loads its module when it is first asked for, and so does a module, so that
types and flag tables can be had without torch. Only `slime_core.ops` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.config import AlgorithmConfig
    from slime_core.errors import ConfigError, DataError, IntegrityError, SlimeError
    from slime_core.flags import FlagSpec, flag_specs
    from slime_core.hooks import HookArgs
    from slime_core.interfaces import (
        DataSource,
        GroupFilter,
        GroupReward,
        Reward,
        Rollout,
        TrainerWorker,
        WeightChannel,
    )
    from slime_core.types import (
        Drop,
        EvalReport,
        Group,
        Keep,
        Message,
        Prompt,
        Rendezvous,
        RolloutBatch,
        RolloutColumns,
        Sample,
        Status,
        SyncReport,
        TrainReport,
        TrainSample,
        TrainShard,
        TrainStep,
        Verdict,
        WeightUpdate,
    )

__all__ = [
    "AlgorithmConfig",
    "ConfigError",
    "DataError",
    "DataSource",
    "Drop",
    "EvalReport",
    "FlagSpec",
    "Group",
    "GroupFilter",
    "GroupReward",
    "HookArgs",
    "IntegrityError",
    "Keep",
    "Message",
    "Prompt",
    "Rendezvous",
    "Reward",
    "Rollout",
    "RolloutBatch",
    "RolloutColumns",
    "Sample",
    "SlimeError",
    "Status",
    "SyncReport",
    "TrainReport",
    "TrainSample",
    "TrainShard",
    "TrainStep",
    "TrainerWorker",
    "Verdict",
    "WeightChannel",
    "WeightUpdate",
    "flag_specs",
]

_ELSEWHERE = {
    "AlgorithmConfig": "config",
    "ConfigError": "errors",
    "DataError": "errors",
    "DataSource": "interfaces",
    "FlagSpec": "flags",
    "GroupFilter": "interfaces",
    "GroupReward": "interfaces",
    "HookArgs": "hooks",
    "IntegrityError": "errors",
    "Reward": "interfaces",
    "Rollout": "interfaces",
    "SlimeError": "errors",
    "TrainerWorker": "interfaces",
    "WeightChannel": "interfaces",
    "flag_specs": "flags",
}


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__``, or a module of this package."""
    import importlib
    import importlib.util

    if name in __all__:
        value = getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'types')}"), name)
        globals()[name] = value  # so that it is found at once from now on
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    import pkgutil

    return sorted({*globals(), *__all__, *(module.name for module in pkgutil.iter_modules(__path__))})
