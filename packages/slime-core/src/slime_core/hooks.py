"""`HookArgs`: what user hooks get as ``args``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from slime_core.errors import ConfigError
from slime_core.flags import field_values


class HookArgs:
    """A read-only view of every flag by its name: ``args.max_turns`` is ``--max-turns``. Picklable.

    >>> args = HookArgs({"max_turns": 5})
    >>> args.max_turns, "max_turns" in args, getattr(args, "max_tokens", None)
    (5, True, None)
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    @classmethod
    def from_configs(cls, *configs: Any, **values: Any) -> HookArgs:
        """All fields of some config dataclasses, and further values.

        Raises:
            ConfigError: Two of them have the same name and different values.
        """
        merged = dict(values)
        for config in configs:
            for name, value in field_values(config).items():
                if name in merged and merged[name] != value:
                    raise ConfigError(
                        f"{name} is {merged[name]!r} and, in {type(config).__name__}, {value!r}; "
                        "a name that hooks see must have one value"
                    )
                merged[name] = value
        return cls(merged)

    def __getattr__(self, name: str) -> Any:
        # Only missing attributes come here; `_values` is one until the object has been made.
        if name == "_values":
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            nearest = difflib.get_close_matches(name, self._values, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {len(self._values)}: see dir(args)"
            raise AttributeError(f"no flag is called {name}; {hint}", name=name, obj=self) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"args is read-only, so {name} cannot be set; keep state in the hook or in sample.metadata"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args is read-only, so {name} cannot be deleted")

    def __or__(self, values: Mapping[str, Any]) -> HookArgs:
        """The same flags with further values, which win."""
        return HookArgs({**self._values, **values})

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HookArgs) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HookArgs({self._values!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return HookArgs, (self._values,)
