"""The file of ``--config``: flags of a run in TOML or YAML, by name. The command line wins over it.

A value is read as on the command line: a number is the text that is written, ``010`` is 10, and ``1e-6`` and
``"1e-6"`` are the same. ``null``, which YAML alone has, and an empty list leave a flag out; ``true`` and ``false`` are
for switches (`slime_launch.switches`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_launch.switches import OFF, overridden
from slime_rollout.strict_yaml import WrittenFloat, load_yaml

FLAG = "--config"
FORM = "write a flag on each line, such as `lr = 1e-6` in TOML or `lr: 1e-6` in YAML"


@dataclass(frozen=True)
class Expanded:
    """A command line with the flags of its file in it.

    Attributes:
        words: Those of the file that the command line does not replace, and then the command line.
        from_file: The first of these two.
        booleans: The flags, among these, to which the file gives ``true`` or ``false``.
        empty: Those to which it gives an empty list.
    """

    words: list[str]
    from_file: list[str]
    booleans: frozenset[str] = frozenset()
    empty: frozenset[str] = frozenset()


def with_config(argv: Sequence[str]) -> Expanded:
    """Read the file of ``--config``, if the command line has one.

    Raises:
        ConfigError: The file cannot be read, or a value has no form that a flag takes.
    """
    path = _last_value(argv)
    if path is None:
        return Expanded(list(argv), [])
    replaced, found = overridden(argv), dict[str, Any]()
    for key, value in _content(path).items():
        name = "--" + str(key).removeprefix("--").replace("_", "-")
        if name == FLAG:
            raise ConfigError(f"{FLAG} {path} names another file; give one")
        if name in found:
            raise ConfigError(f"{FLAG} {path} has {name.removeprefix('--')} twice, as {key}, too; give it once")
        found[name] = value
    given = {name: value for name, value in found.items() if name not in replaced}
    words = [word for name, value in given.items() for word in _words(path, name, value)]
    booleans = frozenset(name for name, value in given.items() if isinstance(value, bool))
    return Expanded([*words, *argv], words, booleans, frozenset(name for name, value in given.items() if value == []))


def _last_value(argv: Sequence[str]) -> str | None:
    found = None
    for place, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name == FLAG:
            found = attached if equals else next(iter(argv[place + 1 : place + 2]), None)
    return found


def _content(path: str) -> Mapping[str, Any]:
    if Path(path).suffix.lower() in (".yaml", ".yml"):
        content = load_yaml(FLAG, path, written=True)
    elif Path(path).suffix.lower() == ".toml":
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"), parse_float=WrittenFloat.of)
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
    """A flag of the file as words; none for nothing."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [name] if value else [f"{name}={OFF[0]}"]
    if not isinstance(value, list):
        return [f"{name}={_text(path, name, value)}"]
    flat = [part for item in value for part in (item if isinstance(item, list) else [item])]
    words: list[str] = []
    is_open = False  # whether one more value can follow
    for text in (_text(path, name, item) for item in flat):
        if text.startswith("-"):
            words.append(f"{name}={text}")
        else:
            words += [text] if is_open else [name, text]
        is_open = not text.startswith("-")
    return words or [name]


def _text(path: str, name: str, value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(
        f"{FLAG} {path}: {name.removeprefix('--')} {value!r} cannot be the value of a flag; {FORM}, and put a text in "
        "quotes"
    )
