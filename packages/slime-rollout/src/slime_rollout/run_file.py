"""Run files: flags of a run in TOML or YAML, by name.

A value is read as on the command line: a number is the text that is written, ``010`` is 10, and ``1e-6`` and
``"1e-6"`` are the same. ``null``, which YAML alone has, and an empty list leave a flag out; ``true`` and ``false`` are
for switches.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import ConfigError
from slime_rollout.strict_yaml import WrittenFloat, load_yaml

FLAG = "--config"
OFF = "false"
"""What a switch is given that a file says is off."""
FORM = "write a flag on each line, such as `lr = 1e-6` in TOML or `lr: 1e-6` in YAML"


def read_run_file(path: str) -> dict[str, Any]:
    """The flags of the file that ``--config`` names, as ``--rollout-batch-size``, each with its value as written.

    Raises:
        ConfigError: The file cannot be read, names another one, or has a flag twice.
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


def words_of(path: str, name: str, value: Any) -> list[str]:
    """A flag of the file as words of a command line; none for nothing.

    Raises:
        ConfigError: Its value has no form that a flag takes.
    """
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
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(
        f"{FLAG} {path}: {name.removeprefix('--')} {value!r} cannot be the value of a flag; {FORM}, and put a text in "
        "quotes"
    )
