"""What a launcher calls: check that a run can be trained, then start a rank's worker. No torch until then."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.types import Rendezvous
from slime_core.user_functions import load_function
from slime_megatron.config import MegatronConfig

if TYPE_CHECKING:
    from slime_core.ops import AdvantageEstimator
    from slime_megatron.worker import MegatronWorker


def check_algorithm(algorithm: AlgorithmConfig) -> AdvantageEstimator | None:
    """Check that the trainer has what the algorithm needs. Can be asked before a run starts.

    Returns:
        The user-defined advantage function, if there is one.

    Raises:
        ConfigError: It is ppo, which needs a critic, or the function cannot be used.
    """
    path, flag = algorithm.custom_advantage_function_path, "--custom-advantage-function-path"
    if algorithm.advantage_estimator == "ppo" and path is None:
        raise ConfigError(
            "--advantage-estimator ppo needs a critic, and this trainer has none; take another estimator, such as "
            "rloo or reinforce_plus_plus_baseline. `slime_core.ops` has ppo's advantages and losses for other trainers"
        )
    return None if path is None else load_function(path, flag, arguments=("inputs",))


def start_worker(
    config: MegatronConfig,
    algorithm: AlgorithmConfig,
    shape: ModelShape,
    rendezvous: Rendezvous,
    *,
    loss: str = "policy",
    resume_from: str | Path | None = None,
) -> MegatronWorker:
    """Select this process's device, which must happen before Megatron is imported, and build its worker.

    The process is the worker's from then on: its device, process groups and random seeds are set.

    Args:
        config: Parallelism, optimizer, checkpoints.
        algorithm: Settings of the loss.
        shape: The model.
        rendezvous: Where the ranks meet.
        loss: Name in :data:`slime_megatron.losses.LOSSES`, or ``file.py:fn`` of a user-defined one.
        resume_from: Checkpoint (or directory of checkpoints) to continue, with optimizer and random state. Without it,
            weights come from ``config.load``, then ``config.ref_load``, and are random if neither is given.

    Raises:
        ConfigError: The shape or the number of ranks does not fit the parallel sizes, no reference is named, or the
            loss is not available.
        CheckpointError: A checkpoint is missing or does not fit.
    """
    from slime_megatron.device import select_device

    estimator = check_algorithm(algorithm)
    device = select_device(config.trainer_threads)
    with warnings.catch_warnings():
        # Megatron warns six times that it goes on without these two, as we mean it to.
        warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* not installed")
        from slime_megatron.worker import MegatronWorker

    given = (config, algorithm, shape, rendezvous, device)
    return MegatronWorker(*given, loss=loss, estimator=estimator, resume_from=resume_from)
