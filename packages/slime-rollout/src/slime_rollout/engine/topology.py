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

import dataclasses
import difflib
import json
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from slime_core.errors import ConfigError
from slime_rollout.engine.config import SglangValue

T = TypeVar("T")
WORKER_TYPES = ("regular", "prefill", "decode", "encoder", "placeholder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerGroup:
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
    num_gpus: int
    num_gpus_per_engine: int | None = None
    overrides: Mapping[str, SglangValue] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.worker_type not in WORKER_TYPES:
            raise ConfigError(f"worker_type {self.worker_type} is unknown; {_choices(self.worker_type, WORKER_TYPES)}")
        _at_least_one(self, "num_gpus", "num_gpus_per_engine")
        if self.worker_type == "placeholder" and (self.overrides or self.num_gpus_per_engine):
            raise ConfigError("a placeholder starts nothing; give it num_gpus alone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model, behind a router of its own.

    Attributes:
        name: What hooks call it.
        model_path: Hugging Face directory; ``--hf-checkpoint`` if ``None``.
        num_gpus_per_engine: GPUs of one engine; ``--rollout-num-gpus-per-engine`` if ``None``.
        update_weights: Whether it is the model that is trained; if ``None``, where its path is ``--hf-checkpoint``.
        server_groups: Its engines.

    Raises:
        ConfigError: The name is none, or the groups do not make a server.
    """

    name: str
    model_path: str | None = None
    num_gpus_per_engine: int | None = None
    update_weights: bool | None = None
    server_groups: tuple[ServerGroup, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(f"name {self.name!r} is none; use letters, digits, '.', '_' and '-'")
        _at_least_one(self, "num_gpus_per_engine")
        types = {group.worker_type for group in self.server_groups}
        if not types & {"regular", "prefill", "decode"}:
            raise ConfigError("no server group generates; give it a regular one, or prefill and decode")
        if ("prefill" in types) != ("decode" in types):
            raise ConfigError("prefill and decode groups need each other; give both or neither")
        if "regular" in types and "prefill" in types:
            raise ConfigError(
                "its router sends requests either to regular groups or to prefill and decode, not to both"
            )

    @property
    def num_gpus(self) -> int:
        """GPUs of all its groups, those that are left free among them."""
        return sum(group.num_gpus for group in self.server_groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """All models.

    Raises:
        ConfigError: There is none, or two have one name.
    """

    models: tuple[ServedModel, ...]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if not names:
            raise ConfigError("there is no model under `sglang`")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two models are called {', '.join(twice)}; give each a name of its own")

    @property
    def num_gpus(self) -> int:
        """GPUs of all groups, those that are left free among them."""
        return sum(model.num_gpus for model in self.models)


def read_topology(path: str) -> Topology:
    """Read a YAML file.

    Args:
        path: The file.

    Raises:
        ConfigError: It cannot be read, or says something that is not understood; with the place.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--sglang-config {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--sglang-config {path} is no YAML: {' '.join(str(error).split())}") from error
    try:
        top = _mapping(content, ("sglang",), "the file")
        return Topology(models=tuple(_model(item, number) for number, item in enumerate(_list(top, "sglang"), 1)))
    except ConfigError as error:
        raise ConfigError(f"--sglang-config {path}: {error}") from error


def _model(item: Any, number: int) -> ServedModel:
    where = f"model {number}"
    names = [field.name for field in dataclasses.fields(ServedModel)]
    given = _mapping(item, (*names, "engine_groups"), where)
    where = f"model {given.get('name', number)}"
    if "engine_groups" in given:
        if "server_groups" in given:
            raise ConfigError(f"{where}: server_groups and engine_groups are the same; give one of them")
        given["server_groups"] = given.pop("engine_groups")
    _types(given, {"name": str, "model_path": str, "num_gpus_per_engine": int, "update_weights": bool}, where)
    groups = _list(given, "server_groups", where)
    given["server_groups"] = tuple(_group(group, f"{where}, group {place}") for place, group in enumerate(groups, 1))
    return _build(ServedModel, given, where)


def _group(item: Any, where: str) -> ServerGroup:
    given = _mapping(item, [field.name for field in dataclasses.fields(ServerGroup)], where)
    _types(given, {"worker_type": str, "num_gpus": int, "num_gpus_per_engine": int, "overrides": dict}, where)
    overrides: dict[str, SglangValue] = {}
    for name, value in given.get("overrides", {}).items():
        flag = str(name).replace("_", "-")
        if flag in overrides:
            raise ConfigError(f"{where}: the override {flag} is given twice, with dashes and underscores; keep one")
        overrides[flag] = _override(str(name), value, where)
    given["overrides"] = overrides
    return _build(ServerGroup, given, where)


def _override(name: str, value: Any, where: str) -> SglangValue:
    """A YAML value as SGLang's command line has it."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list) and value and all(isinstance(part, str | int | float) for part in value):
        return tuple(str(part) for part in value)
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{where}: the override {name} is {value!r}; give a text, a number, true, false or a list")


def _build(kind: type[T], given: dict[str, Any], where: str) -> T:
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: {field.name} is missing")
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _mapping(item: Any, allowed: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is {str(item)[:60]!r}; give `name: value` lines with {', '.join(allowed)}")
    for name in item:
        if name not in allowed:
            raise ConfigError(f"{where}: {name} is no key; {_choices(str(name), allowed)}")
    return {name: value for name, value in item.items() if value is not None}


def _list(given: Mapping[str, Any], name: str, where: str = "the file") -> list[Any]:
    if not isinstance(given.get(name), list) or not given[name]:
        raise ConfigError(f"{where}: {name} is {given.get(name)!r}; give a list with at least one entry")
    return list(given[name])


def _types(given: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
    words = {str: "a text", int: "a whole number", bool: "true or false", dict: "`flag: value` lines"}
    for name, kind in kinds.items():
        if name in given and type(given[name]) is not kind:
            raise ConfigError(f"{where}: {name} is {given[name]!r}; give {words[kind]}")


def _at_least_one(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be 1 or more")


def _choices(given: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that comes twice; YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused below, as no key
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} comes twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
