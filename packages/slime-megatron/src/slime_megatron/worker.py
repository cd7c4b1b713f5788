"""`MegatronWorker`: one rank of the training half. Importing this imports Megatron: see `slime_megatron.start`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from slime_convert.shape import ModelShape
from slime_convert.stored_form import StoredForm
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.interfaces import Role, WeightChannel
from slime_core.memory import Held, MemoryState
from slime_core.ops import AdvantageEstimator
from slime_core.types import (
    Rendezvous,
    SleepReport,
    Span,
    SyncReport,
    TrainReport,
    TrainSample,
    TrainShard,
    WeightUpdate,
)
from slime_megatron.background import Background
from slime_megatron.checkpoint import checkpoint_root, find_checkpoint, reference_source, teacher_source
from slime_megatron.config import MegatronConfig
from slime_megatron.core_configs import argument_notices, check_arguments
from slime_megatron.debugging import ShownSamples, profiled, write_train_data
from slime_megatron.device import Device
from slime_megatron.exchange import gather_values
from slime_megatron.fits import check_fits
from slime_megatron.kernels import choose_kernels, found_kernels
from slime_megatron.losses import CRITIC_LOSS, Loss, loss_of
from slime_megatron.memory import check_memory, stages_memory
from slime_megatron.model import Chunks
from slime_megatron.offload import resident_bytes, unique_storages
from slime_megatron.operations import flops_model
from slime_megatron.optimizer import check_finite
from slime_megatron.overrides import role_config
from slime_megatron.packing import ContextParallel, MicroBatch, PackedBatch, trained_samples
from slime_megatron.pairs import score_row, scored
from slime_megatron.parallel import join_ranks, leave_ranks
from slime_megatron.plan import Planner, StepPlan
from slime_megatron.roles import TrainedModel
from slime_megatron.step import Head, ValueReader, forward_backward, forward_values
from slime_megatron.sync import WeightExport, push_weights
from slime_megatron.timer import PhaseTimer, reset_peak_memory
from slime_megatron.trainer_hooks import BEFORE_LOG_PROBS, BEFORE_TRAIN_STEP, INIT, PREFIXES, TrainerHooks
from slime_megatron.weight_sums import WeightSums

logger = logging.getLogger(__name__)

_PHASES: dict[Role, str] = {
    "actor": "log_probs",
    "critic": "values",
    "reference": "ref_log_probs",
    "teacher": "teacher_log_probs",
}
"""Names of the forward passes in reports."""


class MegatronWorker:
    """One rank of the training half: the actor and, if the algorithm needs them, a critic, a reference and a teacher.

    Implements :class:`slime_core.interfaces.TrainerWorker`; made by :func:`slime_megatron.start.start_worker`, whose
    arguments these are. ``device`` is what the rank computes on, ``estimator`` a user-defined advantage function.
    Reference and teacher are copies in host memory, which take the place of the actor's weights for a forward pass.
    With ``take_turns`` either the actor or the critic holds device memory, the other waits in host memory.
    """

    _left: str | Path | None = None
    """What `finish_loading` will load the rest of, if anything."""

    def __init__(
        self,
        config: MegatronConfig,
        algorithm: AlgorithmConfig,
        shape: ModelShape,
        rendezvous: Rendezvous,
        device: Device,
        *,
        estimator: AdvantageEstimator | None,
        resume_from: str | Path | None,
        overrides: Mapping[str, Mapping[str, Any]],
        output_dir: str | Path,
        quantized_as: str | Path | None,
        take_turns: bool,
        most_behind: int,
        weights_first: bool,
        hooks: TrainerHooks,
        only_evaluates: bool,
    ) -> None:
        self.config = config
        self._output_dir = Path(output_dir)
        self._spans: list[Span] = []
        self._sums: WeightSums | None = None
        self._background: Background | None = None
        self._who = f"rank {rendezvous.rank}"
        self.algorithm = algorithm
        self.shape = shape
        self._device = device
        self._loss = loss_of(algorithm)
        self._estimator = estimator
        self._hooks = hooks
        if "critic" in overrides and not algorithm.needs_critic:
            raise ConfigError("overrides of the role critic: there is none; add --advantage-estimator ppo")
        self._takes_turns = take_turns and algorithm.needs_critic and not only_evaluates
        names: tuple[str, ...] = ("actor", "critic") if algorithm.needs_critic and not only_evaluates else ("actor",)
        roles = {role: self._own(role, overrides) for role in names}
        self._check_memory(roles, rendezvous.world_size, only_evaluates)
        join_ranks(config, rendezvous, device)
        hooks(INIT)
        resumed = resume_from is not None
        source = None if resumed else config.load or config.ref_load
        self._actor = TrainedModel(
            roles["actor"],
            shape,
            device,
            source=source,
            value_head=self._loss.value_head,
            frozen=self._frozen_sources(resume_from),
            resumed=resumed,
            keep_versions=most_behind if algorithm.keep_old_actor and not only_evaluates else None,
            room=self._output_dir,
            only_evaluates=only_evaluates,
        )
        self._critic: TrainedModel | None = None
        if (critic := roles.get("critic")) is not None:
            if self._takes_turns:
                self._actor.sleep()
            critic_source = None if resumed else critic.load
            self._critic = TrainedModel(
                critic, shape, device, source=critic_source, resumed=resumed, value_head=True, room=self._output_dir
            )
            self._turn_of(self._actor)
        self._share_prompts = self._sharing()
        if rendezvous.rank == 0:
            self._report_settings()
        self._export: WeightExport | None = None
        self._form = StoredForm(quantized_as) if quantized_as is not None and rendezvous.rank == 0 else None
        self._memory = MemoryState("the trainer")
        if config.async_save:
            self._background = Background(config.distributed_timeout_minutes)
        self.iteration: int | None = None
        # Last, because building a model draws from the random states that this restores.
        if resume_from is not None and weights_first:
            self.iteration, self._left = self._actor.load_weights(resume_from)
        elif resume_from is not None:
            self.load(resume_from)

    def _own(self, role: str, overrides: Mapping[str, Mapping[str, Any]]) -> MegatronConfig:
        """The settings of a role that is trained."""
        own = role_config(self.config, role, overrides)
        check_fits(own, self.shape)
        check_arguments(self.shape, own, self._device)
        return own

    def _check_memory(self, roles: Mapping[str, MegatronConfig], world_size: int, only_evaluates: bool) -> None:
        """Refuse roles that the device does not hold."""
        held = {
            role: stages_memory(
                self.shape,
                own,
                world_size,
                value_head=role == "critic" or self._loss.value_head,
                on_gpu=not self._device.is_cpu,
                only_evaluates=only_evaluates,
            )
            for role, own in roles.items()
        }
        check_memory(held, self._device.memory_bytes, take_turns=self._takes_turns)

    def _turn_of(self, role: TrainedModel) -> None:
        """Have all of a role in device memory and, if roles take turns, nothing of the other."""
        if self._takes_turns:
            self._release()
            for other in self.trained:
                if other is not role:
                    other.sleep()
            role.wake()

    def _report_settings(self) -> None:
        """Say once what of the settings is not so."""
        model = self._actor
        found = argument_notices(
            self.shape, model.config, self._device, model.model[0].config, model.wrapped[0].ddp_config
        )
        if found:
            logger.warning("Megatron's arguments: %s", "; ".join(found))
        if self.config.share_prompts == "auto" and (obstacles := self.config.sharing_obstacles):
            logger.warning("--share-prompts auto shares none: it does not work with %s", "; ".join(obstacles))

    def _frozen_sources(self, resume_from: str | Path | None) -> dict[str, Path | None]:
        """Where the weights of the roles that are not trained come from; ``None`` for the random ones of the start."""
        sources: dict[str, Path | None] = {}
        if self.algorithm.needs_reference:
            own = self.config.base_is_reference
            sources["reference"] = (
                None if own else reference_source(self.config.load, self.config.ref_load, resume_from)
            )
        if self.algorithm.uses_advantages and (teacher := teacher_source(self.config)) is not None:
            sources["teacher"] = teacher
        return sources

    def _sharing(self) -> str:
        """``--share-prompts``, but off where a model's attention kernel cannot do it."""
        found = found_kernels(self._device)
        wanted = self.config.share_prompts if self.config.may_share_prompts else "off"
        if wanted == "off" or all(choose_kernels(model.config, found).shares_prompts for model in self.trained):
            return wanted
        if torch.distributed.get_rank() == 0:
            logger.warning("prompts are not shared: Transformer Engine's attention cannot, and this GPU has no other")
        return "off"

    @property
    def model(self) -> Chunks:
        """The policy's chunks of this rank."""
        return self._actor.model

    @property
    def trained(self) -> list[TrainedModel]:
        """The models with an optimizer: the critic, if there is one, and the actor."""
        return [self._actor] if self._critic is None else [self._critic, self._actor]

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""
        return int(parallel_state.get_data_parallel_rank())

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout: its optimizer steps, in order."""
        self._check_holds("train")
        with profiled(self.config, shard.rollout_id, self._output_dir / "profile"):
            return self._train(shard)

    def _train(self, shard: TrainShard) -> TrainReport:
        timer = self._timer()
        reset_peak_memory(self._device)
        plans = self._planner(shard.temperature, timer).plan(shard)
        if self.config.reset_optimizer_states:
            self._release()
        if self.config.save_debug_train_data is not None:
            write_train_data(self.config.save_debug_train_data, shard, plans)
        steps, sums = [{"global_batch_size": float(plan.step.global_trajectories)} for plan in plans], None
        places = [(shard.rollout_id, number) for number in range(len(plans))]
        if self._actor.versions is not None:
            self._turn_of(self._actor)
            self._actor.versions.before_training()
        if self._critic is not None:
            self._turn_of(self._critic)
            self._critic.begin_rollout()
            for place, plan, metrics in zip(places, plans, steps, strict=True):
                found = self._optimize(self._critic, CRITIC_LOSS, place, plan, ValueReader(), timer)
                metrics |= {f"critic-{name}": value for name, value in found.items()}
        if self._critic is None or shard.rollout_id >= self.config.num_critic_only_steps:
            self._turn_of(self._actor)
            self._actor.begin_rollout()
            shown = ShownSamples()
            head = self._head(shard.temperature)
            for place, plan, metrics in zip(places, plans, steps, strict=True):
                metrics |= self._optimize(self._actor, self._loss, place, plan, head, timer, shown)
            shown.write(self._output_dir / "samples", shard.rollout_id)
            with timer.phase("weight_sums"):
                self._sums = self._sums or WeightSums(self._actor.model)
                sums = self._sums(self._actor.model)
        interval = self.config.ref_update_interval
        if interval and "reference" in self._actor.frozen and (shard.rollout_id + 1) % interval == 0:
            self._turn_of(self._actor)
            self._actor.update_frozen("reference")
        spans, self._spans = self._spans, []
        names = [] if self._sums is None or torch.distributed.get_rank() else self._sums.names
        return TrainReport(
            rollout_id=shard.rollout_id,
            steps=steps,
            seconds=dict(timer.seconds),
            tokens=dict(timer.tokens),
            performance=timer.performance(self._device, bf16=self.config.bf16),
            spans=spans,
            weight_names=names,
            weight_sums=sums,
        )

    def forward(self, shard: TrainShard, role: Role = "actor") -> list[NDArray[np.float32]]:
        """Log-probs (nats) of every sample's response tokens under the model of ``role``; 0 where the loss mask is 0.

        A critic gives values: of a token, what the response was expected to earn before it. A reward model gives each
        sample's score at its last trained token, and 0 elsewhere.

        Raises:
            ConfigError: This worker has no model for the role.
        """
        self._check_holds("forward", Held.WEIGHTS if role == "actor" else Held.EVERYTHING)
        self._check_role(role)
        timer = self._timer()
        seen = scored(shard) if self._loss.scores else shard
        kept = {id(sample) for sample in trained_samples(seen)}
        steps = self._planner(shard.temperature, timer).micro_batches(seen, kept)
        batches = [batch for step in steps for batch in step]
        found: dict[int, NDArray[np.float32]] = {}
        for batch, values_N in zip(batches, self._evaluate(shard.temperature, timer, role, batches), strict=True):
            found |= dict(zip(map(id, batch.samples), batch.per_sample(values_N), strict=True))
        if self._loss.scores:
            return [
                score_row(sample, found.get(id(view))) for sample, view in zip(shard.samples, seen.samples, strict=True)
            ]
        return [found.get(id(sample), np.zeros(sample.response_length, np.float32)) for sample in shard.samples]

    def evaluate(self, shard: TrainShard) -> dict[str, float]:
        """The loss of a shard of one step, and its metrics, without training on it; equal on all ranks."""
        self._check_holds("evaluate")
        self._turn_of(self._actor)
        timer, head = self._timer(), self._head(shard.temperature)
        [plan] = self._planner(shard.temperature, timer).plan(shard)
        batches = [planned.batch for planned in plan.batches]
        packed = partial(self._packed, batches, timer, "evaluate", head, 1, replays=True)
        with torch.no_grad():
            return forward_backward(
                self._actor.wrapped, plan, packed, self._loss, self.algorithm, head, forward_only=True
            )

    def push(self, update: WeightUpdate, channel: WeightChannel | None, senders: Sequence[int] = (0,)) -> SyncReport:
        """Send the weights that ``update`` names: all ranks call it, ``senders`` send, each through its ``channel``.

        It returns when every engine of the channels, such as `slime_rollout.weights.TensorWeightChannel`, has
        confirmed the version; what they generate from then on is sampled with these weights.
        """
        self._check_holds("push", Held.WEIGHTS)
        if self._memory.held is Held.EVERYTHING:
            self._turn_of(self._actor)
        self._actor.gather_weights()
        if self._export is None:
            self._export = WeightExport(self.model, self.shape)
        if self._actor.versions is not None:
            self._actor.versions.pushed(update.version)
        size = self.config.update_weight_buffer_size
        with self._timer().phase("send"):
            return push_weights(self._export, channel, update, size, self._form, senders)

    def misread(self) -> list[str]:
        """Names of weights that :meth:`push` sends otherwise than they are, on any rank. All ranks call it."""
        self._check_holds("misread", Held.WEIGHTS)
        export = self._export or WeightExport(self.model, self.shape)
        return sorted({name for names in gather_values(export.misread()) for name in names})

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when all ranks have returned.

        With ``--async-save`` it is complete once :meth:`saved` says so. An earlier one is waited for; that it could not
        be written is raised by the next call. The actor's comes last: a run continues from its newest.
        """
        self._check_holds("save")
        with self._timer().phase("save"):
            self.saved(wait=True)
            for model in self.trained:
                self._turn_of(model)
                directory = model.save(iteration, self._background if model is self._actor else None)
        self.iteration = iteration
        return str(directory)

    def saved(self, wait: bool = False) -> bool:
        """Whether the last checkpoint is complete; with ``wait``, once it is. All ranks call it together."""
        return self._background is None or self._background.finished(wait=wait)

    def _release(self) -> None:
        """Let weights and optimizer state change, though a checkpoint of them may still be written."""
        if self._background is not None:
            self._background.release()

    def load(self, directory: str | Path) -> int:
        """Continue a checkpoint (or the newest in a directory of them) with its optimizer and random state.

        A critic continues the checkpoint of the same number in its own directory.
        """
        self._memory.require("load", Held.EVERYTHING)
        self.saved()
        self._release()
        if self._critic is not None:
            root = self.config.critic_save or checkpoint_root(directory) / "critic"
            self._turn_of(self._critic)
            self._critic.load(Path(root) / find_checkpoint(directory).directory.name)
        self._turn_of(self._actor)
        self.iteration = self._actor.load(directory)
        self._left = None
        return self.iteration

    def finish_loading(self) -> None:
        """Load what was left for later when the worker was made: optimizer, random states, other roles' weights."""
        if self._left is None:
            return
        versions = self._actor.versions
        sent = None if versions is None else versions.current
        self.load(self._left)
        if versions is not None and sent is not None:
            versions.pushed(sent)  # the weights that are loaded are those that engines have got meanwhile

    def sleep(self, keep_weights: bool = False) -> SleepReport:
        """Give device memory back until :meth:`wake`: gradients and optimizer state, and without ``keep_weights`` all.

        Gradient buffers are freed; the rest waits elsewhere: see `slime_megatron.offload`. A model that only has to be
        pushed needs its weights alone. Copies of frozen roles are in host memory, and stay.

        Raises:
            MemoryStateError: There is nothing to give back.
            TrainingError: There is no room where it would wait.
        """
        self.finish_loading()
        with self._memory.sleeping(keep_weights):
            self._release()
            if keep_weights:
                self._turn_of(self._actor)
            for model in self.trained:
                model.sleep(keep_weights)
        return self._report_memory()

    def wake(self, weights_only: bool = False) -> None:
        """Take the device memory again, with ``weights_only`` the weights' alone; what is in it is as before.

        Raises:
            MemoryStateError: There is nothing to take.
        """
        with self._memory.waking(weights_only):
            for model in [self._actor] if self._takes_turns else self.trained:
                model.wake(weights_only)

    def _report_memory(self) -> SleepReport:
        gradients = (tensor for model in self.trained for tensor in model.gradients())
        held = unique_storages((*self.device_tensors(), *gradients))
        return SleepReport(
            device=sum(storage.nbytes() for storage in held),
            waiting=sum(model.waiting_bytes for model in self.trained),
            resident=resident_bytes(self._device),
        )

    def close(self) -> None:
        """Finish a save that is under way, then leave the process groups."""
        try:
            self.saved(wait=True)
        finally:
            leave_ranks()

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """What stays on the device between calls, without the gradient buffers."""
        for model in self.trained:
            yield from model.weights()
            yield from model.optimizer_state()

    def _check_holds(self, call: str, least: Held = Held.EVERYTHING) -> None:
        self._memory.require(call, least)
        self.saved()  # raises what became of one that was under way
        if least is Held.EVERYTHING:
            self.finish_loading()

    @contextlib.contextmanager
    def _model(self, role: Role | int) -> Iterator[Chunks]:
        """The model of a role, or the policy of a kept version, for as long as the block runs."""
        if self._memory.held is Held.EVERYTHING:
            self._turn_of(self._critic if role == "critic" and self._critic is not None else self._actor)
        if isinstance(role, int):
            with self._actor.as_version(role) as model:
                yield model
        elif role in self._actor.frozen:
            with self._actor.as_role(role) as model:
                yield model
        else:
            yield (self._critic or self._actor).wrapped if role == "critic" else self._actor.wrapped

    def _check_role(self, role: Role) -> None:
        there = {"actor", *self._actor.frozen} | ({"critic"} if self._critic else set())
        if role not in there:
            how = {
                "reference": "set --use-kl-loss or --kl-coef",
                "critic": "set --advantage-estimator ppo",
                "teacher": "set --use-opd and --opd-teacher-load",
            }
            advice = how.get(role, f"ask for {' or '.join(sorted(there))}")
            raise ConfigError(f"this trainer has no {role} model; {advice}")

    def _planner(self, temperature: float, timer: PhaseTimer) -> Planner:
        return Planner(
            algorithm=self.algorithm,
            loss=self._loss,
            estimator=self._estimator,
            micro_batch=self._micro_batch,
            evaluate=partial(self._evaluate, temperature, timer),
            teacher="teacher" in self._actor.frozen,
            versions=self._actor.versions,
            device=self._device.torch_device,
        )

    def _micro_batch(self, samples: Sequence[TrainSample]) -> MicroBatch:
        return MicroBatch(
            samples,
            share_prompts=self._share_prompts,
            multiple_of=self.config.tensor_model_parallel_size if self.config.splits_sequences else 1,
            context=ContextParallel(
                parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
            ),
        )

    def _head(self, temperature: float) -> Head | ValueReader:
        if self._loss.value_head:
            return ValueReader()
        return Head(vocab_size=self.shape.vocab_size, temperature=temperature)

    def _timer(self) -> PhaseTimer:
        return PhaseTimer(self._device.synchronize, flops_model(self.shape), self._spans, self._who)

    def _packed(
        self,
        batches: Sequence[MicroBatch],
        timer: PhaseTimer,
        phase: str,
        head: Head | ValueReader,
        passes: int,
        chunk: int,
        *,
        replays: bool = False,
        records: bool = False,
    ) -> Iterator[PackedBatch]:
        """The batches on the device, each packed when it is asked for: those before it can be freed by then.

        They are counted under ``phase`` with so many ``passes``, each as costly as a forward pass, for the first chunk.
        """
        for batch in batches:
            packed = batch.pack(self._device.torch_device, replays=replays, records=records)
            if chunk == 0:
                logits = len(packed.targets_M) if isinstance(head, Head) else 0
                timer.count(phase, packed, logits=logits, passes=passes)
            yield packed

    def _evaluate(
        self, temperature: float, timer: PhaseTimer, role: Role | int, batches: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        phase = _PHASES["actor" if isinstance(role, int) else role]
        head = ValueReader() if role == "critic" else self._head(temperature)
        # Reference, teacher and critic are other models, whose routers choose for themselves.
        replays = role == "actor" or isinstance(role, int)
        packed = partial(
            self._packed,
            batches,
            timer,
            phase,
            head,
            1,
            replays=replays,
            records=replays and self.config.use_routing_replay,
        )
        with timer.phase(phase), self._model(role) as model:
            if role != "critic":
                self._hooks(BEFORE_LOG_PROBS, model, PREFIXES.get(str(role), ""))
            return forward_values(model, packed, batches, head)

    def _optimize(
        self,
        role: TrainedModel,
        loss: Loss,
        place: tuple[int, int],
        plan: StepPlan,
        head: Head | ValueReader,
        timer: PhaseTimer,
        shown: ShownSamples | None = None,
    ) -> dict[str, float]:
        """One optimizer step, and its metrics. Its ``place``: the rollout, and its number among the rollout's steps."""
        see = None if shown is None or loss.value_head else shown.see
        replays = role is self._actor
        prefix = "critic_" if role is self._critic else ""
        with role.undone_on_error():
            with timer.phase(f"{prefix}forward_backward"):
                role.zero_gradients()
                self._hooks(BEFORE_TRAIN_STEP, *place, role.wrapped, role.optimizer, role.scheduler)
                batches = [planned.batch for planned in plan.batches]
                # Adapters cost little; the base's weights have no gradient.
                passes = 3 if role.config.lora is None else 2
                packed = partial(
                    self._packed, batches, timer, f"{prefix}forward_backward", head, passes, replays=replays
                )
                metrics = forward_backward(role.wrapped, plan, packed, loss, self.algorithm, head, see=see)
            with timer.phase(f"{prefix}optimizer"):
                check_finite(metrics)
                self._release()
                return metrics | role.step()
