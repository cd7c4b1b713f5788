"""Public names of earlier versions, with a warning. slime-core has the same, which this package does without."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGE = "slime_convert"
MOVED: Mapping[str, tuple[str, ...]] = {
    "convert": ("shape", "mapping", "conversions.checks", "conversions.from_megatron", "conversions.to_megatron"),
    "gguf": ("conversions.from_gguf",),
    "lora": ("conversions.lora",),
    "quantize": ("quantize.formats", "quantize.expanding"),
    "quantize.convert": ("conversions.quantized",),
}
"""By a module that had public names: the modules that have them now, those that only use them last."""
RENAMED: Mapping[str, Mapping[str, str]] = {
    "check": {"Row": "Proof"},
    "families.family": {"Part": "HfPart", "Rule": "WeightRule"},
}
"""By module: new names by the former ones."""


def former(module: str, name: str) -> Any:
    """The new meaning of a former name of ``module``, with a `DeprecationWarning`; of another, an AttributeError."""
    below = module.removeprefix(f"{PACKAGE}.")
    now = RENAMED.get(below, {}).get(name)
    for home in () if name.startswith("_") else (below,) if now else MOVED.get(below, ()):
        found = getattr(import_module(f"{PACKAGE}.{home}"), now or name, None)
        if found is not None:
            said = f"{module}.{name} is now {PACKAGE}.{home}.{now or name}; the old name goes with the next release"
            warnings.warn(said, DeprecationWarning, stacklevel=2)
            return found
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)


class _FormerModules(Loader):
    """Finds modules under the names that they had, after all other finders. They look names up when asked for one."""

    def find_spec(self, name: str, *_more: Any) -> ModuleSpec | None:
        package, _, below = name.partition(".")
        return ModuleSpec(name, self) if package == PACKAGE and below in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = partial(former, module.__name__)  # type: ignore[method-assign]


def find_moved_modules() -> None:
    """Let modules be imported under their former names, too."""
    if not any(isinstance(finder, _FormerModules) for finder in sys.meta_path):
        sys.meta_path.append(_FormerModules())
