"""`MegatronWorker`: one rank of the training half."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state

from slime_convert.shape import ModelShape
from slime_core.config import AlgorithmConfig
from slime_core.interfaces import WeightChannel
from slime_core.types import Rendezvous, SyncReport, TrainReport, TrainSample, TrainShard
from slime_megatron import sync
from slime_megatron.algorithm import check_algorithm
from slime_megatron.checkpoint import find_checkpoint, reference_source
from slime_megatron.checkpoint_io import load_checkpoint, load_weights, save_checkpoint
from slime_megatron.config import MegatronConfig
from slime_megatron.device import Device
from slime_megatron.errors import TrainingError
from slime_megatron.losses import LOSSES
from slime_megatron.model import PackedGPT, build_model
from slime_megatron.optimizer import build_optimizer, build_scheduler, wrap_model
from slime_megatron.packing import MicroBatch, PackedBatch, trained_samples
from slime_megatron.parallel import join_ranks, leave_ranks, seed_everything
from slime_megatron.plan import Planner, StepPlan
from slime_megatron.step import evaluate, forward_backward


class PhaseTimer:
    """Adds up wall time and computed tokens by phase.

    Args:
        synchronize: Waits until the device's queued work is done.
    """

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


class RankTrainer:
    """The model, its optimizer and, if the loss needs one, the reference model, on one rank.

    Megatron is imported with this module, so the device must have been selected before;
    :class:`slime_megatron.worker.MegatronWorker` sees to that.

    Args:
        config: Parallelism, optimizer, checkpoints.
        algorithm: The loss.
        shape: The model.
        rendezvous: Where the ranks meet.
        device: What this rank computes on.
        resume_from: Checkpoint (or directory of checkpoints) to continue with optimizer and random state. Without
            it, weights come from ``config.load``, then ``config.ref_load``, and are random if neither is given.

    Raises:
        ConfigError: The shape or the number of ranks does not fit the parallel sizes, or no reference is named.
        CheckpointError: A checkpoint is missing or does not fit.
    """

    def __init__(
        self,
        config: MegatronConfig,
        algorithm: AlgorithmConfig,
        shape: ModelShape,
        rendezvous: Rendezvous,
        device: Device,
        resume_from: str | Path | None = None,
    ) -> None:
        self.config = config
        self.algorithm = algorithm
        self.shape = shape
        self._device = device
        self._estimator = check_algorithm(algorithm)
        join_ranks(config, rendezvous, device)
        seed_everything(config.seed)
        weights = config.load or config.ref_load
        self.model = build_model(shape, config, device, random_weights=resume_from is None and weights is None)
        if resume_from is None and weights is not None:
            load_weights(find_checkpoint(weights), shape, self.model)
        self._wrapped = wrap_model(self.model, config)
        self._optimizer = build_optimizer(self._wrapped, config)
        self._scheduler = build_scheduler(self._optimizer, config)
        self._reference = self._build_reference(resume_from) if algorithm.needs_reference else None
        self.iteration: int | None = None
        # Last, because building a model draws from the random states that this restores.
        if resume_from is not None:
            self.iteration = load_checkpoint(
                find_checkpoint(resume_from), config, shape, self.model, self._optimizer, self._scheduler
            )

    def _build_reference(self, resume_from: str | Path | None) -> PackedGPT:
        """A frozen model with ``ref_load``'s weights, else ``load``'s; a random one equals the random policy."""
        source = reference_source(self.config.load, self.config.ref_load, resume_from)
        seed_everything(self.config.seed)
        reference = build_model(self.shape, self.config, self._device, random_weights=source is None)
        if source is not None:
            load_weights(find_checkpoint(source), self.shape, reference)
        reference.requires_grad_(False)
        reference.eval()
        return reference

    @property
    def data_parallel_rank(self) -> int:
        """Which shard of a rollout this rank trains on."""
        return int(parallel_state.get_data_parallel_rank())

    def train(self, shard: TrainShard) -> TrainReport:
        """Train on one rollout: its optimizer steps, in order."""
        timer = PhaseTimer(self._device.synchronize)
        plans = self._planner(shard.temperature, timer).plan(shard)
        steps = [self._optimize(plan, shard.temperature, timer) for plan in plans]
        return TrainReport(
            rollout_id=shard.rollout_id, steps=steps, seconds=dict(timer.seconds), tokens=dict(timer.tokens)
        )

    def log_probs(self, shard: TrainShard) -> list[list[float]]:
        """Log-probs (nats) of every sample's response tokens under the current weights; 0 where the loss mask is 0."""
        timer = PhaseTimer(self._device.synchronize)
        kept = {id(sample) for sample in trained_samples(shard)}
        steps = self._planner(shard.temperature, timer).micro_batches(shard, kept)
        batches = [batch for step in steps for batch in step]
        found: dict[int, list[float]] = {}
        for batch, values_N in zip(batches, self._evaluate(shard.temperature, timer, "actor", batches), strict=True):
            rows = (row.tolist() for row in batch.per_sample(values_N))
            found |= dict(zip(map(id, batch.samples), rows, strict=True))
        return [found.get(id(sample), [0.0] * sample.response_length) for sample in shard.samples]

    def push_weights(self, channel: WeightChannel, version: int) -> SyncReport:
        """Send the current weights through ``channel``: all ranks call it, rank 0 sends."""
        return sync.push_weights(self.model, self.shape, channel, version, self.config.update_weight_buffer_size)

    def save(self, iteration: int) -> str:
        """Write checkpoint ``iteration`` and return its directory."""
        directory = save_checkpoint(self.config, self.shape, self.model, self._optimizer, self._scheduler, iteration)
        self.iteration = iteration
        return str(directory)

    def close(self) -> None:
        """Leave the process groups."""
        leave_ranks()

    def _planner(self, temperature: float, timer: PhaseTimer) -> Planner:
        return Planner(
            algorithm=self.algorithm,
            loss=LOSSES["policy"],
            estimator=self._estimator,
            micro_batch=self._micro_batch,
            evaluate=partial(self._evaluate, temperature, timer),
            device=self._device.torch_device,
        )

    def _micro_batch(self, samples: Sequence[TrainSample]) -> MicroBatch:
        multiple_of = self.config.tensor_model_parallel_size if self.config.splits_sequences else 1
        return MicroBatch(samples, share_prompts=self.config.share_prompts, multiple_of=multiple_of)

    def _packed(self, batches: Iterable[MicroBatch], timer: PhaseTimer, phase: str) -> Iterator[PackedBatch]:
        """The batches on the device, each packed when it is asked for: those before it can be freed by then."""
        return (timer.counted(phase, batch.pack().to(self._device.torch_device)) for batch in batches)

    def _evaluate(
        self, temperature: float, timer: PhaseTimer, role: str, batches: Sequence[MicroBatch]
    ) -> list[torch.Tensor]:
        model = self._wrapped if role == "actor" else self._reference
        phase = "log_probs" if role == "actor" else "ref_log_probs"
        with timer.phase(phase):
            return evaluate(model, self._packed(batches, timer, phase), len(batches), temperature=temperature)

    def _optimize(self, plan: StepPlan, temperature: float, timer: PhaseTimer) -> dict[str, float]:
        """One optimizer step, and its metrics."""
        phase = "forward_backward"
        with timer.phase(phase):
            self._wrapped.zero_grad_buffer()
            self._optimizer.zero_grad()
            packed = self._packed((planned.batch for planned in plan.batches), timer, phase)
            metrics = forward_backward(
                self._wrapped, plan, packed, LOSSES["policy"], self.algorithm, temperature=temperature
            )
        with timer.phase("optimizer"):
            learning_rate = float(self._optimizer.param_groups[0]["lr"])
            _, grad_norm, _ = self._optimizer.step()
            self._scheduler.step(increment=1)
        metrics |= {"grad_norm": float(grad_norm), "lr": learning_rate}
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise TrainingError(
                f"{', '.join(broken)} of an optimizer step are not finite, and the weights are lost; "
                "continue from the last checkpoint with a smaller --lr or --clip-grad"
            )
        return metrics
