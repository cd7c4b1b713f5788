"""Remembers what transformers finds in its files: each import reads all of them, twice, for the names they export.

The names are kept in the user's cache directory, for the installed release at its place. A copy that is edited in
place, and not installed below a ``site-packages``, is read each time.

The run's own processes use this file, too: it imports nothing of the shims.
"""

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import json
import os
import tempfile
from pathlib import Path

MODULE = "transformers.utils.import_utils"
PLACES = {"site-packages", "dist-packages"}


class Remember(importlib.abc.MetaPathFinder):
    """Has the function of transformers that reads the files remember what it found."""

    def find_spec(self, name, path=None, target=None):
        """Finds transformers' module with that function, as it is."""
        return after(name, path, _remember) if name == MODULE else None


def _remember(module):
    """Wrap the function, if this release has it."""
    original = getattr(module, "create_import_structure_from_path", None)
    if original is None:
        return
    known = {}

    def create_import_structure_from_path(module_path):
        path = Path(module_path)
        path = path.parent if path.is_file() else path
        if path.name != "models" or not PLACES & set(path.parts):
            return original(module_path)
        if path not in known:
            known[path] = _stored(path, original)
        return _decode(known[path])

    module.create_import_structure_from_path = create_import_structure_from_path


def _stored(path, read):
    """The cache's content, or else what ``read`` finds, which is kept; in a form for JSON."""
    file = _file(path)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # also JSON of something else
        stored = json.loads(file.read_bytes())
        _decode(stored)
        return stored
    found = _encode(read(str(path)))
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as partial:
            json.dump(found, partial)
        Path(partial.name).replace(file)
    return found


def _file(path):
    """Another one for each place and each installation: that of a release writes a new directory."""
    at = path.stat()
    key = json.dumps([str(path), at.st_mtime_ns, at.st_ino, sorted(beside.name for beside in path.parent.iterdir())])
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return directory / "slime" / f"transformers-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _encode(structure):
    """Keys of a structure are names of directories, or sets of what its modules need: ``{set: {module: names}}``."""
    return [
        [sorted(key), {module: sorted(names) for module, names in value.items()}]
        if isinstance(key, frozenset)
        else [key, _encode(value)]
        for key, value in structure.items()
    ]


def _decode(rows):
    return {
        (frozenset(key) if isinstance(key, list) else key): (
            {module: set(names) for module, names in value.items()} if isinstance(key, list) else _decode(value)
        )
        for key, value in rows
    }


def after(name, path, change):
    """The spec of an installed module, with ``change(module)`` called once it was executed; ``None`` without one."""
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    execute = spec.loader.exec_module

    def exec_module(module):
        execute(module)
        change(module)

    spec.loader.exec_module = exec_module
    return spec
