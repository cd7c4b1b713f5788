"""Unpickling without running foreign code: plain types and torch's checkpoint records; anything else becomes inert.

A checkpoint may come from anywhere, and `pickle` runs whatever it names. Here a name outside the list below becomes
an empty :class:`Inert` object, so that Megatron's enums or plans in a file neither run nor stop the reading.
"""

from __future__ import annotations

import enum
import pickle
from typing import IO, Any

_PLAIN = {
    "argparse": {"Namespace"},
    "builtins": {"bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "types": {"SimpleNamespace"},
    "torch": {
        *("Size", "device", "bfloat16", "bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "complex64", "strided", "contiguous_format", "preserve_format"),
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class Inert:
    """Stands for an object of a type that is not unpickled. It takes any arguments and any state, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """An empty object."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)

    def __call__(self, *_: Any, **__: Any) -> Inert:
        """What a foreign object would return, as inert as itself."""
        return self

    def append(self, _: Any) -> None:
        """Drop an item of a foreign list."""

    def extend(self, _: Any) -> None:
        """Drop the items of a foreign list."""

    def add(self, _: Any) -> None:
        """Drop an item of a foreign set."""

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


def _enum_member(kind: Any, name: Any) -> Any:
    """What ``getattr`` gives for a known enum and the name of a member; else inert."""
    if isinstance(kind, enum.EnumMeta) and isinstance(name, str):
        return kind.__members__.get(name, Inert())
    return Inert()


class Unpickler(pickle.Unpickler):
    """An unpickler that knows plain types and torch's checkpoint records only.

    Args:
        file: The pickle, binary.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._before: dict[type, dict[str, Any]] = {}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The named type if it is plain, else :class:`Inert`."""
        if module_name == "__builtin__":
            module_name = "builtins"  # torch.save writes the names of Python 2
        if (module_name, global_name) == ("builtins", "getattr"):
            return _enum_member  # Python 3.11.0 to 3.11.3 write a member as getattr(its enum, its name)
        if global_name not in _PLAIN.get(module_name, ()):
            return Inert
        found = super().find_class(module_name, global_name)
        if isinstance(found, type):
            self._before.setdefault(found, dict(vars(found)))
        return found

    def load(self) -> Any:
        """The unpickled object.

        Raises:
            pickle.UnpicklingError: The pickle sets attributes of a type, as it could of an object. They are put back:
                the whole process would have the changed type.
        """
        try:
            return super().load()
        finally:
            changed = [kind.__name__ for kind, before in self._before.items() if _put_back(kind, before)]
            if changed:
                raise pickle.UnpicklingError(f"the pickle changes the types {', '.join(changed)}")


def _put_back(kind: type, before: dict[str, Any]) -> bool:
    """Undo what was done to a type's attributes, and tell whether anything was."""
    now = dict(vars(kind))
    changed = [name for name in before.keys() | now.keys() if before.get(name, kind) is not now.get(name, kind)]
    for name in changed:  # by `type`'s methods: enums have others, which refuse it
        if name in before:
            type.__setattr__(kind, name, before[name])
        else:
            type.__delattr__(kind, name)
    return bool(changed)


def load(file: IO[bytes]) -> Any:
    """Unpickle one object from a binary file."""
    return Unpickler(file).load()
