"""YAML files that flags name, read strictly.

Numbers are those of YAML 1.2 and of a command line: ``1e-6`` is one, ``010`` is 10, and ``1:30`` is a text. ``yes``,
``no``, ``on`` and ``off`` are true and false, as in YAML 1.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml

from slime_core.errors import ConfigError, DataError
from slime_core.files import MOST_WRITTEN, read_text

_DEEPEST, _MOST_VALUES = 100, 10**6


class _Written:
    """A number that is shown as its text, as it was written."""

    text: str

    def __str__(self) -> str:
        return self.text


class WrittenInt(_Written, int):
    """A whole number that is shown as it was written: ``007``."""


class WrittenFloat(_Written, float):
    """A number that is shown as it was written: ``1.10`` and ``1e-6``, not 1.1 and 1e-06."""

    @classmethod
    def of(cls, text: str) -> Self:
        """The number that a text is."""
        number = cls(text)
        number.text = text
        return number


class _Loader(yaml.SafeLoader):
    """Refuses a repeated key; YAML's readers silently take the last one."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {  # type: ignore[misc]
        first: [(tag, pattern) for tag, pattern in found if tag.rpartition(":")[2] not in ("int", "float", "value")]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        if self.flow_level >= _DEEPEST:  # PyYAML takes long for each level
            raise yaml.MarkedYAMLError(problem="brackets are nested too deeply", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        base = {"0x": 16, "0o": 8, "0b": 2}.get(text.lstrip("+-")[:2].lower(), 10)
        return int(text, base)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)\Z"), [*"-+0123456789"]
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+][0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
    [*"-+.0123456789"],
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


class _WrittenLoader(_Loader):
    def written_text(self, node: yaml.ScalarNode) -> str:
        return str(node.value)

    def written_int(self, node: yaml.ScalarNode) -> WrittenInt:
        number = WrittenInt(self.construct_yaml_int(node))
        number.text = node.value
        return number

    def written_float(self, node: yaml.ScalarNode) -> WrittenFloat:
        number = WrittenFloat(self.construct_yaml_float(node))
        number.text = node.value
        return number


_WrittenLoader.add_constructor("tag:yaml.org,2002:int", _WrittenLoader.written_int)
_WrittenLoader.add_constructor("tag:yaml.org,2002:timestamp", _WrittenLoader.written_text)
_WrittenLoader.add_constructor("tag:yaml.org,2002:float", _WrittenLoader.written_float)


def load_yaml(flag: str, path: str, *, written: bool = False) -> Any:
    """The content of a YAML file that ``flag`` names.

    With ``written``, where values may turn out to be texts, numbers are shown as they are written, and a date is the
    text that it is. Raises `ConfigError` if the file is unreadable, invalid or repeats a key.
    """
    try:
        content = yaml.load(read_text(Path(path), most=MOST_WRITTEN), _WrittenLoader if written else _Loader)
        _check_size(content)
    except FileNotFoundError:
        raise ConfigError(f"{flag} {path} does not exist; give a YAML file") from None
    except (OSError, UnicodeDecodeError, DataError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}; give a readable YAML file in UTF-8") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise ConfigError(f"{flag} {path}{line}: invalid YAML: {problem}") from None
    except RecursionError:
        raise ConfigError(f"{flag} {path} is nested too deeply") from None
    except (ValueError, OverflowError, AttributeError, TypeError) as error:  # of a number or a date, such as 2001-99-99
        raise ConfigError(f"{flag} {path} has a value that cannot be read: {error}") from None
    return content


def _check_size(content: Any) -> None:
    """Refuse what aliases, each for the same part, make much larger than the file is."""
    sizes: dict[int, int] = {}

    def size(value: Any) -> int:
        if not isinstance(value, dict | list):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = _MOST_VALUES  # of a part that holds itself
            inner = [*value, *value.values()] if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(map(size, inner))
        return sizes[id(value)]

    if size(content) >= _MOST_VALUES:
        raise yaml.YAMLError(f"aliases make {_MOST_VALUES:,} values of it or more; write them out")
