"""Flags as data: a config dataclass's field carries its own command-line text, so a table of flags needs no parser.

A field made by :func:`flag` of a frozen dataclass ``lr_decay: float`` is the flag ``--lr-decay``. It says its range,
its choices and whether it may change when a run is continued; :class:`Config` checks values by that. The launcher turns
such fields into one strict command line; anyone else just builds the dataclass. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self

from slime_core.effects import refusals, without_effect
from slime_core.errors import ConfigError
from slime_core.flag_spec import FlagSpec, Range
from slime_core.needs import Need, as_needs

__all__ = ["Config", "FlagSpec", "Range", "collected_problems", "flag", "flag_specs", "flag_values", "template_problem"]

_COLLECTED: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("collected problems", default=None)


@contextlib.contextmanager
def collected_problems() -> Iterator[list[str]]:
    """Within the block a config with invalid values is made all the same; what is wrong is added to the list.

    What flags need is not looked at there: who collects knows more, such as which of them were given.
    """
    found: list[str] = []
    token = _COLLECTED.set(found)
    try:
        yield found
    finally:
        _COLLECTED.reset(token)


class Config:
    """Base of frozen config dataclasses: whoever has one has one that was checked.

    ``class RunConfig(Config, needs=…, may_change=True)`` sets both for its flags that do not set their own.
    """

    _defaults: ClassVar[dict[str, Any]] = {"needs": None, "may_change": False}

    def __init_subclass__(
        cls, needs: Need | Sequence[Need] | None = None, may_change: bool = False, **given: Any
    ) -> None:
        super().__init_subclass__(**given)
        cls._defaults = {"needs": as_needs(needs), "may_change": may_change}

    def __post_init__(self) -> None:
        """Check every value by its flag, and then how they go together.

        Raises:
            ConfigError: Naming everything that is wrong, a line each; not within :func:`collected_problems`.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        problems = [spec.problem(values[spec.dest]) for spec in flag_specs(type(self)) if spec.dest in values]
        found = [problem for problem in problems if problem is not None] or list(self.contradictions())
        collected = _COLLECTED.get()
        if collected is None and not any(problems):
            specs = {spec.dest: spec for spec in flag_specs(type(self))}
            found += refusals(specs, flag_values(self))
        if found and collected is None:
            raise ConfigError("\n".join(found))
        if collected is not None:
            collected += found

    def contradictions(self) -> Iterator[str]:
        """Error messages about values that are valid each for itself but not together, a line each."""
        return iter(())

    @classmethod
    def of(cls, **values: Any) -> Self:
        """One made from the values of its fields, by name, also of those in records inside it.

        Raises:
            ConfigError: Naming everything that is wrong in all of them, a line each.
        """
        problems: list[str] = []
        inner: dict[str, Config] = {}
        for name, part in _parts(cls).items():
            try:
                inner[name] = part.of(**{dest: values.pop(dest) for dest in _names(part) & values.keys()})
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(**inner, **values)

    def changed(self, **values: Any) -> Self:
        """The same with other values of some fields, also of those in records inside it."""
        return self.of(**field_values(self) | values)

    def adapted(self, **values: Any) -> Self:
        """The same with other values of some flags, and defaults where a flag has no effect with these."""
        specs = {spec.dest: spec for spec in flag_specs(type(self))}
        found = flag_values(self) | values
        while idle := [
            spec
            for some in without_effect(specs, found, specs).values()
            for spec in some
            if found[spec.dest] != spec.default
        ]:
            found |= {spec.dest: spec.default for spec in idle}
        return self.changed(**found)


def flag(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    unit: str = "",
    choices: Sequence[str] | None = None,
    name: str | None = None,
    metavar: str | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    advice: str = "",
    may_change: bool | None = None,
    bare: str | None = None,
    needs: Need | Sequence[Need] | None = None,
    harmless: bool = False,
) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: The field's default; left out for a field that must be given.
        help: One line for ``--help``.
        unit: Unit of the value, shown in ``--help``.
        choices: Allowed values.
        name: The flag as typed, when it is not ``--`` + the field's name with dashes.
        metavar: Placeholder in ``--help``.
        least: Smallest number allowed; or ``above``, which every number must be above.
        above: See ``least``.
        most: Largest number allowed; or ``below``, which every number must be below.
        below: See ``most``.
        advice: What to give instead of a number out of range or another value than the choices, or why.
        may_change: Whether a run may be continued with another value: what the run is does not depend on it. As the
            class has it unless given; likewise ``needs``.
        bare: Value when the flag is given without one.
        needs: What the flag has no effect without, of `slime_core.needs`; ``()`` for nothing.
        harmless: Whether what it asks for is so anyway where it has no effect, so that this is said, not refused.
    """
    allowed = Range(least=least, above=above, most=most, below=below, advice=advice)
    metadata = {
        "help": help,
        "unit": unit,
        "choices": tuple(choices) if choices else None,
        "name": name,
        "metavar": metavar,
        "range": allowed,
        "may_change": may_change,
        "bare": bare,
        "needs": as_needs(needs),
        "harmless": harmless,
    }
    return dataclasses.field(default=default, metadata={"flag": metadata})


def template_problem(name: str, template: str | None, fields: Sequence[str]) -> str | None:
    """An error message about a flag's template of paths; ``None`` if it has each of ``fields`` and no other."""
    if template is None:
        return None
    values = dict.fromkeys(fields, 0)
    with contextlib.suppress(KeyError, IndexError, ValueError):
        filled = {template.format(**values | {field: 1}) for field in fields} | {template.format(**values)}
        if len(filled) > len(fields):
            return None
    shown = " and ".join(f"{{{field}}}" for field in fields)
    return f"{name} {template} must hold {shown}, which are filled in, and no other braces"


_SPECS: dict[type[Any], tuple[FlagSpec, ...]] = {}
"""The flags of the classes that were asked for. Type hints take long to resolve, and every config is checked."""


def flag_specs(config: type[Any]) -> tuple[FlagSpec, ...]:
    """The flags of a config dataclass and of the configs in it, in field order. Other fields are not flags."""
    if config in _SPECS:
        return _SPECS[config]
    hints, parts = typing.get_type_hints(config), _parts(config)
    specs: list[FlagSpec] = []
    for field in dataclasses.fields(config):
        meta = field.metadata.get("flag")
        if field.name in parts:
            specs += flag_specs(parts[field.name])
        if meta is None:
            continue
        item, nargs = _item_type(hints[field.name])
        home = next(base for base in config.__mro__ if field.name in inspect.get_annotations(base))
        defaults: dict[str, Any] = getattr(home, "_defaults", Config._defaults)
        spec = FlagSpec(
            name=meta["name"] or "--" + field.name.replace("_", "-"),
            dest=field.name,
            type=item,
            default=field.default,
            nargs=nargs,
            **{key: value for key, value in meta.items() if key != "name" and value is not None},
            **{key: value for key, value in defaults.items() if meta[key] is None},
        )
        specs.append(spec)
    return _SPECS.setdefault(config, tuple(specs))


def flag_values(config: Config) -> dict[str, Any]:
    """Every flag of a config, and of the configs in it, by name in Python."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if isinstance(value, Config):
            values |= flag_values(value)
        elif "flag" in field.metadata:
            values[field.name] = value
    return values


def _names(config: type[Any]) -> set[str]:
    """The fields of a config and of the configs in it, flags or not."""
    parts = _parts(config)
    own = {field.name for field in dataclasses.fields(config)} - parts.keys()
    return own.union(*map(_names, parts.values()))


def field_values(config: Any) -> dict[str, Any]:
    """Every field of a config dataclass, flag or not; those of the configs in it in their place."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values |= field_values(value) if isinstance(value, Config) else {field.name: value}
    return values


_PARTS: dict[type[Any], dict[str, type[Config]]] = {}
"""As `_SPECS`."""


def _parts(config: type[Any]) -> dict[str, type[Config]]:
    """The fields that are configs themselves."""
    if config not in _PARTS:
        hints = typing.get_type_hints(config).items()
        _PARTS[config] = {name: hint for name, hint in hints if isinstance(hint, type) and issubclass(hint, Config)}
    return _PARTS[config]


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
