"""From a topology to the engines to start: their GPUs, flags and commands. Starts nothing.

python -m slime_rollout.engine.topology_plan engines.yaml --hf-checkpoint DIR --rollout-num-gpus 8
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator, Sequence

from slime_core.errors import ConfigError, SlimeError
from slime_rollout.engine.addresses import Ports
from slime_rollout.engine.config import EngineConfig
from slime_rollout.engine.server import EngineSpec, check_flags, server_command
from slime_rollout.engine.sglang_flags import engine_device
from slime_rollout.engine.topology import ServedModel, ServerGroup, Topology, read_topology

PROGRAM = "Print the engines that a file of models would start, and their commands."
# Flags that follow from a group's type.
ROLE_FLAGS = ("disaggregation-mode", "disaggregation-bootstrap-port", "encoder-only", "language-only", "encoder-urls")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """One model's engines.

    Attributes:
        name: Its name.
        trained: Whether it gets the trainer's weights.
        specs: Its engines, encoders first.
    """

    name: str
    trained: bool
    specs: tuple[EngineSpec, ...]

    @property
    def encoders(self) -> list[EngineSpec]:
        """Engines that start before the others, and get no requests from the router."""
        return [spec for spec in self.specs if spec.worker_type == "encoder"]

    @property
    def generating(self) -> list[EngineSpec]:
        """Engines behind the router."""
        return [spec for spec in self.specs if spec.worker_type != "encoder"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """All engines of a topology.

    Attributes:
        config: What they have in common.
        models: In the file's order.
    """

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
        return [
            f"{model.name}{' (trained)' if model.trained else ''}: {spec.worker_type} engine on {self._gpus(spec)}"
            for model in self.models
            for spec in model.specs
        ]

    def commands(self) -> list[str]:
        """The command line of each engine, in the order of :meth:`lines`. A fleet chooses other ports."""
        return [shlex.join(server_command(self.config, spec)) for model in self.models for spec in model.specs]

    def _gpus(self, spec: EngineSpec) -> str:
        first, count = spec.base_gpu_id, spec.ranks(self.config)
        return f"GPU {first}" if count == 1 else f"GPUs {first} to {first + count - 1}"


def plan_engines(
    topology: Topology,
    config: EngineConfig,
    *,
    hf_checkpoint: str,
    num_gpus: int,
    dtype: str = "bfloat16",
    context_length: int | None = None,
    seed: int = 0,
    device: str | None = None,
) -> EnginePlan:
    """Plan all engines. GPUs are assigned in the file's order.

    Args:
        topology: What to start.
        config: How; a group's settings win over its ``rollout_num_gpus_per_engine`` and ``sglang_args``.
        hf_checkpoint: The run's model.
        num_gpus: GPUs for generation.
        dtype: ``float32``, ``bfloat16`` …, of all models.
        context_length: Longest prompt plus response of the trained model; the model's own limit if ``None``.
        seed: Seed of requests without one; each engine gets another one.
        device: ``cpu`` or ``cuda``; detected if ``None``.

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
    trained = [model.name for model in topology.models if _is_trained(model, hf_checkpoint)]
    if len(trained) > 1:
        raise ConfigError(
            f"--sglang-config: the models {', '.join(trained)} would all get the trainer's weights; set "
            "`update_weights: false` for all but one"
        )
    where = device or str(config.sglang_args.get("device") or engine_device())
    ports = Ports(config.sglang_router_port)
    models, first_gpu, first_seed = [], 0, seed
    for model in topology.models:
        base = EngineSpec(
            model_path=model.model_path or hf_checkpoint,
            dtype=dtype,
            context_length=context_length if model.name in trained else None,
            device=where,
        )
        specs = _with_encoders(list(_specs(model, base, config, ports, first_gpu, first_seed)))
        _check_sizes(model, specs, config, is_trained=model.name in trained)
        models.append(PlannedModel(name=model.name, trained=model.name in trained, specs=tuple(specs)))
        first_gpu += model.num_gpus
        first_seed += len(specs)
    check_flags(config, [spec for planned in models for spec in planned.specs])
    return EnginePlan(config=config, models=tuple(models))


def _is_trained(model: ServedModel, hf_checkpoint: str) -> bool:
    if model.update_weights is not None:
        return model.update_weights
    return model.model_path is None or os.path.realpath(model.model_path) == os.path.realpath(hf_checkpoint)


def _specs(
    model: ServedModel, base: EngineSpec, config: EngineConfig, ports: Ports, first_gpu: int, seed: int
) -> Iterator[EngineSpec]:
    for number, group in enumerate(model.server_groups, 1):
        if group.worker_type != "placeholder":
            size = group.num_gpus_per_engine or model.num_gpus_per_engine or config.rollout_num_gpus_per_engine
            _check_group(group, size, f"--sglang-config: model {model.name}, group {number}")
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


def _check_group(group: ServerGroup, size: int, where: str) -> None:
    if group.num_gpus % size:
        raise ConfigError(
            f"{where}: num_gpus {group.num_gpus} must be a multiple of the {size} GPUs of an engine; see "
            "num_gpus_per_engine"
        )
    if roles := sorted(set(group.overrides) & set(ROLE_FLAGS)):
        raise ConfigError(f"{where}: the override {roles[0]} follows from worker_type; leave it out")


def _with_encoders(specs: Sequence[EngineSpec]) -> list[EngineSpec]:
    """Encoders first; the engines that read prompts get their addresses."""
    encoders = [spec for spec in specs if spec.worker_type == "encoder"]
    urls = tuple(spec.url for spec in encoders)
    reading = ("regular", "prefill")
    others = [spec for spec in specs if spec.worker_type != "encoder"]
    return [*encoders, *(dataclasses.replace(s, encoder_urls=urls) if s.worker_type in reading else s for s in others)]


def _check_sizes(model: ServedModel, specs: Sequence[EngineSpec], config: EngineConfig, *, is_trained: bool) -> None:
    sizes = {spec.ranks(config) for spec in specs if spec.worker_type != "encoder"}
    if is_trained and len(sizes) > 1:
        raise ConfigError(
            f"--sglang-config: engines of the trained model {model.name} have {' and '.join(map(str, sorted(sizes)))} "
            "GPUs; weights are sent to engines of one size, so give all its groups the same num_gpus_per_engine"
        )


def check_runs_here(plan: EnginePlan) -> None:
    """Check that there are GPUs where a group needs them.

    Raises:
        ConfigError: There are none.
    """
    for model in plan.models:
        for spec in model.specs:
            if spec.worker_type != "regular" and spec.device == "cpu":
                raise ConfigError(
                    f"--sglang-config: the {spec.worker_type} group of model {model.name} needs GPUs, which hand data "
                    "to each other; without CUDA only regular groups run"
                )


def main(argv: Sequence[str] | None = None) -> int:
    """Print what a file would start. Returns 0, or 2 if the file is invalid."""
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
        plan = plan_engines(
            read_topology(given.file),
            config,
            hf_checkpoint=given.hf_checkpoint,
            num_gpus=given.rollout_num_gpus,
            device=given.device,
        )
    except SlimeError as error:
        print(error, file=sys.stderr)
        return 2
    for line, command in zip(plan.lines(), plan.commands(), strict=True):
        print(f"{line}\n  {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
