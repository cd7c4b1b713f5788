"""Every flag of ``slime-launch train``, in the groups that ``--help`` shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime_convert.shape import SHAPE_FLAGS, ShapeFlag
from slime_core.config import AlgorithmConfig
from slime_core.flags import FlagSpec, flag_specs
from slime_launch.config import ClusterConfig, RunConfig
from slime_launch.flags.parser import FlagGroup
from slime_megatron.config import MegatronConfig
from slime_rollout.config import RolloutConfig
from slime_rollout.engine.config import EngineConfig

MEGATRON_NOTE = "Megatron's own names, where Megatron has the flag."
SHAPE_NOTE = "Megatron's own names. What is not given is taken from --hf-checkpoint; what is given must agree with it."
SGLANG_NOTE = (
    "Every flag of the installed SGLang with --sglang- in front, such as --sglang-mem-fraction-static 0.8.\n"
    "`slime-launch train --help-sglang` lists them."
)


def train_groups() -> list[FlagGroup]:
    """All groups but that of SGLang's own flags."""
    rollout, evaluation = _split(RolloutConfig)
    run, run_evaluation = _split(RunConfig)
    return [
        FlagGroup("run", run),
        FlagGroup("cluster", _all(ClusterConfig), 'Without CUDA a "GPU" is a CPU worker process.'),
        FlagGroup("prompts, sampling and rewards", rollout),
        FlagGroup("evaluation", evaluation + run_evaluation),
        FlagGroup("algorithm", _all(AlgorithmConfig)),
        FlagGroup("Megatron: training", _all(MegatronConfig), MEGATRON_NOTE),
        FlagGroup("Megatron: model shape", tuple(_shape_spec(flag) for flag in SHAPE_FLAGS), SHAPE_NOTE),
        FlagGroup("SGLang: engines and router", _all(EngineConfig)),
    ]


def sglang_group(flags: Iterable[FlagSpec]) -> FlagGroup:
    """SGLang's own flags."""
    return FlagGroup("SGLang: its own flags", tuple(flags), SGLANG_NOTE, hidden=True)


def _all(config: type[Any]) -> tuple[FlagSpec, ...]:
    return tuple(flag_specs(config))


def _split(config: type[Any]) -> tuple[tuple[FlagSpec, ...], tuple[FlagSpec, ...]]:
    """The flags of a config that are not about evaluation, and those that are."""
    specs = _all(config)
    about_eval = [spec for spec in specs if "eval" in spec.dest.split("_")]
    return tuple(spec for spec in specs if spec not in about_eval), tuple(about_eval)


def _shape_spec(flag: ShapeFlag) -> FlagSpec:
    return FlagSpec(name=flag.name, dest=flag.dest, type=flag.type, default=None, help=flag.help)
