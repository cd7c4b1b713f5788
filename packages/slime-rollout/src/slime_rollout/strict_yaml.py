"""YAML files that flags name, read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from slime_core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key; YAML's readers silently take the last one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


def load_yaml(flag: str, path: str) -> Any:
    """The content of a YAML file that ``flag`` names; a `ConfigError` if it is unreadable, invalid or repeats a key."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{flag} {path} does not exist; give a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}; give a readable YAML file in UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{flag} {path}{line}: invalid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{flag} {path} is nested too deeply") from None
