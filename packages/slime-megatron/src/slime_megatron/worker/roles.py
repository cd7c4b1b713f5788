"""The models of a rank by role: which of them is in device memory, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from slime_core.errors import ConfigError
from slime_core.interfaces import Role
from slime_core.memory import Held, MemoryState
from slime_core.types import SleepReport
from slime_megatron.checkpoints.background import Background
from slime_megatron.checkpoints.find import checkpoint_root, find_checkpoint
from slime_megatron.model.build import Chunks
from slime_megatron.settings.config import MegatronConfig
from slime_megatron.step.optimizer import reset_adam
from slime_megatron.weights.offload import resident_bytes, unique_storages
from slime_megatron.worker.setup import WorkerSetup
from slime_megatron.worker.trained_model import TrainedModel


class Roles:
    """The actor, a critic if the algorithm needs one, and behind the actor the frozen roles.

    If roles take turns, either the actor or the critic holds device memory, and the other waits in host memory.
    :meth:`resume` comes next: a new model has random weights where it is to continue a checkpoint.

    Attributes:
        actor: The policy, and the frozen roles' weights.
        critic: The values' model, if there is one.
        iteration: The checkpoint that was loaded or saved last.
    """

    def __init__(self, setup: WorkerSetup, configs: Mapping[str, MegatronConfig]) -> None:
        self._config, self._device, self._takes_turns = setup.config, setup.device, setup.takes_turns
        resumed = setup.resume_from is not None
        keeps = setup.algorithm.keep_old_actor and not setup.only_evaluates
        self.actor = TrainedModel(
            configs["actor"],
            setup.shape,
            setup.device,
            source=None if resumed else setup.config.load or setup.config.ref_load,
            value_head=setup.loss.value_head,
            frozen=setup.frozen_sources,
            resumed=resumed,
            keep_versions=setup.most_behind if keeps else None,
            offload_dir=setup.output_dir,
            only_evaluates=setup.only_evaluates,
        )
        self.critic: TrainedModel | None = None
        if (critic := configs.get("critic")) is not None:
            if self._takes_turns:
                self.actor.sleep()
            self.critic = TrainedModel(
                critic,
                setup.shape,
                setup.device,
                source=None if resumed else critic.load,
                resumed=resumed,
                value_head=True,
                offload_dir=setup.output_dir,
            )
        self._memory = MemoryState("the trainer")
        self.iteration: int | None = None
        self._left: str | Path | None = None
        self._background = Background(self._config.distributed_timeout_minutes) if self._config.async_save else None
        if self.critic is not None:
            self.turn_of(self.actor)

    def resume(self, directory: str | Path | None, *, weights_first: bool) -> None:
        """Continue a checkpoint, if one is given; with ``weights_first`` its weights alone for now.

        Building a model draws from the random states that this restores, so it is the last of a start.
        """
        if directory is not None and weights_first:
            self.iteration, self._left = self.actor.load_weights(directory)
        elif directory is not None:
            self.load(directory)

    @property
    def trained(self) -> list[TrainedModel]:
        """The models with an optimizer: the critic, if there is one, and the actor."""
        return [self.actor] if self.critic is None else [self.critic, self.actor]

    def require(self, call: str, least: Held = Held.EVERYTHING) -> None:
        """Check that device memory holds what ``call`` needs, and load what was left for later.

        Raises:
            MemoryStateError: It does not.
            TrainerCheckpointError: A checkpoint that was under way could not be written.
        """
        self._memory.require(call, least)
        self.saved()
        if least is Held.EVERYTHING:
            self.finish_loading()

    def check(self, role: Role) -> None:
        """Raise a `ConfigError` that says how there would be a model for the role, if there is none."""
        there = {"actor", *self.actor.frozen} | ({"critic"} if self.critic else set())
        if role not in there:
            how = {
                "reference": "set --use-kl-loss or --kl-coef",
                "critic": "set --advantage-estimator ppo",
                "teacher": "set --use-opd and --opd-teacher-load",
            }
            advice = how.get(role, f"ask for {' or '.join(sorted(there))}")
            raise ConfigError(f"this trainer has no {role} model; {advice}")

    def turn_of(self, model: TrainedModel) -> None:
        """Have all of a role in device memory and, if roles take turns, nothing of the other."""
        if self._takes_turns:
            self.release()
            for other in self.trained:
                if other is not model:
                    other.sleep()
            model.wake()

    def gather_policy(self) -> None:
        """Have all weights of the policy in device memory, also while nothing else is there."""
        if self._memory.held is Held.EVERYTHING:
            self.turn_of(self.actor)
        self.actor.gather_weights()

    def begin_rollout(self, model: TrainedModel) -> None:
        """Have a role in device memory for the steps of a rollout; ``--reset-optimizer-states`` gives it a new Adam."""
        self.turn_of(model)
        if model.config.reset_optimizer_states:
            self.release()
            reset_adam(model.optimizer)

    def model(self, role: Role | int) -> AbstractContextManager[Chunks]:
        """The model of a role, or the policy of a kept version, for as long as the block runs."""
        model = self.critic if role == "critic" and self.critic is not None else self.actor
        if self._memory.held is Held.EVERYTHING:
            self.turn_of(model)
        return nullcontext(model.wrapped) if role in ("actor", "critic") else self.actor.as_other(role)

    def keep_version(self) -> None:
        """Before training: keep the weights that engines have, if the loss asks for them later."""
        if self.actor.versions is not None:
            self.turn_of(self.actor)
            self.actor.versions.before_training()

    def update_reference(self, rollout_id: int) -> None:
        """After training on a rollout: the policy becomes the reference, if ``--ref-update-interval`` says so."""
        interval = self._config.ref_update_interval
        if interval and "reference" in self.actor.frozen and (rollout_id + 1) % interval == 0:
            self.turn_of(self.actor)
            self.actor.update_frozen("reference")

    def save(self, iteration: int) -> Path:
        """Write checkpoint ``iteration`` of each role; returns the actor's, which comes last."""
        self.saved(wait=True)
        for model in self.trained:
            self.turn_of(model)
            directory = model.save(iteration, self._background if model is self.actor else None)
        self.iteration = iteration
        return directory

    def saved(self, wait: bool = False) -> bool:
        """Whether the last checkpoint is complete; with ``wait``, once it is. All ranks ask together."""
        return self._background is None or self._background.finished(wait=wait)

    def release(self) -> None:
        """Let weights and optimizer state change, though a checkpoint of them may still be written."""
        if self._background is not None:
            self._background.release()

    def load(self, directory: str | Path) -> int:
        """Continue a checkpoint, or the newest in a directory of them; returns its iteration."""
        self._memory.require("load", Held.EVERYTHING)
        self.saved()
        self.release()
        if self.critic is not None:
            root = self._config.critic_save or checkpoint_root(directory) / "critic"
            self.turn_of(self.critic)
            self.critic.load(Path(root) / find_checkpoint(directory).directory.name)
        self.turn_of(self.actor)
        self.iteration = self.actor.load(directory)
        self._left = None
        return self.iteration

    def finish_loading(self) -> None:
        """Load the rest of a checkpoint, after :meth:`resume` has loaded its weights."""
        if self._left is None:
            return
        versions = self.actor.versions
        sent = None if versions is None else versions.current
        self.load(self._left)
        if versions is not None and sent is not None:
            versions.pushed(sent)  # the weights that are loaded are those that engines have got meanwhile

    def sleep(self, keep_weights: bool = False) -> SleepReport:
        """Give device memory back, with ``keep_weights`` all but the weights'."""
        self.finish_loading()
        with self._memory.sleeping(keep_weights):
            self.release()
            if keep_weights:
                self.turn_of(self.actor)
            for model in self.trained:
                model.sleep(keep_weights)
        gradients = (tensor for model in self.trained for tensor in model.gradients())
        held = unique_storages((*self.device_tensors(), *gradients))
        return SleepReport(
            device=sum(storage.nbytes() for storage in held),
            waiting=sum(model.waiting_bytes for model in self.trained),
            resident=resident_bytes(self._device),
        )

    def wake(self, weights_only: bool = False) -> None:
        """Take the memory again, with ``weights_only`` the weights' alone."""
        with self._memory.waking(weights_only):
            for model in [self.actor] if self._takes_turns else self.trained:
                model.wake(weights_only)

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """Tensors that stay on the device between calls, without the gradient buffers."""
        for model in self.trained:
            yield from model.weights()
            yield from model.optimizer_state()
