"""What a ``torch_dist`` checkpoint holds, read from ``.metadata`` and ``common.pt`` without importing torch.

Both are pickles (``common.pt`` one in a zip archive). Every class that they name becomes a :class:`_Record`, which
keeps what the pickle says about an object and runs nothing.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_convert.checkpoint import TensorInfo, tensor_info
from slime_convert.errors import CheckpointError
from slime_convert.torch_dist.layout import COMMON, METADATA

_PLAIN = {
    "builtins": {"bytearray", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"},
    "collections": {"OrderedDict"},
}


class _Record:
    """An object as a pickle describes it: the arguments that made it and the state that it was given."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any, **_: Any) -> _Record:
        record = super().__new__(cls)
        record.args = args
        return record

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __call__(self, *_: Any, **__: Any) -> _Record:
        """What a foreign object would return."""
        return self

    def append(self, _: Any) -> None:
        """Drop an item of a foreign list."""

    def add(self, _: Any) -> None:
        """Drop an item of a foreign set."""

    def __setitem__(self, _: Any, __: Any) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Makes a record of every object but plain ones."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """The named type if it is plain, else a kind of :class:`_Record` with its name."""
        if global_name in _PLAIN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        return type(global_name, (_Record,), {})

    def persistent_load(self, pid: Any) -> None:
        """The elements of a tensor, which lie elsewhere, are not read."""


@dataclass(frozen=True)
class Headers:
    """What one iteration holds.

    Attributes:
        tensors: Every tensor, optimizer state included, by its key on disk.
        files: Bytes of each file with tensors.
        arguments: Megatron's arguments in ``common.pt``: numbers, texts, switches and lists of them.
        iteration: The step that ``common.pt`` records, if it does.
    """

    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, int]
    arguments: Mapping[str, Any]
    iteration: int | None


def read_headers(iteration: Path) -> Headers:
    """Read the headers of one iteration.

    Args:
        iteration: The directory with ``.metadata``.

    Raises:
        CheckpointError: A file is missing, cut off or damaged.
    """
    path = iteration / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load().state
        tensors = {
            key: _tensor(key, record.state)
            for key, record in metadata["state_dict_metadata"].items()
            if isinstance(record.state, dict)
            # The other kind of record, of pickled objects, has an empty state.
            and "properties" in record.state
        }
        needed = _needed_bytes(metadata["storage_data"])
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise CheckpointError(f"cannot read {path} ({error!r}); the checkpoint is damaged, use another") from error
    common = _read_common(iteration / COMMON)
    step = common.get("iteration")
    return Headers(
        tensors, _check_files(iteration, needed), _arguments(common), step if isinstance(step, int) else None
    )


def _tensor(key: str, state: Mapping[str, Any]) -> TensorInfo:
    (size,) = state["size"].args
    # The state of TensorProperties is a tuple that begins with the type, whose name is all that is kept of it.
    dtype = state["properties"].state[0].__name__
    return tensor_info(str(key), dtype, tuple(int(length) for length in size))


def _needed_bytes(storage: Mapping[Any, Any]) -> dict[str, int]:
    """The least size of each file in which something lies."""
    needed: dict[str, int] = {}
    for record in storage.values():
        name, end = str(record.state["relative_path"]), int(record.state["offset"]) + int(record.state["length"])
        needed[name] = max(needed.get(name, 0), end)
    return needed


def _check_files(iteration: Path, needed: Mapping[str, int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, least in sorted(needed.items()):
        path = iteration / name
        if not path.is_file():
            gone = sum(not (iteration / other).is_file() for other in needed)
            raise CheckpointError(
                f"{gone} of the {len(needed)} files that {iteration / METADATA} names are missing, such as {name}; "
                "copy the checkpoint again, or use another"
            )
        sizes[name] = path.stat().st_size
        if sizes[name] < least:
            raise CheckpointError(
                f"{path} is cut off: it has {sizes[name]} of {least} bytes; copy the checkpoint again, or use another"
            )
    return sizes


def read_arguments(iteration: Path) -> dict[str, Any]:
    """Megatron's arguments in ``common.pt``: numbers, texts, switches and lists of them; empty if it has none.

    ``torch.load`` would not do: an archive of TorchScript under that name would be run, whatever may be unpickled.

    Args:
        iteration: The directory with ``common.pt``.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    return _arguments(_read_common(iteration / COMMON))


def _read_common(path: Path) -> Mapping[Any, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(name) as file:
                common = _Unpickler(file).load()
    except Exception as error:  # as above
        raise CheckpointError(f"cannot read {path} ({error!r}); the checkpoint is damaged, use another") from error
    return common if isinstance(common, dict) else {}


def _arguments(common: Mapping[Any, Any]) -> dict[str, Any]:
    args = common.get("args")
    args = args.state if isinstance(args, _Record) else args
    return plain_arguments(args) if isinstance(args, dict) else {}


def plain_arguments(args: Mapping[Any, Any]) -> dict[str, Any]:
    """Those of a checkpoint's arguments that are numbers, texts, switches or lists of them."""
    return {name: value for name, value in args.items() if isinstance(name, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str)
