"""``--sglang-config``: several models, each with groups of engines, read from YAML strictly.

.. code-block:: yaml

    sglang:
      - name: actor                 # the model that is trained, because its path is --hf-checkpoint
        server_groups:
          - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
          - {worker_type: decode, num_gpus: 2, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: path/to/judge
        server_groups: [{num_gpus: 1}]
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

import msgspec

from slime_core.errors import ConfigError
from slime_rollout.engine.config import SglangValue
from slime_rollout.strict_yaml import load_yaml

FLAG = "--sglang-config"
WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")
_Count = Annotated[int, msgspec.Meta(ge=1)]
# Words for msgspec's names of types.
_WORDS = {
    "`int` >= 1": "a whole number, 1 or more",
    "`int | null`": "a whole number",
    "`int`": "a whole number",
    "`str | null`": "a text",
    "`str`": "a text",
    "`bool | null`": "true or false",
    "`array` of length >= 1": "a list with at least one entry",
    "`array`": "a list",
}


class _InvalidError(ConfigError, ValueError):
    """An invalid record; msgspec adds its place to a ``ValueError``."""


class ServerGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines of one model that are all alike.

    Attributes:
        worker_type: ``regular``: whole engines. ``prefill`` and ``decode``: halves, which belong together.
            ``encoder``: turns images into embeddings for the model's other groups. ``placeholder``: starts nothing and
            leaves its GPUs free.
        num_gpus: GPUs of all its engines.
        num_gpus_per_engine: GPUs of one; the model's if ``None``.
        overrides: SGLang's flags of these engines, without leading dashes; ``False`` leaves a switch out.

    Raises:
        ConfigError: A value is outside its range.
    """

    worker_type: str = "regular"
    num_gpus: _Count
    num_gpus_per_engine: _Count | None = None
    overrides: Mapping[str, Any] = {}

    def __post_init__(self) -> None:
        if self.worker_type not in WORKER_TYPES:
            raise _InvalidError(
                f"worker_type {self.worker_type} is unknown; {_choices(self.worker_type, WORKER_TYPES)}"
            )
        if self.worker_type == "placeholder" and (self.overrides or self.num_gpus_per_engine):
            raise _InvalidError("a placeholder starts nothing; give it num_gpus alone")
        overrides: dict[str, SglangValue] = {}
        for name, value in self.overrides.items():
            flag = name.replace("_", "-")
            if flag in overrides:
                raise _InvalidError(f"the override {flag} is given twice, with dashes and underscores; keep one")
            overrides[flag] = _override(name, value)
        msgspec.structs.force_setattr(self, "overrides", overrides)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, behind a router of its own.

    Attributes:
        name: What hooks call it.
        model_path: Hugging Face directory; ``--hf-checkpoint`` if ``None``.
        num_gpus_per_engine: GPUs of one engine; ``--rollout-num-gpus-per-engine`` if ``None``.
        update_weights: Whether it is the model that is trained; if ``None``, where its path is ``--hf-checkpoint``.
        server_groups: Its engines.

    Raises:
        ConfigError: The name is invalid, or the groups do not make a server.
    """

    name: str
    model_path: str | None = None
    num_gpus_per_engine: _Count | None = None
    update_weights: bool | None = None
    server_groups: Annotated[tuple[ServerGroup, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise _InvalidError(f"name {self.name!r} is invalid; use letters, digits, '.', '_' and '-'")
        types = {group.worker_type for group in self.server_groups}
        if not types & {"regular", "prefill", "decode"}:
            raise _InvalidError("no server group generates; give it a regular one, or prefill and decode")
        if ("prefill" in types) != ("decode" in types):
            raise _InvalidError("prefill and decode groups need each other; give both or neither")
        if "regular" in types and "prefill" in types:
            raise _InvalidError(
                "its router sends requests either to regular groups or to prefill and decode, not to both"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all its groups, placeholders included."""
        return sum(group.num_gpus for group in self.server_groups)


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"models": "sglang"}):
    """All models.

    Raises:
        ConfigError: Two have one name.
    """

    models: Annotated[tuple[ServedModel, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _InvalidError(f"two models are called {', '.join(twice)}; give each another name")

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups, placeholders included."""
        return sum(model.num_gpus for model in self.models)


def read_topology(path: str) -> Topology:
    """Read a YAML file.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, or holds something invalid; with the place.
    """
    content = load_yaml(FLAG, path)
    try:
        return msgspec.convert(_normalized(content), Topology)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG} {path}: {_explained(error, content)}") from error
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error


def _normalized(value: Any) -> Any:
    """The content with ``engine_groups`` as ``server_groups``, and without empty keys, which mean the default."""
    if isinstance(value, list):
        return [_normalized(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "engine_groups" in value and "server_groups" in value:
        raise ConfigError(f"model {value.get('name')}: server_groups and engine_groups are the same; give one of them")
    return {
        "server_groups" if key == "engine_groups" else key: item if key == "overrides" else _normalized(item)
        for key, item in value.items()
        if item is not None
    }


def _explained(error: msgspec.ValidationError, content: Any) -> str:
    """An error with its place in the file and the value there, in words."""
    text, _, path = str(error).partition(" - at `$")
    value, name = content, ""
    places: list[str] = []
    keys: tuple[str, ...] = ("sglang",)
    for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if key:
            value, name = value.get(key, value.get("engine_groups")), key
            continue
        value, name = value[int(index)], ""
        given = value.get("name") if isinstance(value, dict) else None
        places.append(f"model {given or int(index) + 1}" if not places else f"group {int(index) + 1}")
        keys = (ServedModel if len(places) == 1 else ServerGroup).__struct_fields__
    where = ", ".join(places) or "the file"
    if match := re.fullmatch("Object contains unknown field `(.*)`", text):
        return f"{where}: {match[1]} is not a key; {_choices(match[1], keys)}"
    if match := re.fullmatch("Object missing required field `(.*)`", text):
        return f"{where}: {match[1]} is missing"
    if match := re.fullmatch(r"Expected (.*?)(?:, got .*)?", text):
        subject = f"{where}: {name}" if name else where
        wanted = (
            f"`name: value` lines with {', '.join(keys)}" if match[1] == "`object`" else _WORDS.get(match[1], match[1])
        )
        return f"{subject} is {repr(value)[:60]}; give {wanted}"
    return f"{where}: {text}"


def _override(name: str, value: Any) -> SglangValue:
    """A YAML value as SGLang's command line has it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(part, str | int | float) for part in value):
        return tuple(str(part) for part in value)
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise _InvalidError(f"the override {name} is {value!r}; give a text, a number, true, false or a list")


def _choices(given: str, allowed: Collection[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
