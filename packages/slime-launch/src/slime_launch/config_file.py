"""The file of ``--config``: flags of a run in TOML or YAML, by name. The command line wins over it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_rollout.strict_yaml import load_yaml

FLAG = "--config"
FORM = "write a flag on each line, such as `lr = 1e-6` in TOML or `lr: 1e-6` in YAML"


@dataclass(frozen=True)
class Expanded:
    """A command line with the flags of its file in it.

    Attributes:
        words: Those of the file that the command line does not give itself, and then the command line.
        from_file: The first of these two.
    """

    words: list[str]
    from_file: list[str]


def with_config(argv: Sequence[str]) -> Expanded:
    """Read the file of ``--config``, if the command line has one.

    Raises:
        ConfigError: The file cannot be read, or a value has no form that a flag takes.
    """
    typed = {word.split("=")[0] for word in argv if word.startswith("--")}
    path = _last_value(argv)
    if path is None:
        return Expanded(list(argv), [])
    words: list[str] = []
    for key, value in _content(path).items():
        name = "--" + str(key).removeprefix("--").replace("_", "-")
        if name == FLAG:
            raise ConfigError(f"{FLAG} {path} names another file; give one")
        if name not in typed:
            words += _words(path, name, value)
    return Expanded([*words, *argv], words)


def _last_value(argv: Sequence[str]) -> str | None:
    found = None
    for place, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name == FLAG:
            found = attached if equals else next(iter(argv[place + 1 : place + 2]), None)
    return found


def _content(path: str) -> Mapping[str, Any]:
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        content = load_yaml(FLAG, path)
    elif Path(path).suffix.lower() == ".toml":
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{FLAG} {path} does not exist; give a TOML or YAML file") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{FLAG} {path} cannot be read: {error}") from None
    else:
        raise ConfigError(f"{FLAG} {path} must end in .toml, .yaml or .yml")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{FLAG} {path} holds no flags; {FORM}")
    return content


def _words(path: str, name: str, value: Any) -> list[str]:
    """A flag of the file as words; none for ``false`` and for nothing."""
    if value is None or value is False:
        return []
    if value is True:
        return [name]
    if isinstance(value, list):
        flat = [part for item in value for part in (item if isinstance(item, list) else [item])]
        return [name, *(_text(path, name, item) for item in flat)]
    return [f"{name}={_text(path, name, value)}"]


def _text(path: str, name: str, value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{FLAG} {path}: {name.removeprefix('--')} {value!r} cannot be the value of a flag; {FORM}")
