"""`MegatronWorker`: one rank of the training half. Importing this imports Megatron: see `slime_megatron.start`."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.errors import ConfigError
from slime_core.interfaces import Role, WeightChannel
from slime_core.ops import AdvantageEstimator
from slime_core.types import Rendezvous, SyncReport, TrainReport, TrainSample, TrainShard, WeightUpdate
from slime_megatron.checkpoint import find_checkpoint, reference_source
from slime_megatron.checkpoint_io import load_checkpoint, load_weights, save_checkpoint
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device, HostCopy, move_back, move_to_host
from slime_megatron.errors import TrainingError
from slime_megatron.losses import loss_named
from slime_megatron.model import Chunks, build_model
from slime_megatron.optimizer import build_optimizer, build_scheduler, check_finite, wrap_model
from slime_megatron.packing import ContextParallel, MicroBatch, PackedBatch, trained_samples
from slime_megatron.pairs import score_row, scored
from slime_megatron.parallel import join_ranks, leave_ranks, seed_everything
from slime_megatron.plan import Planner, StepPlan
from slime_megatron.step import Head, ValueReader, evaluate, forward_backward
from slime_megatron.sync import WeightExport, push_weights


class PhaseTimer:
    """Adds up wall time and computed tokens by phase. ``synchronize`` waits for the device's queued work."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tokens: defaultdict[str, int] = defaultdict(int)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block under ``name``."""
        start = time.perf_counter()
        yield
        self._synchronize()
        self.seconds[name] += time.perf_counter() - start

    def counted(self, name: str, packed: PackedBatch) -> PackedBatch:
        """Count the batch's tokens under ``name``; returns the batch."""
        self.tokens[name] += packed.computed_tokens
        return packed


class MegatronWorker:
    """One rank of the training half: the model, its optimizer and, if the loss needs one, the reference model.

    Implements :class:`slime_core.interfaces.TrainerWorker`; made by :func:`slime_megatron.start.start_worker`, whose
    arguments these are. ``device`` is what the rank computes on, ``estimator`` a user-defined advantage function.
    """

    def __init__(
        self,
        config: MegatronConfig,
        algorithm: AlgorithmConfig,
        shape: ModelShape,
        rendezvous: Rendezvous,
        device: Device,
        *,
        loss: str,
        estimator: AdvantageEstimator | None,
        resume_from: str | Path | None,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.shape = shape
        self._device = device
        self._loss = loss_named(loss)
        self._estimator = estimator
        join_ranks(config, rendezvous, device)
        seed_everything(config.seed)
        weights = config.load or config.ref_load
        self.model = build_model(
            shape,
            config,
            device,
            random_weights=resume_from is None and weights is None,
            value_head=self._loss.value_head,
        )
        if resume_from is None and weights is not None:
            load_weights(find_checkpoint(weights), shape, self.model)
        self._wrapped = wrap_model(self.model, config)
        self._optimizer = build_optimizer(self._wrapped, config)
        self._scheduler = build_scheduler(self._optimizer, config)
        self._reference = self._build_reference(resume_from) if self._loss.needs_reference(algorithm) else None
        self._export: WeightExport | None = None
        self._moved: list[HostCopy] | None = None
        self.iteration: int | None = None
        # Last, because building a model draws from the random states that this restores.
        if resume_from is not None:
            self.load(resume_from)

    def _build_reference(self, resume_from: str | Path | None) -> Chunks:
        """A frozen model with ``ref_load``'s weights, else ``load``'s; a random one equals the random policy."""
        source = reference_source(self.config.load, self.config.ref_load, resume_from)
        seed_everything(self.config.seed)
        reference = build_model(self.shape, self.config, self._device, random_weights=source is None)
        if source is not None:
            load_weights(find_checkpoint(source), self.shape, reference)
        for chunk in reference:
            chunk.requires_grad_(False)
            chunk.eval()
        return reference

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""
        return int(parallel_state.get_data_parallel_rank())

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout: its optimizer steps, in order."""
        self._check_awake("train")
        timer = PhaseTimer(self._device.synchronize)
        plans = self._planner(shard.temperature, timer).plan(shard)
        steps = [self._optimize(plan, shard.temperature, timer) for plan in plans]
        return TrainReport(
            rollout_id=shard.rollout_id, steps=steps, seconds=dict(timer.seconds), tokens=dict(timer.tokens)
        )

    def forward(self, shard: TrainShard, role: Role = "actor") -> list[NDArray[np.float32]]:
        """Log-probs (nats) of every sample's response tokens under the model of ``role``; 0 where the loss mask is 0.

        A reward model gives each sample's score at its last trained token, and 0 elsewhere.

        Raises:
            ConfigError: This worker has no model for the role.
        """
        self._check_awake("forward")
        self._model(role)
        timer = PhaseTimer(self._device.synchronize)
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

    def push(self, update: WeightUpdate, channel: WeightChannel) -> SyncReport:
        """Send the weights that ``update`` names through ``channel``: all ranks call it, rank 0 sends."""
        self._check_awake("push")
        self._gather_weights()
        if self._export is None:
            self._export = WeightExport(self.model, self.shape)
        return push_weights(self._export, channel, update, self.config.update_weight_buffer_size)

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory. It is complete when all ranks have returned."""
        self._check_awake("save")
        self._gather_weights()
        directory = save_checkpoint(self.config, self.shape, self.model, self._optimizer, self._scheduler, iteration)
        self.iteration = iteration
        return str(directory)

    def load(self, directory: str | Path) -> int:
        """Continue a checkpoint (or the newest in a directory of them) with its optimizer and random state."""
        self._check_awake("load")
        checkpoint = find_checkpoint(directory)
        self.iteration = load_checkpoint(
            checkpoint, self.config, self.shape, self.model, self._optimizer, self._scheduler
        )
        return self.iteration

    def sleep(self) -> None:
        """Give device memory back until :meth:`wake`; nothing but that and :meth:`close` may be called meanwhile.

        Gradient buffers are freed. On a GPU, weights and optimizer state move to host memory too (not run on CUDA); on
        a CPU they already are there, and stay.
        """
        self._check_awake("sleep")
        self._gather_weights()
        for chunk in self._wrapped:
            chunk.offload_grad_buffers()
        self._moved = [] if self._device.is_cpu else move_to_host(self.device_tensors())
        torch.cuda.empty_cache()

    def wake(self) -> None:
        """Take the device memory again; the weights and the optimizer's state are as before."""
        if self._moved is None:
            return
        move_back(self._moved)
        for chunk in self._wrapped:
            chunk.restore_grad_buffers()
        self._moved = None

    def close(self) -> None:
        """Leave the process groups."""
        leave_ranks()

    def device_tensors(self) -> Iterator[torch.Tensor]:
        """What stays on the device between calls, without the gradient buffers."""
        for chunk in (*self.model, *(self._reference or ())):
            yield from chunk.parameters()
            yield from chunk.buffers()
        for group in self._optimizer.param_groups:
            yield from group["params"]
        for part in self._optimizer.chained_optimizers:
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if torch.is_tensor(value))

    def _gather_weights(self) -> None:
        """Have all weights of the last step here, which --overlap-param-gather leaves to the next forward pass."""
        if self.config.overlap_param_gather:
            for chunk in self._wrapped:
                chunk.start_param_sync(force_sync=True)

    def _check_awake(self, verb: str) -> None:
        if self._moved is not None:
            raise TrainingError(f"{verb} was called while the trainer sleeps; call wake first")

    def _model(self, role: Role) -> Chunks:
        """The model of a role."""
        model = {"actor": self._wrapped, "reference": self._reference}.get(role)
        if model is None:
            reason = "set --use-kl-loss or --kl-coef" if role == "reference" else "actor and reference are available"
            raise ConfigError(f"this trainer has no {role} model; {reason}")
        return model

    def _planner(self, temperature: float, timer: PhaseTimer) -> Planner:
        return Planner(
            algorithm=self.algorithm,
            loss=self._loss,
            estimator=self._estimator,
            micro_batch=self._micro_batch,
            evaluate=partial(self._evaluate, temperature, timer),
            device=self._device.torch_device,
        )

    def _micro_batch(self, samples: Sequence[TrainSample]) -> MicroBatch:
        return MicroBatch(
            samples,
            share_prompts=self.config.share_prompts,
            multiple_of=self.config.tensor_model_parallel_size if self.config.splits_sequences else 1,
            context=ContextParallel(
                parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
            ),
        )

    def _head(self, temperature: float) -> Head | ValueReader:
        if self._loss.value_head:
            return ValueReader()
        return Head(vocab_size=self.shape.vocab_size, temperature=temperature)

    def _packed(self, batches: Sequence[MicroBatch], timer: PhaseTimer, phase: str) -> Iterator[PackedBatch]:
        """The batches on the device, each packed when it is asked for: those before it can be freed by then."""
        return (timer.counted(phase, batch.pack(self._device.torch_device)) for batch in batches)

    def _evaluate(
        self, temperature: float, timer: PhaseTimer, role: Role, batches: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        phase = "log_probs" if role == "actor" else "ref_log_probs"
        with timer.phase(phase):
            packed = partial(self._packed, batches, timer, phase)
            return evaluate(self._model(role), packed, batches, self._head(temperature))

    def _optimize(self, plan: StepPlan, temperature: float, timer: PhaseTimer) -> dict[str, float]:
        """One optimizer step, and its metrics."""
        phase = "forward_backward"
        with timer.phase(phase):
            for chunk in self._wrapped:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            packed = partial(self._packed, [planned.batch for planned in plan.batches], timer, phase)
            head = self._head(temperature)
            metrics = forward_backward(self._wrapped, plan, packed, self._loss, self.algorithm, head)
        with timer.phase("optimizer"):
            learning_rate = float(self._optimizer.param_groups[0]["lr"])
            check_finite(metrics)
            _, grad_norm, _ = self._optimizer.step()
            self._scheduler.step(increment=1)
        return metrics | {"grad_norm": float(grad_norm), "lr": learning_rate}
