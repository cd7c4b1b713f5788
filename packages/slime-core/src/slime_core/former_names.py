"""Public names of earlier versions: what is only renamed lives on with a warning, of the others an error says more."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

RENAMED = {
    "slime_core": {
        "GroupFilter": "slime_core.former_interfaces.GroupFilter",
        "Rollout": "slime_core.former_interfaces.Rollout",
    },
    "slime_core.ops": {
        "gae": "slime_core.ops.gae_advantages",
        "leave_one_out_by_group": "slime_core.rewards.leave_one_out_rewards",
        "normalize_rewards_by_group": "slime_core.rewards.normalize_group_rewards",
        "policy_loss": "slime_core.ops.policy_token_loss",
    },
}
"""By module: what a former name is now called. Arguments have the same meaning and order."""

REPLACED = {
    "slime_core": {
        "context_parallel": "nothing: how a sequence is cut over context-parallel ranks is slime_megatron's",
        "integrity": "slime_core.sums for checksums",
        "packing": "slime_core.balance.balance",
    },
    "slime_core.ops": {
        "Discounted": 'slime_core.ops.estimator_named("reinforce_plus_plus", gamma=…)',
        "Distillation": "slime_core.ops.distilled_advantages, or AlgorithmConfig(use_opd=True)",
        "GeneralizedAdvantage": 'slime_core.ops.estimator_named("ppo", gamma=…, lambd=…)',
        "compute_advantages": "slime_core.ops.policy_advantages, which takes an AlgorithmConfig",
        "grpo_advantages": "slime_core.ops.outcome_advantages",
        "sequence_log_ratio": "slime_core.ops.gspo_log_ratio, which gives a value per token",
        "token_weights_by_constant": "slime_core.ops.token_weights(…, divisor=…)",
        "token_weights_per_trajectory": "slime_core.ops.token_weights(…, trajectory_tokens=…)",
    },
}
"""By module: what to use in place of a former name whose arguments were others."""


def renamed(
    module: str, now: Mapping[str, str], replaced: Mapping[str, str] = MappingProxyType({}), *, level: int = 2
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module that names have left: ``__getattr__ = renamed(__name__, {"old": "module.new"})``.

    Args:
        module: The module's name.
        now: The present name with its module, by former name.
        replaced: What to use in place of a former name that nothing has taken over, likewise.
        level: The warning names the line so many calls up; 2 if the function is a ``__getattr__``.

    Returns:
        A function from a former name to its object, with a `DeprecationWarning`.
    """

    def find(name: str) -> Any:
        if name in now:
            said = f"{module}.{name} is now {now[name]}; the old name goes with the next release"
            warnings.warn(said, DeprecationWarning, stacklevel=level)
            home, _, attribute = now[name].rpartition(".")
            return getattr(import_module(home), attribute)
        more = f"; it was there in an earlier version, use {replaced[name]}" if name in replaced else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{more}", name=name)

    return find


def former_attribute(old: str, new: str) -> property:
    """For a class, the ``old`` name of an attribute or method: it gives the ``new`` one, and warns."""

    def find(self: Any) -> Any:
        said = f"{type(self).__name__}.{old} is now {new}; the old name goes with the next release"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(find)


class _Moved(Loader):
    """Finds modules under the names that they had, after all other finders: what is there is found as ever."""

    def __init__(self, now: Mapping[str, str]) -> None:
        self._now = now

    def find_spec(self, name: str, *_more: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in self._now else None

    def exec_module(self, module: ModuleType) -> None:
        now = self._now[module.__name__]
        warnings.warn(
            f"{module.__name__} is now {now}; the old name goes with the next release", DeprecationWarning, stacklevel=2
        )
        sys.modules[module.__name__] = import_module(now)  # the importer takes what stands there in the end


def moved_modules(package: str, now: Mapping[str, str]) -> None:
    """Let modules of ``package`` be imported under their former names, too, with a `DeprecationWarning`.

    Args:
        package: The package's name, which calls this in its ``__init__.py``.
        now: By former name, below the package's, the one that the module has now.
    """
    sys.meta_path.append(_Moved({f"{package}.{old}": f"{package}.{new}" for old, new in now.items()}))
