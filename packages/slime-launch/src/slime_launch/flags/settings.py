"""All of a run's settings: one frozen record per package, made from one command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.flags import flag_specs
from slime_launch.config import ClusterConfig, RunConfig
from slime_megatron.config import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig

CONFIGS: dict[str, type[Any]] = {
    "megatron": MegatronConfig,
    "engine": EngineConfig,
    "rollout": RolloutConfig,
    "algorithm": AlgorithmConfig,
    "cluster": ClusterConfig,
    "run": RunConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What one command line says.

    Attributes:
        shape: Flags of the model's shape that were given, by name; the rest comes from the Hugging Face config.
        megatron: The trainer.
        engine: Engines and router.
        rollout: Prompts, sampling, rewards, evaluation.
        algorithm: From rewards to the loss.
        cluster: GPUs and Ray.
        run: Length, evaluation interval, output.
    """

    shape: Mapping[str, Any]
    megatron: MegatronConfig
    engine: EngineConfig
    rollout: RolloutConfig
    algorithm: AlgorithmConfig
    cluster: ClusterConfig
    run: RunConfig

    def flags(self) -> dict[str, Any]:
        """Every flag by its name in Python, given or not, as plain values that JSON can hold."""
        values: dict[str, Any] = dict(self.shape)
        for part in CONFIGS:
            config = getattr(self, part)
            values |= {spec.dest: getattr(config, spec.dest) for spec in flag_specs(type(config))}
        values |= {sglang_dest(name): value for name, value in self.engine.sglang_args.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def free_flags() -> frozenset[str]:
    """Flags that may differ when a run is continued, by their names in Python."""
    return frozenset(spec.dest for config in CONFIGS.values() for spec in flag_specs(config) if spec.may_change)


def sglang_dest(name: str) -> str:
    """Name in Python of an SGLang flag: ``mem-fraction-static`` is ``sglang_mem_fraction_static``."""
    return f"sglang_{name.replace('-', '_')}"


def build_settings(given: Mapping[str, Any], *, shape: Sequence[str], sglang: Mapping[str, str]) -> Settings:
    """Build the typed records.

    Args:
        given: The flags that were given, by ``dest``.
        shape: Names of the model shape's flags.
        sglang: SGLang's own flags: ``dest`` → name without ``--sglang-``.

    Raises:
        ConfigError: Values, or combinations of values, cannot work: all of them, a line each.
    """
    parts: dict[str, Any] = {}
    problems: list[str] = []
    for part, config in CONFIGS.items():
        own = {spec.dest for spec in flag_specs(config)}
        values = {dest: value for dest, value in given.items() if dest in own}
        if config is EngineConfig:
            values["sglang_args"] = {sglang[dest]: value for dest, value in given.items() if dest in sglang}
        try:
            parts[part] = config(**values)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return Settings(shape={dest: given[dest] for dest in shape if dest in given}, **parts)
