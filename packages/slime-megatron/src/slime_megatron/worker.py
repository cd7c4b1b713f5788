"""The trainer as the launcher sees it: a plain object that selects its device before Megatron is imported."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.interfaces import WeightChannel
from slime_core.types import Rendezvous, SyncReport, TrainReport, TrainShard
from slime_megatron.config import MegatronConfig

if TYPE_CHECKING:
    from slime_megatron.rank_trainer import RankTrainer


class MegatronWorker:
    """One rank of the training half; implements :class:`slime_core.interfaces.TrainerWorker`.

    One such object lives in a process of its own: it changes the process (device layer, process groups, random seeds).

    Args:
        config: Parallelism, optimizer, checkpoints.
        algorithm: The loss.
        shape: The model.
        rendezvous: Where the ranks meet.
        resume_from: Checkpoint to continue, with optimizer and random state; see :class:`RankTrainer`.

    Raises:
        ConfigError: The shape or the number of ranks does not fit the parallel sizes.
        CheckpointError: A checkpoint is missing or does not fit.
    """

    def __init__(
        self,
        config: MegatronConfig,
        algorithm: AlgorithmConfig,
        shape: ModelShape,
        rendezvous: Rendezvous,
        resume_from: str | Path | None = None,
    ) -> None:
        from slime_megatron.device import select_device

        device = select_device(config.trainer_threads)
        with warnings.catch_warnings():
            # Megatron warns six times that it goes on without these two, as we mean it to.
            warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* not installed")
            from slime_megatron.rank_trainer import RankTrainer

        self.trainer: RankTrainer = RankTrainer(config, algorithm, shape, rendezvous, device, resume_from)

    @property
    def iteration(self) -> int | None:
        """The checkpoint iteration last loaded or saved; ``None`` in a new run."""
        return self.trainer.iteration

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""
        return self.trainer.data_parallel_rank

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout."""
        return self.trainer.train(shard)

    def log_probs(self, shard: TrainShard) -> list[list[float]]:
        """Log-probs (nats) of every sample's response tokens under the current weights; 0 where the loss mask is 0."""
        return self.trainer.log_probs(shard)

    def push_weights(self, channel: WeightChannel, version: int) -> SyncReport:
        """Send the current weights through ``channel``: all ranks call it, rank 0 sends."""
        return self.trainer.push_weights(channel, version)

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when all ranks have returned."""
        return self.trainer.save(iteration)

    def close(self) -> None:
        """Leave the process groups."""
        self.trainer.close()
