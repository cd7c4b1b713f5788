"""Modules that give names of others, each loaded when it is first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def face(module: str, homes: Mapping[str, str]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a module that gives names of others.

    A type checker needs the imports, too: write them under ``if TYPE_CHECKING``, and this under ``else``, because to a
    checker a module with a ``__getattr__`` has every name.

    Args:
        module: Its ``__name__``.
        homes: By module of the same package, without the package's name: the names that it has, separated by blanks.
    """
    package = module.partition(".")[0]
    home_of = {name: f"{package}.{home}" for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            has = ", ".join(sorted(home_of))
            raise AttributeError(f"module {module!r} has no attribute {name!r}; it has {has}", name=name)
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[module], name, value)  # so that it is found at once from now on
        return value

    return sorted(home_of), find, lambda: sorted({*vars(sys.modules[module]), *home_of})
