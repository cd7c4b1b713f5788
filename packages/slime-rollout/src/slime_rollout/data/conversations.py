"""What files of conversations and of preference pairs share: their rows' common fields, and how they are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slime_core.errors import DataError
from slime_rollout.data.faults import Faults
from slime_rollout.data.fields import read_metadata, read_tools
from slime_rollout.data.read import raw_rows
from slime_rollout.data.rows import RawRow, row_values

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ChatFields:
    """Which fields of any row hold what.

    Attributes:
        tool_key: Field of a list of tools (or its JSON text), optional in a row.
        metadata_key: Field of an object with further values, optional in a row.
    """

    tool_key: str = "tools"
    metadata_key: str = "metadata"


@dataclass(frozen=True, kw_only=True)
class ChatRow:
    """What any row has.

    Attributes:
        where: File and line, for messages.
        tools: Descriptions of tools, if the row has some.
        metadata: The row's further values.
    """

    where: str
    tools: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def read_rows(path: str, make: Callable[[str, dict[str, Any]], T], on_bad_data: str) -> list[T]:
    """Read a file of any format, or the slice of it that ``path`` names.

    Args:
        path: The file.
        make: Makes of a row's place and its fields what is wanted. Its `DataError` means that the row is bad.
        on_bad_data: What to do about bad rows: ``error``, or ``skip`` and log how many and which.

    Raises:
        DataError: The file is missing, empty or damaged, or a row is bad; says which and how.
    """

    def made(raw: RawRow) -> T:
        return make(raw.where, row_values(raw))

    faults = Faults(path, on_bad_data)
    rows = [row for raw in raw_rows(path) if (row := faults.catch(made, raw)) is not None]
    faults.settle()
    return rows


def chat_row(where: str, values: dict[str, Any], fields: ChatFields, used: set[str | None]) -> dict[str, Any]:
    """The fields of `ChatRow`. What of a row is not ``used`` otherwise is kept beside the metadata's own entries.

    Raises:
        DataError: Tools or metadata are something else.
    """
    known = used | {fields.tool_key, fields.metadata_key}
    own = {name: value for name, value in values.items() if name not in known}
    return {
        "where": where,
        "tools": read_tools(f"{where}: {fields.tool_key!r}", values.get(fields.tool_key)),
        "metadata": own | read_metadata(f"{where}: {fields.metadata_key!r}", values.get(fields.metadata_key)),
    }


def field_name(where: str, values: dict[str, Any], given: str | None, usual: tuple[str, ...], what: str) -> str:
    """Which field of a row holds ``what``: the one that was given, or the first of the usual ones that is there.

    Raises:
        DataError: There is none.
    """
    wanted = usual if given is None else (given,)
    for name in wanted:
        if values.get(name) is not None:
            return name
    names = " or ".join(map(repr, wanted))
    raise DataError(f"{where}: no field {names} for {what}; the row has {sorted(values)}; name the field")
