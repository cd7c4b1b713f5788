"""`MegatronWorker`: the calls that every rank gets, each to the part of it that answers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core import parallel_state
from numpy.typing import NDArray

from slime_core.interfaces import Role, WeightChannel
from slime_core.memory import Held
from slime_core.types import SleepReport, SyncReport, TrainReport, TrainShard, WeightUpdate
from slime_megatron.model.build import Chunks
from slime_megatron.ranks.parallel import join_ranks, leave_ranks
from slime_megatron.settings.trainer_hooks import INIT
from slime_megatron.step.debugging import ShownSamples, write_train_data
from slime_megatron.worker.export import PolicyExport
from slime_megatron.worker.reports import RankReports
from slime_megatron.worker.role_passes import RolePasses
from slime_megatron.worker.roles import Roles
from slime_megatron.worker.setup import WorkerSetup


class MegatronWorker:
    """One rank of the training half: the actor and, if the algorithm needs them, a critic, a reference and a teacher.

    Implements :class:`slime_core.interfaces.TrainerWorker`; made by :func:`slime_megatron.service.start_worker`, whose
    arguments are its ``setup``. Reference and teacher are copies in host memory, which take the place of the actor's
    weights for a forward pass.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.config, self.shape, self._output_dir = setup.config, setup.shape, setup.output_dir
        configs = setup.role_configs()  # refuses what does not fit before ranks meet
        join_ranks(setup.config, setup.rendezvous, setup.device)
        setup.hooks(INIT)
        self._roles = Roles(setup, configs)
        self._passes = RolePasses(setup, self._roles)
        self._reports = RankReports(setup)
        self._reports.settings(self._roles.actor)
        self._export = PolicyExport(setup, self._roles)
        self._roles.resume(setup.resume_from, weights_first=setup.weights_first)

    @property
    def model(self) -> Chunks:
        """The policy's chunks of this rank."""
        return self._roles.actor.model

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""
        return int(parallel_state.get_data_parallel_rank())

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout: its optimizer steps, in order."""
        self._roles.require("train")
        with self._reports.rollout(shard.rollout_id) as timer:
            plans = self._passes.plan(shard, timer)
            if self.config.save_debug_train_data is not None:
                write_train_data(self.config.save_debug_train_data, shard, plans)
            self._roles.keep_version()
            critic, sums = self._roles.critic, None
            steps = [{"global_batch_size": float(plan.step.global_trajectories)} for plan in plans]
            if critic is not None:
                self._passes.train(critic, shard, plans, steps, timer)
            if critic is None or shard.rollout_id >= self.config.num_critic_only_steps:
                shown = ShownSamples()
                self._passes.train(self._roles.actor, shard, plans, steps, timer, shown)
                shown.write(self._output_dir / "samples", shard.rollout_id)
                sums = self._export.sums(timer)
            self._roles.update_reference(shard.rollout_id)
            return self._reports.of_training(shard, steps, timer, self._export.summed, sums)

    def forward(self, shard: TrainShard, role: Role = "actor") -> list[NDArray[np.float32]]:
        """Log-probs (nats) of every sample's response tokens under the model of ``role``; 0 where the loss mask is 0.

        A critic gives values: of a token, what the response was expected to earn before it. A reward model gives each
        sample's score at its last trained token, and 0 elsewhere.

        Raises:
            ConfigError: This worker has no model for the role.
        """
        self._roles.require("forward", Held.WEIGHTS if role == "actor" else Held.EVERYTHING)
        self._roles.check(role)
        return self._passes.per_token(shard, role, self._reports.timer())

    def evaluate(self, shard: TrainShard) -> dict[str, float]:
        """The loss of a shard of one step and its metrics, without training on it; equal on all ranks."""
        self._roles.require("evaluate")
        self._roles.turn_of(self._roles.actor)
        return self._passes.evaluate(shard, self._reports.timer())

    def push(self, update: WeightUpdate, channel: WeightChannel | None, senders: Sequence[int] = (0,)) -> SyncReport:
        """Send the weights that ``update`` names: all ranks call it, ``senders`` send, each through its ``channel``.

        It returns when every engine of the channels has confirmed the version.
        """
        self._roles.require("push", Held.WEIGHTS)
        return self._export.push(update, channel, senders, self._reports.timer())

    def export_mismatches(self) -> list[str]:
        """Names of weights that :meth:`push` sends otherwise than they are, on any rank. All ranks call it."""
        self._roles.require("export_mismatches", Held.WEIGHTS)
        return self._export.mismatches()

    def misread(self) -> list[str]:
        """The former name of :meth:`export_mismatches`, for one release."""
        warnings.warn("misread is now export_mismatches; the old name goes", DeprecationWarning, stacklevel=2)
        return self.export_mismatches()

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when all ranks have returned.

        With ``--async-save`` it is complete once :meth:`saved` says so. An earlier one is waited for; that it could not
        be written is raised by the next call. The actor's comes last: a run continues from its newest.
        """
        self._roles.require("save")
        with self._reports.timer().phase("save"):
            return str(self._roles.save(iteration))

    def saved(self, wait: bool = False) -> bool:
        """Whether the last checkpoint is complete; with ``wait``, once it is. All ranks call it together."""
        return self._roles.saved(wait=wait)

    def load(self, directory: str | Path) -> int:
        """Continue a checkpoint (or the newest in a directory of them) with its optimizer and random state.

        A critic continues the checkpoint of the same number in its own directory.
        """
        return self._roles.load(directory)

    def finish_loading(self) -> None:
        """Load what ``weights_first`` left for later: optimizer, random states, other roles' weights."""
        self._roles.finish_loading()

    def sleep(self, keep_weights: bool = False) -> SleepReport:
        """Give device memory back until :meth:`wake`: gradients and optimizer state, and without ``keep_weights`` all.

        Gradient buffers are freed; the rest waits elsewhere: see `slime_megatron.weights.offload`.

        Raises:
            MemoryStateError: There is nothing to give back.
            TrainingError: The host lacks the memory to hold it meanwhile.
        """
        return self._roles.sleep(keep_weights)

    def wake(self, weights_only: bool = False) -> None:
        """Take the device memory again, with ``weights_only`` the weights' alone; what is in it is as before.

        Raises:
            MemoryStateError: There is nothing to take.
        """
        self._roles.wake(weights_only)

    def close(self) -> None:
        """Finish a save that is under way, then leave the process groups."""
        try:
            self.saved(wait=True)
        finally:
            leave_ranks()
