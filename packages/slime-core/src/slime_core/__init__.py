"""The algorithms, types and interfaces of slime.

Importing this imports nothing else: a name loads its module when it is first asked for, and so does a module, so that
types and flag tables can be had without torch. Only `slime_core.ops` imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_core.config import AlgorithmConfig as AlgorithmConfig
    from slime_core.errors import ConfigError as ConfigError
    from slime_core.errors import DataError as DataError
    from slime_core.errors import IntegrityError as IntegrityError
    from slime_core.errors import SlimeError as SlimeError
    from slime_core.flags import FlagSpec as FlagSpec
    from slime_core.flags import flag_specs as flag_specs
    from slime_core.hooks import HookArgs as HookArgs
    from slime_core.interfaces import Batches as Batches
    from slime_core.interfaces import DataSource as DataSource
    from slime_core.interfaces import Engines as Engines
    from slime_core.interfaces import GroupReward as GroupReward
    from slime_core.interfaces import Reward as Reward
    from slime_core.interfaces import TrainerWorker as TrainerWorker
    from slime_core.interfaces import WeightChannel as WeightChannel
    from slime_core.types import *  # noqa: F403

_NAMES = {
    "config": "AlgorithmConfig",
    "errors": "ConfigError DataError IntegrityError SlimeError",
    "flags": "FlagSpec flag_specs",
    "hooks": "HookArgs",
    "interfaces": "Batches DataSource Engines GroupReward Reward TrainerWorker WeightChannel",
    "types": "Account Drop EvalReport Group Keep Message Progress Prompt Rendezvous RolloutBatch RolloutColumns Sample "
    "SleepReport Status SyncReport TrainReport TrainSample TrainShard TrainStep Verdict WeightUpdate",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__``, or a module of this package."""
    import importlib
    import importlib.util

    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value  # so that it is found at once from now on
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    from slime_core.former_names import RENAMED, REPLACED, renamed

    return renamed(__name__, RENAMED[__name__], REPLACED[__name__], level=3)(name)


def __dir__() -> list[str]:
    import pkgutil

    return sorted({*globals(), *__all__, *(module.name for module in pkgutil.iter_modules(__path__))})  # noqa: F405
