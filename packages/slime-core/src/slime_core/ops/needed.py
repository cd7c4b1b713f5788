"""Inputs that only some configurations need. T tokens of N responses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from slime_core.errors import ConfigError


def needed(values_T: Tensor | None, who: str, what: str) -> Tensor:
    """The tensor, which ``who`` (a flag) needs.

    Raises:
        ConfigError: It is ``None``.
    """
    if values_T is None:
        raise ConfigError(f"{who} needs {what}, and none were given")
    return values_T


def needed_lengths(lengths: Sequence[int] | Tensor | None, who: str) -> Sequence[int] | Tensor:
    """The lengths, which ``who`` (a flag) needs.

    Raises:
        ConfigError: They are ``None``.
    """
    if lengths is None:
        raise ConfigError(f"{who} needs the lengths of the responses, and none were given")
    return lengths
