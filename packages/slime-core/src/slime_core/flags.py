"""Flags as data: a config dataclass's field carries its own command-line text, so a table of flags needs no parser.

A field made by :func:`flag` of a frozen dataclass ``lr_decay: float`` is the flag ``--lr-decay``. The launcher turns
such fields into one strict command line; anyone else just builds the dataclass. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """One command-line flag.

    Attributes:
        name: As typed, such as ``--rollout-batch-size``.
        dest: The field's name in its config dataclass.
        type: ``str``, ``int``, ``float`` or ``bool``; of the items if ``nargs`` is set.
        default: Value when the flag is absent; ``dataclasses.MISSING`` if it must be given.
        help: One line, without unit or default.
        unit: Unit of the value (``tokens``, ``seconds`` …), or an empty string.
        choices: Allowed values, or ``None``.
        nargs: ``None`` for a single value, ``"+"`` for several. A repeated flag then appends.
        metavar: Placeholder in the help text, or ``None``.
    """

    name: str
    dest: str
    type: type
    default: Any
    help: str
    unit: str = ""
    choices: tuple[str, ...] | None = None
    nargs: str | None = None
    metavar: str | None = None

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool and self.nargs is None


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    choices: Sequence[str] | None = None,
    name: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: The field's default; left out for a field that must be given.
        help: One line for ``--help``.
        unit: Unit of the value, shown in ``--help``.
        choices: Allowed values.
        name: The flag as typed, when it is not ``--`` + the field's name with dashes.
        metavar: Placeholder in ``--help``.

    Returns:
        What :func:`dataclasses.field` returns.
    """
    metadata = {"flag": {"help": help, "unit": unit, "choices": choices, "name": name, "metavar": metavar}}
    return dataclasses.field(default=default, metadata=metadata)


def flag_specs(config: type[Any]) -> Iterator[FlagSpec]:
    """The flags of a config dataclass, in field order. Fields not made by :func:`flag` are no flags."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        meta = field.metadata.get("flag")
        if meta is None:
            continue
        item, nargs = _item_type(hints[field.name])
        yield FlagSpec(
            name=meta["name"] or "--" + field.name.replace("_", "-"),
            dest=field.name,
            type=item,
            default=field.default,
            help=meta["help"],
            unit=meta["unit"],
            choices=tuple(meta["choices"]) if meta["choices"] else None,
            nargs=nargs,
            metavar=meta["metavar"],
        )


def _item_type(hint: Any) -> tuple[type, str | None]:
    """``int | None`` is one int; ``tuple[str, ...]`` is several strings."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], "+"
    if not isinstance(hint, type):
        raise TypeError(
            f"a flag's field must be str, int, float, bool, an optional one, or tuple[T, ...]; got {hint!r}"
        )
    return hint, None
