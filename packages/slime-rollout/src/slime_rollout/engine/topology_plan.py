"""``--sglang-config``: several models, each with groups of engines, read from YAML strictly, and the engines to start.

.. code-block:: yaml

    sglang:
      - name: actor                 # the model that is trained, because its path is --hf-checkpoint
        server_groups:
          - {worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}
          - {worker_type: decode, num_gpus: 2, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: path/to/judge
        server_groups: [{num_gpus: 1}]

Starts nothing. As a program it prints the engines' GPUs and commands:

python -m slime_rollout.engine.topology_plan engines.yaml --hf-checkpoint DIR --rollout-num-gpus 8
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slime_core.errors import ConfigError, SlimeError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig, SglangValue
from slime_rollout.engine.server import EngineSpec, check_flags, server_command
from slime_rollout.engine.sglang_flags import ROLE_FLAGS
from slime_rollout.strict_yaml import load_yaml

FLAG = "--sglang-config"
PROGRAM = "Print the engines that a file of models would start, and their commands."
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
    """Engines of one model that are all alike."""

    # `regular`: whole engines. `prefill` and `decode`: halves, which belong together. `encoder`: turns images into
    # embeddings for the model's other groups. `placeholder`: starts nothing and leaves its GPUs free.
    worker_type: str = "regular"
    num_gpus: _Count  # of all its engines
    num_gpus_per_engine: _Count | None = None  # the model's if `None`
    overrides: Mapping[str, Any] = {}  # SGLang's flags, without leading dashes; `False` leaves a switch out

    def __post_init__(self) -> None:
        if self.worker_type not in WORKER_TYPES:
            hint = _choices(self.worker_type, WORKER_TYPES)
            raise _InvalidError(f"worker_type {self.worker_type} is unknown; {hint}")
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
    """A model, behind a router of its own."""

    name: str  # what hooks call it
    model_path: str | None = None  # Hugging Face directory; `--hf-checkpoint` if `None`
    num_gpus_per_engine: _Count | None = None  # `--rollout-num-gpus-per-engine` if `None`
    update_weights: bool | None = None  # whether it is trained; if `None`, where its path is `--hf-checkpoint`
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
    """All models."""

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
    """Read a YAML file; raises `ConfigError`, with the place, if it cannot be read or holds something invalid."""
    content = load_yaml(FLAG, path, written=True)
    try:
        return msgspec.convert(_normalized(content), Topology)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{FLAG} {path}: {_explained(error, content)}") from error
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {path}: {error}") from error


def topology_of(config: EngineConfig, num_gpus: int) -> Topology | None:
    """The topology of ``--sglang-config`` or ``--prefill-num-servers``, if given; a `ConfigError` if it is unusable."""
    if config.sglang_config is not None:
        return read_topology(config.sglang_config)
    if (servers := config.prefill_num_servers) is None:
        return None
    size = config.rollout_num_gpus_per_engine
    if num_gpus < (servers + 1) * size:
        raise ConfigError(
            f"--prefill-num-servers {servers} leaves no engine to generate: --rollout-num-gpus {num_gpus} with "
            f"{size} per engine are {num_gpus // size} engines; give at most {max(num_gpus // size - 1, 0)}"
        )
    groups = (
        ServerGroup(worker_type="prefill", num_gpus=servers * size),
        ServerGroup(worker_type="decode", num_gpus=num_gpus - servers * size),
    )
    return Topology(models=(ServedModel(name="default", update_weights=True, server_groups=groups),))


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
        words = _WORDS | {"`object`": f"`name: value` lines with {', '.join(keys)}"}
        return f"{subject} is {repr(value)[:60]}; give {words.get(match[1], match[1])}"
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One model's engines. Encoders start before the others, and get no requests from the router."""

    name: str
    trained: bool  # whether it gets the trainer's weights
    encoders: tuple[EngineSpec, ...]
    generating: tuple[EngineSpec, ...]  # behind the router

    @property
    def specs(self) -> tuple[EngineSpec, ...]:
        """All of them, encoders first."""
        return self.encoders + self.generating


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """All engines of a topology, models in the file's order. ``config`` is what they have in common."""

    config: EngineConfig
    models: tuple[PlannedModel, ...]

    @property
    def trained(self) -> PlannedModel | None:
        """The model that gets the trainer's weights."""
        return next((model for model in self.models if model.trained), None)

    @property
    def num_engines(self) -> int:
        """Number of engines of all models."""
        return sum(len(model.specs) for model in self.models)

    def lines(self) -> list[str]:
        """One line for each engine: model, type and GPUs."""
        lines = []
        for model in self.models:
            for spec in model.specs:
                first, last = spec.base_gpu_id, spec.base_gpu_id + spec.ranks(self.config) - 1
                gpus = f"GPU {first}" if first == last else f"GPUs {first} to {last}"
                lines.append(
                    f"{model.name}{' (trained)' if model.trained else ''}: {spec.worker_type} engine on {gpus}"
                )
        return lines

    def commands(self) -> list[str]:
        """The command line of each engine, in the order of :meth:`lines`. A fleet chooses other ports."""
        return [shlex.join(server_command(self.config, spec)) for model in self.models for spec in model.specs]


def plan_engines(
    topology: Topology, config: EngineConfig, run: EngineSpec, *, num_gpus: int, is_installed: bool = True
) -> EnginePlan:
    """Plan all engines. GPUs are assigned in the file's order, and each engine gets another seed.

    A group's settings win over the ``rollout_num_gpus_per_engine`` and ``sglang_args`` of ``config``. ``run`` has the
    run's model, first seed, dtype and device; its context length is of the trained model only. Unless SGLang
    ``is_installed``, its flags are taken as given.

    Raises:
        ConfigError: The GPUs do not add up, more than one model is trained, or the installed SGLang does not know an
            override.
    """
    if topology.num_gpus != num_gpus:
        parts = ", ".join(f"{model.name} {model.num_gpus}" for model in topology.models)
        raise ConfigError(
            f"--sglang-config uses {topology.num_gpus} GPUs ({parts}), and --rollout-num-gpus is {num_gpus}; make them "
            "the same, perhaps with a placeholder group"
        )
    trained = [model.name for model in topology.models if _is_trained(model, run.model_path)]
    if len(trained) > 1:
        raise ConfigError(
            f"--sglang-config: the models {', '.join(trained)} would all get the trainer's weights; set "
            "`update_weights: false` for all but one"
        )
    ports = Ports(config.sglang_router_port)
    models = []
    for model in topology.models:
        base = dataclasses.replace(
            run,
            model_path=model.model_path or run.model_path,
            context_length=run.context_length if model.name in trained else None,
            returns_experts=run.returns_experts and model.name in trained,
        )
        specs = list(_specs(model, base, config, ports))
        planned = _planned(model.name, specs, trained=model.name in trained)
        sizes = sorted({spec.ranks(config) for spec in planned.generating})
        if planned.trained and len(sizes) > 1:
            raise ConfigError(
                f"--sglang-config: engines of the trained model {model.name} have {' and '.join(map(str, sizes))} "
                "GPUs; weights are sent to engines of one size, so give all its groups the same num_gpus_per_engine"
            )
        models.append(planned)
        run = dataclasses.replace(run, seed=run.seed + len(specs), base_gpu_id=run.base_gpu_id + model.num_gpus)
    if is_installed:
        check_flags(config, [spec for planned in models for spec in planned.specs])
    return EnginePlan(config=config, models=tuple(models))


def _is_trained(model: ServedModel, hf_checkpoint: str) -> bool:
    if model.update_weights is not None:
        return model.update_weights
    return model.model_path is None or os.path.realpath(model.model_path) == os.path.realpath(hf_checkpoint)


def _specs(model: ServedModel, base: EngineSpec, config: EngineConfig, ports: Ports) -> Iterator[EngineSpec]:
    """All engines of a model; ``base`` has what they share, the first seed and the first GPU."""
    seed, first_gpu = base.seed, base.base_gpu_id
    for number, group in enumerate(model.server_groups, 1):
        if group.worker_type != "placeholder":
            size = group.num_gpus_per_engine or model.num_gpus_per_engine or config.rollout_num_gpus_per_engine
            where = f"--sglang-config: model {model.name}, group {number}"
            if group.num_gpus % size:
                raise ConfigError(
                    f"{where}: num_gpus {group.num_gpus} must be a multiple of the {size} GPUs of an engine; see "
                    "num_gpus_per_engine"
                )
            if roles := sorted(set(group.overrides) & set(ROLE_FLAGS)):
                raise ConfigError(f"{where}: the override {roles[0]} follows from worker_type; leave it out")
            for place in range(group.num_gpus // size):
                yield dataclasses.replace(
                    base,
                    port=ports.take(),
                    seed=seed,
                    base_gpu_id=first_gpu + place * size,
                    tp_size=size,
                    sglang_args=group.overrides,
                    worker_type=group.worker_type,
                    bootstrap_port=ports.take() if group.worker_type == "prefill" else None,
                )
                seed += 1
        first_gpu += group.num_gpus


def _planned(name: str, specs: Sequence[EngineSpec], *, trained: bool) -> PlannedModel:
    """Gives the engines that read prompts the encoders' addresses."""
    encoders = tuple(spec for spec in specs if spec.worker_type == "encoder")
    urls = tuple(spec.url for spec in encoders)
    generating = tuple(
        dataclasses.replace(spec, encoder_urls=urls) if spec.worker_type in ("regular", "prefill") else spec
        for spec in specs
        if spec.worker_type != "encoder"
    )
    return PlannedModel(name=name, trained=trained, encoders=encoders, generating=generating)


def check_runs_here(plan: EnginePlan) -> None:
    """Raise `ConfigError` if a group needs GPUs, and there are none."""
    for model in plan.models:
        for spec in model.specs:
            if spec.worker_type != "regular" and spec.runs_on(plan.config) == "cpu":
                raise ConfigError(
                    f"the {spec.worker_type} engines of model {model.name} need GPUs, which hand data to each other; "
                    "without CUDA only regular engines run: leave out their group, or --prefill-num-servers"
                )


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a file would start; 2 if the file is invalid."""
    parser = argparse.ArgumentParser(prog="python -m slime_rollout.engine.topology_plan", description=PROGRAM)
    parser.add_argument("file", help="the YAML file")
    parser.add_argument("--hf-checkpoint", required=True, help="the run's model")
    parser.add_argument("--rollout-num-gpus", type=int, required=True, help="GPUs for generation")
    parser.add_argument("--rollout-num-gpus-per-engine", type=int, default=1, help="unless the file says")
    parser.add_argument("--sglang-python", help="interpreter that has SGLang")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what the engines run on; detected if unset")
    given = parser.parse_args(argv)
    try:
        config = EngineConfig(
            sglang_python=given.sglang_python, rollout_num_gpus_per_engine=given.rollout_num_gpus_per_engine
        )
        run = EngineSpec(model_path=given.hf_checkpoint, device=given.device)
        plan = plan_engines(read_topology(given.file), config, run, num_gpus=given.rollout_num_gpus)
    except SlimeError as error:
        print(error, file=sys.stderr)
        return 2
    for line, command in zip(plan.lines(), plan.commands(), strict=True):
        print(f"{line}\n  {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
