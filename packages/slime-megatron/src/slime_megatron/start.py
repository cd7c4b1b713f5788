"""What a launcher calls: check that a run can be trained, then start a rank's worker. No torch until then."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
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
from slime_megatron.config import MegatronConfig, flag_name
from slime_megatron.trainer_hooks import HOOKS, TrainerHooks

if TYPE_CHECKING:
    from slime_core.ops import AdvantageEstimator
    from slime_megatron.worker import MegatronWorker


def check_algorithm(algorithm: AlgorithmConfig, config: MegatronConfig | None = None) -> AdvantageEstimator | None:
    """Check that the trainer has what the algorithm needs. Can be asked before a run starts.

    Returns:
        The user-defined advantage function, if there is one.

    Raises:
        ConfigError: The function cannot be used, or ``config`` has settings that the algorithm does not need or allow.
    """
    if config is not None and (problems := list(_unused(algorithm, config))):
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


def given_functions(config: Config) -> list[str]:
    """Settings of the algorithm, or of the trainer, that name a user-defined function."""
    return [name for name in FUNCTIONS if getattr(config, name, None) is not None]


def load_given(config: Config, name: str) -> Any:
    """The function that a setting names; raises `ConfigError` if it cannot be used."""
    return load_function(getattr(config, name), flag_name(name), arguments=FUNCTIONS[name])


def _loaded(config: Config) -> dict[str, Any]:
    return {name: load_given(config, name) for name in given_functions(config)}


def _unused(algorithm: AlgorithmConfig, config: MegatronConfig) -> Iterator[str]:
    if config.lora is not None and algorithm.loss_type == "rm_loss":
        yield "--lora-rank trains adapters alone, and --loss-type rm_loss a new head, too; leave one of them out"
    specs = {spec.dest: spec for record in (algorithm, config) for spec in flag_specs(type(record))}
    yield from refusals(specs, flag_values(algorithm) | flag_values(config))


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
        args: What the trainer's hooks get as ``args``; the settings of ``config`` and ``algorithm`` unless given.
        only_evaluates: Nothing is trained: there is no critic, and no gradient or optimizer takes memory.

    Raises:
        ConfigError: The shape or the number of ranks does not fit the parallel sizes, no reference is named, the loss
            is not available, a role is unknown, the memory does not hold the roles, or one of Megatron's arguments
            cannot be given.
        CheckpointError: A checkpoint is missing or does not fit.
    """
    with without_collections():
        from slime_megatron.device import select_device

    estimator = check_algorithm(algorithm, config)
    device = select_device(config.trainer_threads, deterministic=config.deterministic_mode)
    with warnings.catch_warnings():
        # Megatron warns six times that it goes on without these two, as we mean it to.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* not installed")
        # It has a use for these in its own trackers alone.
        with without_collections(), without_packages("wandb", "tensorboard"):
            from slime_megatron.worker import MegatronWorker

    given = (config, algorithm, shape, rendezvous, device)
    return MegatronWorker(
        *given,
        estimator=estimator,
        resume_from=resume_from,
        overrides=overrides or {},
        output_dir=output_dir,
        quantized_as=quantized_as,
        take_turns=take_turns,
        most_behind=most_behind,
        weights_first=weights_first,
        hooks=TrainerHooks(_loaded(config), args or HookArgs.from_configs(config, algorithm)),
        only_evaluates=only_evaluates,
    )
