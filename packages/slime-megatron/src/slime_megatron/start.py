"""From settings to a rank's worker, and whether the algorithm can be trained with them.

Importing this imports no torch; :func:`start_worker` does, in the process that becomes a rank.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.effects import refusals
from slime_core.errors import ConfigError
from slime_core.flags import Config, flag_specs, flag_values
from slime_core.hooks import HookArgs
from slime_core.importing import without_collections, without_packages
from slime_core.types import Rendezvous
from slime_core.user_functions import load_function
from slime_megatron.settings.config import MegatronConfig, flag_name
from slime_megatron.settings.overrides import role_config
from slime_megatron.settings.trainer_hooks import HOOKS, TrainerHooks

if TYPE_CHECKING:
    from slime_core.ops import AdvantageEstimator
    from slime_megatron.worker import MegatronWorker


def check_algorithm(
    algorithm: AlgorithmConfig,
    config: MegatronConfig | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    only_evaluates: bool = False,
) -> AdvantageEstimator | None:
    """Check that the trainer has what the algorithm needs. Can be asked before a run starts.

    ``overrides`` are settings of ``config`` that are others for a role, by role and name. A run that
    ``only_evaluates`` has no critic.

    Returns:
        The user-defined advantage function, if there is one.

    Raises:
        ConfigError: The function cannot be used, or ``config`` has settings that the algorithm does not need or allow.
    """
    if config is not None and (problems := list(_unused(algorithm, config, overrides or {}, only_evaluates))):
        raise ConfigError("\n".join(problems))
    found = _loaded(algorithm)
    if config is not None:
        _loaded(config)
    return found.get("custom_advantage_function_path")


FUNCTIONS: Mapping[str, tuple[str, ...] | None] = {
    "custom_loss_function_path": ("inputs",),
    "custom_tis_function_path": None,
    "custom_pg_loss_reducer_function_path": (
        *("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
    ),
    "custom_advantage_function_path": ("inputs",),
    **HOOKS,
}
"""User-defined functions by the setting that names them, and the arguments that are checked."""


def given_functions(config: Config) -> dict[str, Callable[[], Any]]:
    """The user-defined functions of the algorithm, or of the trainer: by the setting that names one, what loads it.

    Loading raises `ConfigError` for one that cannot be used.
    """
    given = (name for name in FUNCTIONS if getattr(config, name, None) is not None)
    return {name: functools.partial(load_given, config, name) for name in given}


def load_given(config: Config, name: str) -> Any:
    """The function that a setting names; raises `ConfigError` if it cannot be used."""
    return load_function(getattr(config, name), flag_name(name), arguments=FUNCTIONS[name])


def _loaded(config: Config) -> dict[str, Any]:
    return {name: load() for name, load in given_functions(config).items()}


def _unused(
    algorithm: AlgorithmConfig, config: MegatronConfig, overrides: Mapping[str, Mapping[str, Any]], only_evaluates: bool
) -> Iterator[str]:
    specs = {spec.dest: spec for record in (algorithm, config) for spec in flag_specs(type(record))}
    yield from refusals(specs, flag_values(algorithm) | flag_values(config))
    if algorithm.loss.value_head and role_config(config, "actor", overrides).lora is not None:
        yield (
            f"--lora-rank trains adapters alone, and --loss-type {algorithm.loss_type} a new head, too; "
            "leave one of them out"
        )
    has_critic = algorithm.needs_critic and not only_evaluates
    if has_critic and role_config(config, "critic", overrides).lora is not None:
        yield "overrides of the role critic: lora_rank trains adapters alone, and a critic has a new head; leave it out"


def start_worker(
    config: MegatronConfig,
    algorithm: AlgorithmConfig,
    shape: ModelShape,
    rendezvous: Rendezvous,
    *,
    resume_from: str | Path | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    output_dir: str | Path = ".",
    quantized_as: str | Path | None = None,
    take_turns: bool = False,
    most_behind: int = 1,
    weights_first: bool = False,
    args: HookArgs | None = None,
    only_evaluates: bool = False,
) -> MegatronWorker:
    """Select this process's device, which must happen before Megatron is imported, and build its worker.

    The process is the worker's from then on: its device, process groups and random seeds are set.

    Args:
        config: Parallelism, optimizer, checkpoints.
        algorithm: Settings of the loss.
        shape: The model.
        rendezvous: Where the ranks meet.
        resume_from: Checkpoint (or directory of checkpoints) to continue, with optimizer and random state. Without it,
            weights come from ``config.load``, then ``config.ref_load``, and are random if neither is given.
        overrides: Settings of ``config`` that are others for a role, ``actor`` or ``critic``, by role and name.
        output_dir: Where the run's outputs go; traces of ``--profile`` in ``profile`` there.
        quantized_as: A quantized Hugging Face model: weights are pushed in the form in which it stores them.
        take_turns: Actor and critic take turns in device memory: while one works, the other waits in host memory.
        most_behind: With ``keep_old_actor``: most updates between a token and its training. The oldest copy stands for
            weights that are older.
        weights_first: Of ``resume_from`` load the weights alone for now, which is enough to push them; the rest comes
            with ``finish_loading``, or with the first call that needs it.
        args: The ``args`` of the trainer's hooks; the settings of ``config`` and ``algorithm`` unless given.
        only_evaluates: Nothing is trained: without a critic, gradients and an optimizer.

    Raises:
        ConfigError: The shape or the number of ranks does not fit the parallel sizes, no reference is named, the loss
            is not available, a role is unknown, the memory does not hold the roles, or one of Megatron's arguments
            cannot be given.
        TrainerCheckpointError: A checkpoint is missing or does not fit.
    """
    with without_collections():
        from slime_megatron.ranks.device import select_device

    estimator = check_algorithm(algorithm, config, overrides, only_evaluates=only_evaluates)
    device = select_device(config.trainer_threads, deterministic=config.deterministic_mode)
    with warnings.catch_warnings():
        # Megatron warns six times that it goes on without these two, as we mean it to.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* not installed")
        # It has a use for these in its own trackers alone.
        with without_collections(), without_packages("wandb", "tensorboard"):
            from slime_megatron.worker import MegatronWorker
            from slime_megatron.worker.setup import WorkerSetup

    return MegatronWorker(
        WorkerSetup(
            config=config,
            algorithm=algorithm,
            shape=shape,
            rendezvous=rendezvous,
            device=device,
            estimator=estimator,
            hooks=TrainerHooks(_loaded(config), args or HookArgs.from_configs(config, algorithm)),
            resume_from=resume_from,
            overrides=overrides or {},
            output_dir=Path(output_dir),
            quantized_as=quantized_as,
            take_turns=take_turns,
            most_behind=most_behind,
            weights_first=weights_first,
            only_evaluates=only_evaluates,
        )
    )
