"""User-defined functions, found by the path that a flag gives, and checked before a run starts.

A file of the user becomes a submodule of this module, whose name is the file's path. So another process that imports it
by name, as pickled functions and classes make it do in pools that spawn, finds the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote, unquote

from slime_core.errors import ConfigError

__path__: list[str] = []  # makes this module a package, which has submodules: the user's files


def load_function(
    path: str, flag: str, *, arguments: Sequence[str] | None = None, usual_names: Sequence[str] = ()
) -> Callable[..., Any]:
    """Find a function, or another object that can be called, by its path.

    Args:
        path: ``pkg.mod.fn``, ``pkg.mod:fn`` or ``file.py:fn``.
        flag: The flag that gave it, for messages.
        arguments: Names of the positional arguments that it will be called with, such as ``("args", "sample")``.
            ``None`` checks nothing.
        usual_names: What ``file.py`` alone means: the first of these names that the file has.

    Raises:
        ConfigError: The path has another form, the module does not load, holds no such function, or the function does
            not take those arguments.
    """
    module_path, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if path.endswith(".py") and ":" not in path and usual_names:
        module_path, name = path, usual_names[0]
    elif not module_path or not name.isidentifier() or path.endswith(".py"):
        raise ConfigError(f"{flag} {path} names no function; write pkg.mod.fn, pkg.mod:fn or file.py:fn")
    try:
        _find_in_working_folder(module_path)
        module = _load_file(Path(module_path)) if module_path.endswith(".py") else importlib.import_module(module_path)
    except (Exception, SystemExit) as error:  # the user's module runs here, and raises what it likes
        raise ConfigError(f"{flag} {path}: {module_path} does not load: {type(error).__name__}: {error}") from error
    if module_path == path:
        name = next((usual for usual in usual_names if hasattr(module, usual)), " or ".join(usual_names))
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ConfigError(f"{flag} {path}: {module_path} has no function {name}; it has {', '.join(known) or 'none'}")
    if arguments is not None:
        _check_signature(function, f"{flag} {path}", arguments)
    return function  # type: ignore[no-any-return]


def _find_in_working_folder(module_path: str) -> None:
    """Have modules of the working folder found, after all others, for the user's file or module that is not installed.

    Not otherwise: a folder may be somebody else's, with modules of any name in it.
    """
    folder = str(Path.cwd())
    if folder in sys.path:
        return
    package = module_path.partition(".")[0]
    is_file = module_path.endswith(".py")
    if is_file or (package not in sys.modules and importlib.util.find_spec(package) is None):
        sys.path.append(folder)


class _FilesByName(MetaPathFinder):
    """Finds the user's files by the names that `_load_file` gives them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The file's; ``None`` for modules of other names."""
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        return importlib.util.spec_from_file_location(fullname, unquote(name, errors="surrogateescape"))


sys.meta_path.append(_FilesByName())


def _load_file(file: Path) -> ModuleType:
    """Import a file by its place; once per process, so that two functions of one file share its globals."""
    # A dot would part the name.
    name = quote(str(file.resolve(strict=True)), safe="/ ", errors="surrogateescape").replace(".", "%2E")
    return importlib.import_module(f"{__name__}.{name}")


def _check_signature(function: Callable[..., Any], given: str, arguments: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a built-in that does not tell
    try:
        signature.bind(*arguments)
    except TypeError:
        count = f"{len(arguments)} argument{'s' * (len(arguments) != 1)}"
        raise ConfigError(f"{given} takes {signature}; it is called with {count}, ({', '.join(arguments)})") from None
