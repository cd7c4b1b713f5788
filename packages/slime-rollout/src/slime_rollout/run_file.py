"""Run files: flags of a run in TOML or YAML, by name.

A value is read as on the command line: a number is the text that is written, ``010`` is 10, and ``1e-6`` and
``"1e-6"`` are the same. ``null``, which YAML alone has, and an empty list leave a flag out; ``true`` and ``false`` are
for switches. Flags stand at the top: tables are not read, except one that is the value of a flag that takes JSON.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError, DataError
from slime_core.files import MOST_WRITTEN, read_text
from slime_core.flags import FlagSpec
from slime_rollout.strict_yaml import WrittenFloat, load_yaml

FLAG = "--config"
OFF = "false"
"""The value of a switch that a file says is off."""
ENDS = (".toml", ".yaml", ".yml")
"""Endings of a run file's name."""
JSON = "JSON"
"""The placeholder, in help, of the value of a flag that takes a table."""
_MOST_NAMED = 4
FORM = "write a flag on each line, such as `lr = 1e-6` in TOML or `lr: 1e-6` in YAML"


def read_run_file(path: str) -> dict[str, Any]:
    """The flags of the file that ``--config`` names, as ``--rollout-batch-size``, each with its value as written.

    Raises `ConfigError` if the file cannot be read, names another one, or has a flag twice.
    """
    found = dict[str, Any]()
    for key, value in _content(path).items():
        name = "--" + str(key).removeprefix("--").replace("_", "-")
        if name == FLAG:
            raise ConfigError(f"{FLAG} {path} names another file; give one")
        if name in found:
            raise ConfigError(f"{FLAG} {path} has {name.removeprefix('--')} twice, as {key}, too; give it once")
        found[name] = value
    return found


def check_tables(path: str, given: Mapping[str, Any], known: Mapping[str, FlagSpec], *, others: bool = False) -> None:
    """Raise `ConfigError` if a table has flags in it, or is the value of a flag that takes no JSON.

    ``given`` are the flags of the file at ``path``, ``known`` all flags by name; with ``others`` there are more.
    """
    inner: list[str] = []
    for name, value in given.items():
        keys, spec = list(_keys(name.removeprefix("--"), value)), known.get(name)
        is_others = spec is None and others and not any(_flag_of(key) in known for key in keys)
        takes_json = spec is not None and spec.type is str and not spec.choices and spec.metavar in (JSON, None)
        if not is_others and not takes_json:
            inner += keys
    if inner:
        more = [f"{len(inner) - _MOST_NAMED} more"] * (len(inner) > _MOST_NAMED)
        raise ConfigError(
            f"{FLAG} {path}: {', '.join([*inner[:_MOST_NAMED], *more])} {'is' if len(inner) == 1 else 'are'} in a "
            f"table, and tables (sections, nested keys) are not read; {FORM}, at the top of the file"
        )


def _flag_of(key: str) -> str:
    """The flag that a key in a table may be."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def _keys(key: str, value: Any) -> Iterator[str]:
    """The dotted keys of what a table has in it, or several; none of another value."""
    for table in value if isinstance(value, list) else [value]:
        if isinstance(table, Mapping):
            for name, inner in table.items():
                yield from [*_keys(f"{key}.{name}", inner)] or [f"{key}.{name}"]
            if not table:
                yield key


def _content(path: str) -> Mapping[str, Any]:
    if Path(path).suffix.lower() in ENDS[1:]:
        content = load_yaml(FLAG, path, written=True)
    elif Path(path).suffix.lower() == ENDS[0]:
        try:
            content = tomllib.loads(read_text(Path(path), most=MOST_WRITTEN), parse_float=WrittenFloat.of)
        except FileNotFoundError:
            raise ConfigError(f"{FLAG} {path} does not exist; give a TOML or YAML file") from None
        except RecursionError:
            raise ConfigError(f"{FLAG} {path} is nested too deeply") from None
        except (OSError, ValueError, DataError) as error:  # a number has too many digits, too
            raise ConfigError(f"{FLAG} {path} cannot be read: {error}") from None
    else:
        raise ConfigError(f"{FLAG} {path} must end in .toml, .yaml or .yml")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{FLAG} {path} holds no flags; {FORM}")
    return content


def words_of(path: str, name: str, value: Any) -> list[str]:
    """A flag of the file as words of a command line; none for nothing, a `ConfigError` for what no flag takes."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [name] if value else [f"{name}={OFF}"]
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
        try:
            return json.dumps(value, ensure_ascii=False, default=str)
        except (ValueError, TypeError, RecursionError) as error:  # a key that is a table, a part that holds itself
            raise ConfigError(f"{FLAG} {path}: {name.removeprefix('--')} is not what JSON holds: {error}") from None
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            return str(value)
        except ValueError as error:  # of thousands of digits
            raise ConfigError(f"{FLAG} {path}: {name.removeprefix('--')} cannot be read: {error}") from None
    raise ConfigError(
        f"{FLAG} {path}: {name.removeprefix('--')} {value!r} cannot be the value of a flag; {FORM}, and put a text in "
        "quotes"
    )
